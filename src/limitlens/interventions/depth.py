"""Error through the layers of a live model whose queries attend to n sampled keys (`limitlens.depth`).

The unchanged model reads every document, and so does the model with n keys per query (`interventions.sampled_keys`).
Keys are sampled in all layers, drawn anew in each layer ("resampled") or the same keys in all layers ("fixed"), or in
one layer at a time ("single"). Hidden states behind each layer, and a decoder's predictions, are compared.
"""

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
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.interventions.harness import (
    WINDOW,
    DocumentResult,
    compare_variants,
    curves,
    estimate_table,
    open_model,
    shown_table,
)  # fmt: skip
from limitlens.interventions.reader import Reader
from limitlens.interventions.sampled_keys import SampledKeys, check_key_sharing, check_keys
from limitlens.models import LoadedModel, Windows, intervene, open_corpus
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, View, line
from limitlens.sampling.cells import parse_sizes
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for
from limitlens.statistics.documents import Statistic

RUNS = ("resampled", "fixed")  # runs that sample in all layers: keys drawn anew in each layer, or the same in all
INCLUDE = ("fixed", "single")  # runs that may be added to "resampled"
ERRORS = ("error", "mean_error", "covariance_error")  # of hidden states; of their mean, covariance in a document
PREDICTIONS = ("logits", "divergence", "agreement", "log_perplexity")
HEADINGS = {
    "run": "keys of layers", "mean_error": "error of the mean", "covariance_error": "error of the covariance",
    "sum_of_single": "sum of single layers", "over_sum": "error / that sum", "logits": "logits, relative error",
    "divergence": "KL, nats", "agreement": "same top token", "log_perplexity": "ln perplexity",
}  # fmt: skip

State = tuple[Tensor, Tensor, Tensor]  # hidden states (n, d), their mean (d,) and covariance (d, d)
Prediction = tuple[Tensor, Tensor, Tensor]  # centred logits and log-probabilities (n, vocabulary), mean nats a token


