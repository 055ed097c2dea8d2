"""Compressed KV cache against the full one: equal texts, bytes, speed, and plans for other prompt lengths.

`python -m bench shrink` on a CPU runs smollm2 in about 15 minutes of processor time; SHRINK=equal,lengths names
parts to run, the others keep their numbers. KVPRESS=/path/to/python adds kvpress 0.5.5 in its own environment.
`python -m bench.shrink MODEL FORMAT CORPUS SHORT,LONG TEXT` on a GPU runs the parts `equal` and `lengths` for another
model and other lengths, as the key `gpu_MODEL`: `python -m bench.shrink qwen bfloat16 FILE 4096,10000 4096`. The folder
PLANS keeps the plans. `bench.shrink_gpu` measures speed and memory there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import limitlens as ll
from bench.timing import alternate
from limitlens.attention.kernels import attend_cpu
from limitlens.attention.ragged import RaggedRows
from limitlens.cache.compressed import budgets_for, layer_bytes
from limitlens.cache.cut import BEHIND, cut_windows, window_order
from limitlens.cache.plan import Plan
from limitlens.cache.reconstruction import repeat_attention
from limitlens.models import ALIASES, LoadedModel, capture, load
from limitlens.models.intervene import PolicyHook, kv_shape
from limitlens.record import read_run
from limitlens.statistics.documents import paired_mean

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / "shrink.json"
FOLDER = Path(os.environ.get("PLANS", "runs/shrink"))
SHARE = 0.25
NEW = 16  # new tokens of a prompt
ROUNDS = 2
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Setting:
    """Model and lengths of prompts: smollm2 on a CPU."""

    model: str = "smollm2"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    corpus: str = "stdlib-docs"
    short: int = 2048  # tokens for which plans are made
    long: int = 4096  # speed is measured with the longer prompt
    windows: tuple[tuple[int, int], tuple[int, int]] = ((4, 2), (2, 1))  # that the plans are chosen and checked on
    text: int = 512  # tokens of the prompts whose texts are compared
    prompts: int = 20
    documents: int = 8


CPU = Setting()


def planned(loaded: LoadedModel, context: int, given: Setting = CPU) -> Plan:
    """The plan for a quarter of the cache at a prompt length, read from its folder if it was made before."""
    folder = FOLDER / f"plan-{context}"
    if not (folder / "run.json").is_file():
        began, windows = time.perf_counter(), given.windows[context != given.short]
        ll.plan(loaded, given.corpus, total=SHARE, context=context, windows=windows).save(folder)
        print(f"  plan for {context:,} tokens after {time.perf_counter() - began:.1f} s", flush=True)
    return read_run(folder).result(Plan)  # type: ignore[no-any-return]


def texts(loaded: LoadedModel, plan: Plan, length: int, count: int) -> list[Tensor]:
    """Windows (1, length + BEHIND) of the text that the plan was made on, which it has not used if lengths agree."""
    windows = cut_windows(loaded, plan.corpus, "auto", length)
    order = window_order(windows, plan.seed)[plan.fitted + plan.checked :]
    assert len(order) >= count, f"{len(order)} windows"
    return [next(windows.batches(1, [index])).to(loaded.model.device) for index in order[:count]]


def late() -> bool:
    """Whether the time SECONDS is over, if it is given: then parts end with what they have."""
    return time.perf_counter() - STARTED > float(os.environ.get("SECONDS", "inf"))


def hook_of(loaded: LoadedModel, plan: Plan, length: int) -> PolicyHook:
    """The plan's eviction as a mask, at another prompt length than its own."""
    return PolicyHook(plan.policies, budgets_for(plan, length), length, plan.seed, kv_shape(loaded.model))


def equal(loaded: LoadedModel, given: Setting = CPU) -> dict[str, Any]:
    """Greedy texts of the compressed cache and of the masked trial: how many are equal, and how close their logits."""
    plan, model = planned(loaded, given.short, given), loaded.model
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def generated(ids: Tensor) -> Any:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]

    same, apart, other = 0, [], 0
    kept = sum(map(sum, budgets_for(plan, given.text))) / (given.text * sum(map(len, plan.budgets)))
    for row in texts(loaded, plan, given.text, given.prompts):
        if late():
            break
        ids = row[:, : given.text]
        with torch.inference_mode():
            full = generated(ids)
            with ll.intervene(loaded, keys=hook_of(loaded, plan, given.text)):
                masked = generated(ids)
            with ll.apply(loaded, plan):
                small = generated(ids)
        same += torch.equal(masked.sequences, small.sequences)
        other += not torch.equal(full.sequences, small.sequences)
        first = torch.stack(masked.logits[:2]), torch.stack(small.logits[:2])  # of the same tokens
        apart.append(float((first[0] - first[1]).norm() / first[0].norm()))
        print(f"  prompt {len(apart)}: {same} equal, {apart[-1]:.1e}", flush=True)
    return {"prompt": given.text, "share": kept, "new_tokens": NEW, "prompts": len(apart), "equal": same,
            "logit_difference": max(apart), "different_from_full_cache": other}  # fmt: skip


