"""Growth of error through the layers of a live model whose queries attend to n sampled keys (`limitlens.depth`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import pd
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress, check_number
from limitlens.interventions import harness
from limitlens.interventions.harness import plus_minus
from limitlens.interventions.reader import Reader
from limitlens.interventions.sampled_keys import SampledKeys, check_keys, check_sampling
from limitlens.models import LoadedModel, Windows, intervene, open_corpus
from limitlens.models.windows import check_special
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, View, line
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for

RUNS = ("resampled", "fixed")  # runs that sample in all layers: keys drawn anew in each layer, or the same in all
INCLUDE = ("fixed", "single")  # runs that may be added to "resampled"
ERRORS = ("error", "mean_error", "covariance_error")  # of hidden states; of their mean, covariance in a document
SINGLE = ("sum_of_single", "over_sum", "amplification")  # comparison with runs that sample in single layers
PREDICTIONS = ("logits", "divergence", "agreement", "log_perplexity")
HEADINGS = {
    "run": "keys of layers", "mean_error": "error of the mean", "covariance_error": "error of the covariance",
    "sum_of_single": "sum of single layers", "over_sum": "error / that sum", "logits": "logits, relative error",
    "divergence": "KL, nats", "agreement": "same top token", "log_perplexity": "ln perplexity",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class DepthRun(harness.DocumentResult):
    """Result of `limitlens.depth`: errors of a model with n sampled keys per query against the unchanged model."""

    kind, file, held = "depth", "layers", ("squares", "logits")
    model: str
    corpus: str
    causal: bool
    window: int  # tokens of a document
    documents: int
    sizes: tuple[int, ...]  # numbers of keys
    key_sharing: str
    include: tuple[str, ...]
    replicates: int
    seed: int
    squares: Array  # (documents, passes, sizes, layers, ERRORS): |change|²/|original|², a mean over tokens
    logits: Array  # (documents, passes, sizes, PREDICTIONS), the logits' error squared; empty for an encoder
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def passes(self) -> list[str]:
        """Names of the runs with sampled keys: those that sample in all layers, then, if included, one per layer."""
        single = range(self.squares.shape[3] * ("single" in self.include))
        return [*RUNS[: 1 + ("fixed" in self.include)], *(f"layer {layer} alone" for layer in single)]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table of relative errors of hidden states, their mean and covariance, by run, number of keys and layer.

        If layers were also sampled one at a time, the error e of hidden states is compared with the root of the summed
        e² of these runs. Amplification of a layer: (e after it) / √((e before it)² + (e if it alone samples)²).
        """
        layers = self.squares.shape[3]
        single = "single" in self.include

        def statistic(mean: Array) -> Array:
            if single:
                square = mean[..., 0]
                total = square[-layers:].sum(0) + 0 * square
                before = np.pad(square[..., :-1], [(0, 0), (0, 0), (1, 0)])
                added = np.einsum("lsl->sl", square[-layers:])
                more = np.stack([total, square / total, square / (before + added)], -1)
                mean = np.concatenate([mean, more], -1)
            return np.sqrt(mean)

        names, axes = (*ERRORS, *SINGLE * single), {"run": self.passes, "keys": self.sizes, "layer": range(layers)}
        return harness.estimate_table(self.squares, names, statistic, **axes)

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """Table of changes of a decoder's predictions, one row per run and number of keys."""

        def statistic(mean: Array) -> Array:
            return np.concatenate([np.sqrt(mean[..., :1]), mean[..., 1:]], -1)  # the first is a squared error

        return harness.estimate_table(self.logits, PREDICTIONS, statistic, run=self.passes, keys=self.sizes)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables that a run folder stores, by name: errors by layer and, for a decoder, changes of predictions."""
        return {self.file: self.table} | ({"predictions": self.predictions} if self.causal else {})

    def view(self) -> View:
        """Report of the result: errors by layer, amplification of errors by a layer, and changes of predictions."""
        keys = self.sizes[len(self.sizes) // 2]
        every = self.table[self.table["run"].isin(RUNS)]
        ends = every[every["layer"] == every["layer"].max()]
        end = ends[ends["keys"] == keys].iloc[0]
        resampled = every[every["run"] == RUNS[0]]
        errors = harness.curves(resampled, "layer", "error", "keys", unit=" keys")
        axes = Axis("layer", whole=True), Axis("relative error of hidden states", log=True)
        figures = [Figure("Error by layer (resampled)", *axes, errors, height=380)]
        finding = f"With {keys} keys the relative error behind the last layer is {plus_minus(end, 'error')}."
        if "single" in self.include:
            finding += f" The errors of single layers sum to {plus_minus(end, 'sum_of_single')} in squares, "
            finding += f"and the error is {plus_minus(end, 'over_sum')} times that sum."
            for place, (_, rows) in enumerate(resampled.groupby("keys")):
                sums = rows["layer"], rows["sum_of_single"], errors[place].colour
                errors.append(line("sum of single layers", *sums, "dashed", listed=place == 0))
            later = every[(every["keys"] == keys) & (every["layer"] > 0)]
            amplified = harness.curves(later, "layer", "amplification", "run")
            axes = axes[0], Axis("error behind / (before and added)")
            guides = [Guide("no amplification", y=1)]
            figures.append(Figure(f"Amplification, {keys} keys", *axes, amplified, guides, height=380))
        verdict = (
            f"Every document was read unchanged and with {self.sizes[0]} to {self.sizes[-1]} random keys for each "
            "query; errors are relative errors of the hidden states behind each layer.",
            finding,
            "Add squared errors of single layers where the error over their sum is 1 within its standard error.",
        )
        lead = (
            "Root mean square of |ĥ − h| / |h| over tokens, documents and draws ± standard errors. Resampled: keys are "
            "drawn anew in every layer; fixed: the same keys in all layers. Sum of single layers: root of the summed "
            "squared errors when one layer at a time samples. Amplification: error behind a layer over the root of the "
            "squared error that enters it plus the squared error that it adds."
        )
        blocks: list[Block] = [Row(figures)]
        blocks.append(harness.shown_table("Behind the last layer", HEADINGS, ends.drop(columns="layer")))
        if self.causal:
            rows = self.predictions[self.predictions["run"].isin(RUNS)]
            blocks.append(harness.shown_table("Predictions", HEADINGS, rows))
        trust = (
            "a causal query always keeps itself and the first token, which counts in no error, and all keys where it "
            "sees no more than n",
            "log(c/m) is added to the scores of m keys sampled from c, so that keys that are always kept keep their "
            "share of the weight",
        )
        size = f"{self.documents} documents of {self.window} tokens · {self.replicates} draws each"
        subtitle = f"{self.corpus} · {size} · keys of queries: {self.key_sharing}"
        sections = [Section("Error by layer", lead, blocks)]
        title = f"{self.model} with n sampled keys per query"
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=trust)


def depth(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: str | Sequence[int] = "16:256:5", *,
    key_sharing: str = "shared", include: str | Sequence[str] = INCLUDE, replicates: int = 1, documents: int = 16,
    window: int | None = None, special: str = "auto", seed: int = 0, device: str = "auto", yes: bool = False,
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> DepthRun:  # fmt: skip
    """Measure how the error of attention over n sampled keys grows through the layers of a model.

    Ctrl-C keeps the finished documents; with a `checkpoint`, calling again continues after them.

    Parameters
    ----------
    keys : numbers of keys that each query attends to
    key_sharing : "shared" (the queries of a document attend to the same keys) or "own" (each query draws its own)
    include : further runs. "fixed" uses the same keys in all layers, not new ones in each. "single" samples in one
        layer at a time, to compare the sum of these errors with the joint error.
    replicates : random draws per document; a few suffice, since standard errors are over documents
    window, special : tokens of a document (by default the model's positions, at most 512), and its special tokens

    >>> made = ll.depth(model, text, [4, 16], documents=2, window=32)
    >>> len(made.table)
    30
    """
    given = (include.split(",") if include != "none" else []) if isinstance(include, str) else list(include)
    if not set(given) <= set(INCLUDE):
        raise InputError(f"include is {', '.join(given)}; expected none or some of {', '.join(INCLUDE)}")
    included = tuple(name for name in INCLUDE if name in given)
    check_sampling(keys, key_sharing, seed)
    check_number("documents", documents, "at least 2, for the standard errors", low=2)
    check_number("replicates", replicates, "at least 1 draw per document", low=1)
    check_special(special)
    text = open_corpus(corpus)
    loaded = harness.open_model(model, device, head=True)
    length = window or loaded.window(harness.WINDOW)
    sizes = check_keys(keys, length, loaded.causal)
    reader = Reader(loaded) if loaded.causal else None
    windows = Windows(loaded, text, length=length, tokens=documents * length, special=special)
    stack: Any = loaded.model.base_model
    layers = stack.config.get_text_config().num_hidden_layers
    passes: list[dict[str, Any]] = [{}, *[{"fixed": True}] * ("fixed" in included)]
    passes += [{"layers": (layer,)} for layer in range(layers * ("single" in included))]
    forwards = 1 + len(passes) * len(sizes) * replicates  # per document
    remedy = "ask for fewer documents, keys or included runs, or pass yes=True"
    cost = forward_cost(loaded.model, forwards * windows.tokens, windows.length)
    check_cost(f"depth of {loaded.name}", *cost, yes=yes, remedy=remedy)

    def document(index: int) -> dict[str, Array]:
        (ids,) = windows.batches(1, [index])
        ids = ids.to(stack.device)
        generator = generator_for(seed, index)
        draws = [(options, size) for options in passes for size in sizes for _ in range(replicates)]
        samplers = (SampledKeys(size, generator, key_sharing=key_sharing, **options) for options, size in draws)
        variants = (intervene(stack, keys=sampler) for sampler in samplers)
        with torch.inference_mode():
            whole = _read(stack, reader, ids)
            read = harness.read_under(variants, lambda: _read(stack, reader, ids))
            rows = [_compare(whole, cut, ids[0, 2:, None]) for cut in read]
        means = np.reshape(rows, (len(passes), len(sizes), replicates, -1)).mean(2)
        squares = means[..., : layers * len(ERRORS)].reshape(*means.shape[:2], layers, len(ERRORS))
        return {"squares": squares, "logits": means[..., layers * len(ERRORS) :]}

    job: dict[str, Any] = {"job": "depth", "weights": loaded.digest, "text": windows.sha256}
    job |= {"keys": sizes, "seed": seed, "key_sharing": key_sharing, "include": included}
    job |= {"replicates": replicates, "window": length, "special": special}
    options: dict[str, Any] = {"tokens": length * forwards, "fewest": 2, "progress": progress}
    rows = (checkpoint or Checkpoint()).each(job, windows.count, document, **options)
    done = len(rows["squares"])
    about = loaded.name, corpus, loaded.causal, length, done, sizes, key_sharing, included, replicates, seed
    return DepthRun(*about, **rows, interrupted=done < windows.count, warnings=tuple(windows.warnings))


def _read(stack: Any, reader: Reader | None, ids: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Hidden states with their mean and covariance by layer, and a decoder's centred logits and log-probabilities."""
    options = {} if reader is None else {"use_cache": False}
    hidden = stack(input_ids=ids, output_hidden_states=True, **options).hidden_states
    first = int(reader is not None)  # the first token of a decoder sees only itself
    vectors = []
    for layer in hidden[1:]:
        states = layer[0, first:]
        mean = states.mean(0, keepdim=True)
        covariance = (states - mean).mT @ (states - mean) / len(states)
        vectors += [states, mean, covariance.view(1, -1)]
    if reader is None:
        return vectors, None
    logits = reader.logits(states)
    return [*vectors, logits - logits.mean(-1, keepdim=True)], logits.log_softmax(-1)


def _compare(whole: Any, cut: Any, targets: Tensor) -> Array:
    """Squared relative errors by layer, then changes of predictions; `targets` (n − 2, 1) are the tokens to predict."""
    pairs = zip(whole[0], cut[0], strict=True)
    numbers = [((other - own).square().sum(-1) / own.square().sum(-1)).mean() for own, other in pairs]
    if whole[1] is not None:
        logs, other_logs = whole[1], cut[1]
        numbers.append((logs.exp() * (logs - other_logs)).sum(-1).mean())
        numbers.append((logs.argmax(-1) == other_logs.argmax(-1)).to(logs.dtype).mean())
        numbers.append(logs[:-1].gather(-1, targets).mean() - other_logs[:-1].gather(-1, targets).mean())
    return np.asarray(torch.stack(numbers).double().cpu())