@dataclass(frozen=True, eq=False, repr=False)
class DepthRun(DocumentResult):
    """Result of `limitlens.depth`: errors of a model with n sampled keys per query against the unchanged model.

    Squared errors are relative: |ĥ − h|²/|h|² averaged over tokens, and |difference|²/|original|² for the mean and
    covariance of the hidden states of a document. `passes` names the runs on the second axis of the arrays.
    """

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
    squares: Array  # (documents, passes, sizes, layers, ERRORS): squared relative errors
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
        """Table of errors against the unchanged model: one row per run, number of keys and layer.

        Errors are those of hidden states, of their mean and of their covariance. If layers were also sampled one at a
        time, further columns use the error e of hidden states: s = √(sum of e² over the single-layer runs), e/s, and
        the amplification of a layer, (e behind the layer) / √((e before the layer)² + (e of that layer alone)²).
        """
        layers = self.squares.shape[3]
        numbers: dict[str, tuple[Statistic, Array]] = {
            name: (np.sqrt, self.squares[..., at]) for at, name in enumerate(ERRORS)
        }
        if "single" in self.include:

            def summed(mean: Array) -> Array:
                return np.asarray(np.sqrt(mean[-layers:].sum(0) + 0 * mean))

            def amplified(mean: Array) -> Array:
                added = np.einsum("lsl->sl", mean[-layers:])
                return np.asarray(np.sqrt(mean / (np.pad(mean[..., :-1], [(0, 0), (0, 0), (1, 0)]) + added)))

            squares = self.squares[..., 0]
            numbers["sum_of_single"] = summed, squares
            numbers["over_sum"] = lambda mean: np.sqrt(mean) / summed(mean), squares
            numbers["amplification"] = amplified, squares
        return estimate_table(numbers, run=self.passes, keys=self.sizes, layer=range(layers))

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """Table of a decoder's changed predictions, one row per run and number of keys; no rows for an encoder."""
        numbers: dict[str, tuple[Statistic, Array]] = {
            name: (np.asarray if at else np.sqrt, self.logits[..., at])
            for at, name in enumerate(PREDICTIONS[: self.logits.shape[-1]])
        }
        return estimate_table(numbers, run=self.passes, keys=self.sizes)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables that a run folder stores, by name: errors by layer and, for a decoder, changes of predictions."""
        return {self.file: self.table} | ({"predictions": self.predictions} if self.causal else {})

    def view(self) -> View:
        """View of the result: errors by layer, amplification at the middle number of keys, and predictions."""
        keys = self.sizes[len(self.sizes) // 2]
        every = self.table[self.table["run"].isin(RUNS)]
        ends = every[every["layer"] == every["layer"].max()]
        end = ends[ends["keys"] == keys].iloc[0]
        finding = (
            f"With {keys} keys the relative error behind the last layer is {end['error']:.3f} ± "
            f"{end['error_stderr']:.3f}."
        )
        if "single" in self.include:
            finding += (
                f" The errors of single layers sum to {end['sum_of_single']:.3f} ± {end['sum_of_single_stderr']:.3f} "
                f"in squares, and the error is {end['over_sum']:.3f} ± {end['over_sum_stderr']:.3f} times that sum."
            )
        lead = (
            "Root mean square of |ĥ − h| / |h| over tokens, documents and draws ± standard errors (jackknife over "
            "documents). Resampled: keys drawn anew in every layer; fixed: the same keys in all layers. Sum of single "
            "layers: root of the summed squared errors when one layer at a time samples. Amplification: error behind a "
            "layer over the root of the squared error that enters it plus the squared error that it adds."
        )
        blocks: list[Block] = [Row(self._figures(every, keys))]
        blocks.append(shown_table("Behind the last layer", HEADINGS, ends.drop(columns="layer")))
        if self.causal:
            rows = self.predictions[self.predictions["run"].isin(RUNS)]
            blocks.append(shown_table("Predictions", HEADINGS, rows))
        verdict = (
            f"Every document was read unchanged and with {self.sizes[0]} to {self.sizes[-1]} random keys for each "
            "query; errors are relative errors of the hidden states behind each layer.",
            finding,
            "Add squared errors of single layers where the ratio of the error to their sum is 1 within its standard "
            "error.",
        )
        subtitle = (
            f"{self.corpus} · {self.documents} documents of {self.window} tokens · {self.replicates} draws each · keys "
            f"of queries: {self.key_sharing}"
        )
        trust = (
            "a causal query always keeps itself and the first token, and all keys where it sees no more than n; the "
            "first token of a document counts in no error",
            "log(c/m) is added to the scores of m keys sampled from c, so that keys that are always kept keep their "
            "share of the weight",
        )
        title = f"{self.model} with n sampled keys per query"
        sections = [Section("Error by layer", lead, blocks)]
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=trust)

    def _figures(self, every: pd.DataFrame, keys: int) -> list[Figure]:
        """Figures of the error by layer and, if single layers were sampled, of the amplification at `keys` keys."""
        resampled = every[every["run"] == RUNS[0]]
        errors = curves(resampled, "layer", "error", "keys", unit=" keys")
        layer = Axis("layer", whole=True)
        amplification = []
        if "single" in self.include:
            for place, (_, rows) in enumerate(resampled.groupby("keys")):
                sums = rows["layer"], rows["sum_of_single"], errors[place].colour
                errors.append(line("sum of single layers", *sums, "dashed", listed=place == 0))
            drawn = curves(every[(every["keys"] == keys) & (every["layer"] > 0)], "layer", "amplification", "run")
            ratio, guides = Axis("error behind / (before and added)"), [Guide("no amplification", y=1)]
            amplification.append(Figure(f"Amplification, {keys} keys", layer, ratio, drawn, guides, height=380))
        error = Axis("relative error of hidden states", log=True)
        return [Figure("Error by layer (resampled)", layer, error, errors, height=380), *amplification]

    def __repr__(self) -> str:
        return f"<DepthRun of {self.model}: {self.documents} documents, {self.sizes[0]} to {self.sizes[-1]} keys>"


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
    keys : numbers of keys that each query attends to (`interventions.sampled_keys` says how they are drawn).
    key_sharing : "shared" (the queries of a document attend to the same keys) or "own" (each query draws its own).
    include : runs in addition to keys drawn anew in every layer: "fixed", the same keys in all layers; "single", each
        layer alone (one forward each), to compare the sum of single-layer errors with their joint error.
    replicates : draws per document; standard errors are over documents, so a few suffice.
    window, special : tokens of a document (by default the model's positions, at most 512), and its special tokens.

    >>> made = ll.depth(model, text, [4, 16], documents=2, window=32)
    >>> len(made.table)
    30
    """
    given = (include.split(",") if include != "none" else []) if isinstance(include, str) else list(include)
    if not set(given) <= set(INCLUDE):
        raise InputError(f"include is {', '.join(given)}; expected none or some of {', '.join(INCLUDE)}")
    included = tuple(name for name in INCLUDE if name in given)
    check_key_sharing(key_sharing)
    parse_sizes(keys)
    check_seed(seed)
    check_number("documents", documents, "at least 2, for the standard errors", low=2)
    check_number("replicates", replicates, "at least 1 draw per document", low=1)
    text = open_corpus(corpus)
    loaded = open_model(model, device, head=True)
    length = window or loaded.window(WINDOW)
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
        generator = generator_for(seed, index)
        variants = (
            intervene(stack, keys=SampledKeys(size, generator, key_sharing=key_sharing, **options))
            for options in passes
            for size in sizes
            for _ in range(replicates)
        )
        with torch.inference_mode():
            rows = compare_variants(lambda: _read(stack, reader, ids.to(stack.device)), variants, _compare)
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