def decoded(loaded: LoadedModel, ids: Tensor, new: int = NEW) -> dict[str, float]:
    """Seconds to read a prompt and tokens a second after it, greedy, with the cache that the model now has.

    On a CPU seconds are processor time, which depends little on other load.
    """
    model: Any = loaded.model

    def now() -> float:
        if ids.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    with torch.inference_mode():
        started = now()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        read = now()
        cache, size = out.past_key_values, sum(map(layer_bytes, out.past_key_values.layers))
        for _ in range(new):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=cache)
        ended = now()
    return {"prefill_seconds": read - started, "tokens_per_second": new * len(ids) / (ended - read), "bytes": size}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def speed(loaded: LoadedModel) -> dict[str, Any]:
    """Tokens a second, prefill and eviction at 4,096 tokens: full cache and compressed cache in alternating rounds.

    All on one thread, in processor time.
    """
    plan = planned(loaded, CPU.short)  # whose shares serve a prompt of twice the length
    (ids,) = texts(loaded, plan, CPU.long, 1)
    ids, found = ids[:, : CPU.long], {"full": [], "compressed": []}
    for _ in range(ROUNDS):
        for name, rows in found.items():
            block = ll.apply(loaded, plan) if name == "compressed" else nullcontext()
            with patch("time.perf_counter", time.process_time), block as applied:  # of eviction too
                rows.append(decoded(loaded, ids))
            if applied is not None:
                rows[-1]["eviction_seconds"] = applied.seconds
            print(f"  {name}: {rows[-1]}", flush=True)
    small = medians(found["compressed"])
    kept = budgets_for(plan, CPU.long)
    planned_bytes = sum(sum(row) * size for row, size in zip(kept, plan.entry_bytes, strict=True))
    with torch.inference_mode():
        cache = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    began = time.process_time()
    repeat_attention(loaded, cache, ids)
    second = time.process_time() - began
    return {
        "prompt": CPU.long, "new_tokens": NEW, "rounds": ROUNDS, "share": plan.total.share,
        "plan_bytes": planned_bytes, "full": medians(found["full"]), "compressed": small,
        "bytes_of_plan": small["bytes"] / planned_bytes,
        "second_pass_seconds": second, "second_pass_of_prefill": second / medians(found["full"])["prefill_seconds"],
        "eviction_of_prefill": small["eviction_seconds"] / small["prefill_seconds"],
        "speed_of_full": small["tokens_per_second"] / medians(found["full"])["tokens_per_second"],
    }  # fmt: skip


