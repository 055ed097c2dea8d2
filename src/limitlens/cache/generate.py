"""Text from a model with a compressed KV cache (`limitlens generate`), with bytes, speed and peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from limitlens.arrays import pd
from limitlens.attention.kernels import choose_device
from limitlens.cache.compression import apply
from limitlens.cache.layers import check_decoder
from limitlens.cache.plan import Plan
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import InputError, Progress, check_number
from limitlens.models import LoadedModel, load
from limitlens.models.catalog import dtype_of
from limitlens.models.windows import special_tokens
from limitlens.record import read_run
from limitlens.report.view import Section, Table, Text, View
from limitlens.results import Result


@dataclass(frozen=True, eq=False, repr=False)
class Generation(Result):
    """Result of `limitlens.generate`: text from a model with the cache of a plan, bytes of the cache, and speed."""

    kind, file, command = "generation", "generation", "generate MODEL"
    model: str
    text: str  # the new text, without the prompt
    prompt_tokens: int
    new_tokens: int
    cache_bytes: Mapping[str, int]  # of the prompt: "full" without the plan, and "kept"
    tokens_per_second: float | None  # after the first new token; None for a single one
    prefill_seconds: float  # until the first new token, eviction included
    eviction_seconds: float  # of them to select and pack entries
    peak_memory: int  # bytes: on CUDA of its allocator, on a CPU of the whole process
    interrupted: bool = False  # by Ctrl-C; the text so far is kept

    @property
    def table(self) -> pd.DataFrame:
        """Table of one row: tokens, bytes of the cache, seconds and peak memory."""
        sizes = {f"cache_bytes_{name}": size for name, size in self.cache_bytes.items()}
        left_out = ("model", "text", "cache_bytes", "interrupted", "made")
        return pd.DataFrame([sizes | {name: value for name, value in vars(self).items() if name not in left_out}])

    def view(self) -> View:
        """Report of the generation: the new text, and a table of bytes and speed."""
        full, kept = self.cache_bytes["full"], self.cache_bytes["kept"]
        speed = "unknown" if self.tokens_per_second is None else f"{self.tokens_per_second:.1f}"
        rows = [(str(name).replace("_", " "), value) for name, value in self.table.iloc[0].to_dict().items()]
        return View(
            title=f"Text from {self.model} with a compressed cache",
            subtitle=f"{self.prompt_tokens:,} tokens of prompt, {self.new_tokens:,} new tokens",
            verdict=(f"{self.model} continues a prompt of {self.prompt_tokens:,} tokens; {speed} tokens a second.",
                     f"Its cache keeps {kept / 1e6:.1f} of {full / 1e6:.1f} MB ({kept / full:.1%}) of the prompt.",
                     "Run limitlens trial on the plan to compare its predictions with those of the full cache."),
            sections=[Section("New text", "", [Text(self.text.splitlines() or [""])]),
                      Section("Cost", "", [Table("Cost", ("quantity", "value"), rows)])],
        )  # fmt: skip


class _Clock:
    """Streamer for `generate` of transformers that notes the prompt and each new token, and when they came."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.tokens: list[list[int]] = []
        self.times: list[float] = []
        self.progress, self.total = progress, total

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens.tolist())
        self.times.append(time.perf_counter())
        self.progress(len(self.times) - 1, self.total)

    def end(self) -> None:
        """Do nothing: called after the last token."""


def generate(
    model: str | LoadedModel, plan: Plan | str | Path, prompt: str | Path, *, max_new_tokens: int = 200,
    force: bool = False, device: str = "auto", progress: Progress = lambda done, total: None,
) -> Generation:  # fmt: skip
    """Continue the text of a file with a decoder whose KV cache keeps only the entries of a plan; greedy decoding.

    `plan` is a plan or its folder, and `force` allows a model with other weights than the plan's.

    >>> made = ll.plan(model, text, total=0.5, context=64, windows=(2, 2))
    >>> result = ll.generate(model, made, prompt, max_new_tokens=4)
    >>> result.new_tokens
    4
    """
    check_number("max_new_tokens", max_new_tokens, "at least 1", low=1)
    made: Plan = read_run(plan).result(Plan) if isinstance(plan, str | Path) else plan
    try:
        text = Path(prompt).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"the prompt {str(prompt)!r} cannot be read ({error}); expected a text file") from None
    asked: dict[str, Any] = {"device": choose_device(device), "dtype": dtype_of(made.dtype)}
    loaded = model if isinstance(model, LoadedModel) else load(model, head=True, **asked)
    check_decoder(loaded)
    ids = [*special_tokens(loaded)[0], *loaded.tokenizer(text, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise InputError(f"the prompt {str(prompt)!r} is empty; expected some text")
    if loaded.positions is not None and len(ids) + max_new_tokens > loaded.positions:
        lengths = f"the prompt has {len(ids):,} tokens and max_new_tokens is {max_new_tokens:,}"
        raise InputError(f"{lengths}; expected at most {loaded.positions:,} together, the positions of {loaded.name}")
    check_cost("the text", *forward_cost(loaded.model, float(len(ids) + max_new_tokens), len(ids)), yes=True)
    inputs, cuda = torch.tensor([ids], device=loaded.model.device), loaded.model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    clock, generator = _Clock(progress, max_new_tokens), cast(Any, loaded.model)
    interrupted = False
    with apply(loaded, made, force=force) as applied:
        try:
            generator.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens,
                               do_sample=False, streamer=clock)  # fmt: skip
        except KeyboardInterrupt:
            if len(clock.tokens) < 2:
                raise
            interrupted = True
    times, new = clock.times, [token for tokens in clock.tokens[1:] for token in tokens]
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Generation(
        loaded.name, loaded.tokenizer.decode(new, skip_special_tokens=True), len(ids), len(new),
        {"full": applied.full_bytes, "kept": applied.kept_bytes},
        (len(new) - 1) / (times[-1] - times[1]) if len(new) > 1 else None,
        times[1] - times[0], applied.seconds, peak, interrupted,
    )  # fmt: skip