def _read(stack: Any, reader: Reader | None, ids: Tensor) -> tuple[list[State], Prediction | None]:
    """Hidden states of a document (1, n) behind each layer with mean and covariance, and predictions of a decoder."""
    first = int(reader is not None)  # the first token of a decoder sees only itself
    options = {} if reader is None else {"use_cache": False}
    hidden = stack(input_ids=ids, output_hidden_states=True, **options).hidden_states
    states = []
    for layer in hidden[1:]:
        rows = layer[0, first:]
        mean = rows.mean(0)
        states.append((rows, mean, (rows - mean).mT @ (rows - mean) / len(rows)))
    if reader is None:
        return states, None
    logits = reader.logits(states[-1][0])
    logs = logits.log_softmax(-1)
    nats = -logs[:-1].gather(-1, ids[0, 2:, None]).mean()
    return states, (logits - logits.mean(-1, keepdim=True), logs, nats)


def _compare(whole: tuple[list[State], Prediction | None], cut: tuple[list[State], Prediction | None]) -> Array:
    """Squared relative `ERRORS` of each layer, then changes of `PREDICTIONS`: sampled keys against the whole model."""
    numbers = []
    for (states, *moments), (others, *other_moments) in zip(whole[0], cut[0], strict=True):
        numbers.append(((others - states).square().sum(-1) / states.square().sum(-1)).mean())
        pairs = zip(moments, other_moments, strict=True)
        numbers += [(other - own).square().sum() / own.square().sum() for own, other in pairs]
    if whole[1] is not None and cut[1] is not None:
        (logits, logs, nats), (other_logits, other_logs, other_nats) = whole[1], cut[1]
        numbers.append(((other_logits - logits).square().sum(-1) / logits.square().sum(-1)).mean())
        numbers.append((logs.exp() * (logs - other_logs)).sum(-1).mean())
        numbers.append((logs.argmax(-1) == other_logs.argmax(-1)).to(logs.dtype).mean())
        numbers.append(other_nats - nats)
    return np.asarray(torch.stack(numbers).double().cpu())