def kvpress(loaded: LoadedModel) -> dict[str, Any]:
    """The prompt of `speed` with kvpress's uniform compression at the plan's share, in an environment with kvpress."""
    plan, weights = planned(loaded, CPU.short), ALIASES["smollm2"].locate()
    ids = texts(loaded, plan, CPU.long, 1)[0][:, : CPU.long]
    script = str(Path(__file__).with_name("kvpress_speed.py"))
    command = [os.environ["KVPRESS"], script, str(weights), str(plan.total.share), str(NEW), str(ROUNDS)]
    answer = subprocess.run(command, input=json.dumps(ids.tolist()), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    print(f"  {found}", flush=True)
    return found


def layout(loaded: LoadedModel) -> dict[str, Any]:
    """One layer's decoding attention on a CPU: rows grouped by length against rows padded to one length."""
    plan, found = planned(loaded, CPU.short), {}
    rng = np.random.default_rng(0)
    layer = max(range(len(plan.budgets)), key=lambda i: np.std(plan.budgets[i]))  # where budgets differ most
    for case, lengths in (
        ("1", [CPU.long]),
        ("8", [CPU.long] * 8),
        ("8 of different lengths", rng.integers(2048, 4097, 8)),
    ):
        counts = [budgets_for(plan, int(n))[layer] for n in lengths]
        kept = [row[head] for head in range(len(counts[0])) for row in counts]
        rows = RaggedRows(torch.randn(sum(kept), 64), torch.randn(sum(kept), 64), tuple(kept), len(counts))
        heads = len(counts[0])
        rows.append(torch.randn(len(counts), heads, 1, 64), torch.randn(len(counts), heads, 1, 64), CPU.long)
        query, longest = torch.randn(len(counts), 3 * heads, 1, 64), max(kept) + 1
        grouped = query.view(len(counts), heads, 3, 64).transpose(0, 1).reshape(-1, 3, 64) / 8
        there = torch.arange(longest) < (rows.end - rows.start)[:, None]
        bias = torch.where(there, 0.0, float("-inf"))[:, None]
        place = (rows.start[:, None] + torch.arange(longest)).clamp_max(len(rows.key) - 1)
        key, value = rows.key[place], rows.value[place]
        works: dict[str, Callable[[], Any]] = {
            "grouped": lambda rows=rows, query=query: rows.attend(query, scale=1 / 8),
            "padded": lambda args=(grouped, key, value, bias): attend_cpu(*args),  # all rows as long as the longest
            "padded when used": lambda r=rows, g=grouped, p=place, b=bias: attend_cpu(g, r.key[p], r.value[p], b),
        }
        times = {name: 1e6 * taken for name, taken in alternate(60, **works).items()}
        found[case] = {
            "kept": kept,
            "microseconds": times,
            "padded_memory": longest * len(kept) / (sum(kept) + len(kept)),
        }
        print(f"  batch {case}: {times}", flush=True)
    return {"layer": layer, "batch": found}


def lengths(loaded: LoadedModel, given: Setting = CPU) -> dict[str, Any]:
    """KL from the full cache at the longer prompt, of a plan made at the shorter one and of one made at it.

    Both keep equal shares.
    """
    prompt = given.long
    plans = {context: planned(loaded, context, given) for context in (given.short, prompt)}
    model, rows = loaded.model, []
    for ids in texts(loaded, plans[prompt], prompt, given.documents):
        if late():
            break
        hooks = {context: hook_of(loaded, plan, prompt) for context, plan in plans.items()}
        with torch.inference_mode():
            with capture(model, lambda call, hooks=hooks: [hook(call) for hook in hooks.values()] and None):
                cache = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values

            def predicted(cache: Any = cache, ids: Tensor = ids) -> Tensor:
                out = model(input_ids=ids[:, prompt:], past_key_values=deepcopy(cache))
                return out.logits[0].float().log_softmax(-1)

            full, row = predicted(), []
            for hook in hooks.values():
                with ll.intervene(loaded, keys=hook):
                    row.append(float((full.exp() * (full - predicted())).sum(-1).mean()))
        rows.append(row)
        print(f"  document {len(rows)}: {row}", flush=True)
    table = np.array(rows)
    kl = {str(context): vars(paired_mean(table[:, i])) for i, context in enumerate(plans)}
    kept = {str(context): sum(map(sum, budgets_for(plan, prompt))) for context, plan in plans.items()}
    return {"prompt": prompt, "behind": BEHIND, "documents": len(rows), "entries": kept, "kl": kl,
            "difference": vars(paired_mean(table[:, 0] - table[:, 1]))}  # fmt: skip


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "equal": equal, "speed": speed, "kvpress": kvpress, "layout": layout, "lengths": lengths,
}  # fmt: skip


def run() -> dict[str, Any]:
    """The named parts on the CPU; the others keep what the file holds."""
    old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    loaded = load("smollm2", device="cpu", head=True)
    torch.set_num_threads(1)
    every = [name for name in PARTS if name != "kvpress" or "KVPRESS" in os.environ]
    for name in os.environ.get("SHRINK", ",".join(every)).split(","):
        print(f" {name}", flush=True)
        old[name] = PARTS[name](loaded)
        RESULTS.write_text(json.dumps(old, indent=2) + "\n")  # what is measured is kept if a later part fails
    return {name: old[name] for name in old if name != "host"}


def run_on_gpu(model: str, dtype: str, corpus: str, both: str, text: str) -> None:
    """Parts that are no timings, for a model on a GPU."""
    short, long = map(int, both.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = Setting(model, device, getattr(torch, dtype), corpus, short, long, ((2, 1), (1, 1)), int(text), 6, 12)
    loaded = load(model, device=device, dtype=given.dtype, head=True)
    old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    found = old[f"gpu_{Path(model).name}"] = {"device": device, "command": " ".join(sys.argv[1:])}
    for name in os.environ.get("SHRINK", "equal,lengths").split(","):
        print(f" {name}", flush=True)
        found[name] = PARTS[name](loaded, given)
        RESULTS.write_text(json.dumps(old, indent=2) + "\n")


if __name__ == "__main__":
    run_on_gpu(*sys.argv[1:])
