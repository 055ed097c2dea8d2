"""Forward passes over a few random windows of text, which give the queries of a probe (the pilot).

Sampled keys come from other windows. In a causal model queries come from the last positions of a window and keys from
earlier positions, so that every key lies in the past of every query. A sampled key has no distance from a query: where
a layer adds a relative position bias to its scores, it counts as a distant key, whose bias is constant and cancels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.attention.kernels import Kernel, Precision
from limitlens.attention.state import State
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.errors import Array, InputError
from limitlens.models import Captured, LoadedModel, Projections, Windows, capture, projector
from limitlens.models.intervene import attend
from limitlens.probing.record import Sink
from limitlens.record import to_json
from limitlens.sampling.workers import Workers, one_after_another

LARGEST_TAIL = 4  # queries of a causal model come from the last 1/LARGEST_TAIL of a window at most
DETAIL_QUERIES = 64  # queries of a head for which diagnostics compute every score
NORMALISED = "queries or keys are normalised one by one after the projection: no score matrix exists"
CLUSTERS = 32  # approximate number of groups of queries by window of text; memory grows with it


@dataclass(frozen=True, eq=False)
class Traits:
    """Properties of an attention layer that are read from the model once, such as softcap and projection weights."""

    scale: float  # scale of the scores as in `Captured`, times the probe's `score_scale`
    softcap: float | None
    sinks: Tensor | None
    sliding_window: int | None  # as in `Captured`; it may be longer than the probe's windows
    rough_mean: dict[str, Tensor]  # (heads, d) each: mean "query", "key" and, if known, "hidden" state of some windows
    projections: Projections | None  # query and key projections; None if the layout of the layer is not known
    ratios: Tensor | None  # `Projections.ratios`
    note: str  # why the projections are not known, or a caveat
    tokens: dict[str, Tensor] = field(default_factory=dict)  # empty "key" and "value", (0, Hkv, ·), for their dtype
    bias_change: Tensor | None = None  # relative change of a window's outputs without the position bias; None: no bias

    @cached_property
    def factor(self) -> float | None:
        """Ratio of the layer's scores to scores computed from its projection weights; None if no single ratio fits."""
        return None if self.projections is None else self.projections.factor(self.ratios)

    @property
    def reason(self) -> str:
        """Why scores cannot be computed from projection weights alone (`factor` is None), or a caveat; else empty."""
        return self.note if self.projections is None or self.factor is not None else NORMALISED


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer and its queries in a probe: Hkv key/value heads, G query heads each, m queries per head."""

    index: int  # index of the layer in the model
    query: Tensor  # (Hkv, G, m, k): queries, times the scale of the scores
    atom: State | None  # (Hkv, G · m): attention to the sink: the first token of the query's window, a learned sink
    first: bool  # whether the first token of the window is a sink
    clusters: NDArray[np.intp]  # (m,): group of each query; queries from the same window of text share a group
    traits: Traits
    precision: Precision = "accurate"  # precision of the attention kernel

    @property
    def kernel(self) -> Kernel | Precision:
        """Attention kernel of the layer: the precision of a built-in kernel, or a function if scores have a softcap."""
        softcap = self.traits.softcap

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return attend_subset(scores_of(query, key, softcap), value, log_weights=bias)

        return self.precision if softcap is None else attend

    @property
    def detail(self) -> Tensor:
        """Indices (q,) of the queries for which the diagnostics compute every attention score."""
        return to_device(self.places(DETAIL_QUERIES), self.query.device)

    @property
    def detail_clusters(self) -> NDArray[np.intp]:
        """Group of each query of `detail`, (q,); queries from the same window of text share a group."""
        return self.clusters[self.places(DETAIL_QUERIES)]

    def places(self, count: int) -> NDArray[np.int64]:
        """Indices of `count` queries (or all, if fewer), spread evenly over the windows that gave queries."""
        m = self.query.shape[2]
        return torch.linspace(0, m - 1, min(count, m)).round().long().numpy()

    @property
    def flat_query(self) -> Tensor:
        """Queries grouped by key/value head, (Hkv, G · m, k), so that keys need not be repeated for G query heads."""
        return self.query.flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Pilot:
    """Queries of every layer of a model, from forward passes over a few random windows of text (the pilot)."""

    layers: dict[int, Layer]
    causal: bool
    positions: range  # positions of a window whose keys may be sampled
    queries: NDArray[np.intp]  # (m, 2) array: window and position of each query
    sizes: dict[str, Tensor]  # norms of each layer's queries, keys and values, by description, for `check`

    def warnings(self, loaded: LoadedModel, length: int) -> list[str]:
        """Warnings for the results of a probe with windows of `length` tokens: a position bias that samples lack."""
        changes = [layer.traits.bias_change for layer in self.layers.values()]
        known = [float(change) for change in changes if change is not None]
        if not known:
            return []
        return [
            f"{len(known)} layers of {loaded.name} add a relative position bias to their scores: sampled keys count as "
            f"distant ones, whose bias is constant on either side of the query and cancels in the softmax; within a "
            f"window of {length} tokens the bias changes outputs by {min(known):.0%} to {max(known):.0%}"
        ]

    def source(self, loaded: LoadedModel, windows: Windows) -> dict[str, Any]:
        """Fields of a `ProbeRun` that describe the model, the windows of text and the queries."""
        return {
            "model": loaded.name, "model_revision": loaded.revision, "model_sha256": loaded.sha256,
            "model_note": loaded.note or None, "device": str(loaded.model.device), "causal": self.causal,
            "corpus_sha256": windows.sha256, "window": windows.length, "special": windows.around,
            "pooled_positions": (self.positions.start, self.positions.stop), "queries": len(self.queries),
        }  # fmt: skip

    def check(self) -> None:
        """Raise an `InputError` if queries, keys or values of a layer are not finite; waits for a GPU."""
        sizes = torch.stack(list(self.sizes.values())).tolist() if self.sizes else []
        for given, size in zip(self.sizes, sizes, strict=True):
            if not np.isfinite(size):
                given = f"{given} that is not finite, or far too large"
                raise InputError(f"{given}; expected a model whose weights are whole")


def run_pilot(
    loaded: LoadedModel, windows: Windows, indices: NDArray[np.intp],
    *, queries: int, batch: int, seed: int, report: Callable[[int], None], score_scale: float = 1.0,
    precision: Precision = "accurate", check: bool = True, workers: Workers = one_after_another,
    clusters: int = CLUSTERS,
) -> Pilot:  # fmt: skip
    """Run the model over the windows `indices`, `batch` at a time, and draw `queries` random queries for each head.

    `report` is called with the number of tokens of each forward pass. `score_scale` multiplies every score of the
    probe, but not in the model's own forward pass. Without `check`, the caller must call `Pilot.check`.
    """
    draw = cache(partial(_draw, windows.length, len(indices), queries, seed))
    projections = projector(loaded.model)
    forwards, _ = workers.beside(batch)

    def pieces() -> Iterator[_Forward]:
        start = 0
        for ids in windows.batches(batch, indices):
            for some in ids.tensor_split(min(forwards.count, len(ids))):
                yield _Forward(start, some)
                start += len(some)

    def run(forward: _Forward) -> _Forward:
        run_until_last_attention(input_ids=forward.ids.to(loaded.model.device), forward=forward)
        return forward

    def take(captured: Captured) -> None:
        workers.check()
        forward: _Forward = captured.forward
        forward.take(captured, loaded.name, draw(captured.causal)[0], score_scale)
        if forward.start == 0:
            made = (*projections(captured.layer), _bias_change(captured, loaded.name))
            forward.traits[captured.layer] = _traits(captured, score_scale, *made)

    done: list[_Forward] = []
    with torch.inference_mode(), capture(loaded.model, take, hidden=True) as run_until_last_attention:
        for forward in forwards(run, pieces()):
            done.append(forward)
            report(forward.ids.numel())
        causal = bool(done[0].causal)
        chosen, tail = draw(causal)
        layers = _layers(done, causal, chosen, windows.length, precision, clusters)
    positions = range(1, windows.length - tail) if causal else range(windows.length)
    sizes = {name: torch.stack([forward.sizes[name] for forward in done]).sum() for name in done[0].sizes}
    places = np.stack((indices[chosen[:, 0]], chosen[:, 1]), axis=1)
    pilot = Pilot(layers, causal, positions, places, sizes)
    if check:
        pilot.check()
    return pilot


def _draw(length: int, count: int, queries: int, seed: int, causal: bool) -> tuple[NDArray[np.intp], int]:
    """Draw random queries, nearly equally many from each of `count` windows: window and position of each, (m, 2).

    Also returns how many last positions of a window may give queries: all, if the model is not `causal`.
    """
    tail = length
    if causal:
        tail = min(-(-queries // count), max(1, length // LARGEST_TAIL))
        if length - tail < 2:
            raise InputError(f"windows of {length} tokens are too short for a causal model; expected 8 or more")
    turn, place = divmod(np.arange(min(queries, count * tail)), count)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x0A5C]))
    window, orders = generator.permutation(count)[place], generator.random((count, tail)).argsort(1)
    found = np.sort(window * tail + orders[window, turn])
    return np.stack((found // tail, length - tail + found % tail), axis=1), tail


@dataclass(eq=False)
class _Forward:
    """One forward pass over windows that give queries, and the queries, keys and values taken from each layer."""

    start: int  # index of the first window of this forward pass among the windows that give queries
    ids: Tensor  # (windows, length)
    causal: bool | None = None
    place: Sequence[Tensor] = ()  # window and position of each query in this forward pass
    # by layer: the queries drawn, and the key and the value of the first token of each query's window
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)
    traits: dict[int, Traits] = field(default_factory=dict)

    def take(self, captured: Captured, model: str, chosen: NDArray[np.intp], score_scale: float) -> None:
        """Store a layer's queries at the windows and positions `chosen` (m, 2); refuse layers that cannot be probed."""
        layer = f"layer {captured.layer} of {model}"
        if self.causal is None:
            self.causal = captured.causal
            window, position = chosen[:, 0] - self.start, chosen[:, 1]
            here = (window >= 0) & (window < len(self.ids))
            self.place = to_device(np.stack((window[here], position[here])), captured.query.device).unbind()
        if captured.causal != self.causal:
            mixed = f"{model} has both causal and bidirectional layers"
            raise InputError(f"{mixed}; expected one kind, so choose another model")
        for part in ("query", "key", "value"):
            size = torch.linalg.vector_norm(getattr(captured, part), dtype=torch.float32)
            self.sizes[f"{layer} gives a {part}"] = size
        row, column = self.place
        query = captured.query[row, :, column].float() * (captured.scale * score_scale)
        self.parts[captured.layer] = (query, captured.key[row, :, 0].float(), captured.value[row, :, 0].float())


def _bias_change(captured: Captured, model: str) -> Tensor | None:
    """Relative change of the outputs of one window if the bias on the scores is left out; None without a bias.

    Raises an `InputError` unless the bias is constant over the farther half of the window on each side.
    """
    if captured.bias is None:
        return None
    far = max(captured.bias.shape[-1] // 2, 2)
    ends = [captured.bias[..., -1, :far]] + [captured.bias[..., 0, -far:]] * (not captured.causal)
    spread = max(float((end.amax(-1) - end.amin(-1)).max()) for end in ends)
    if spread > 1e-6 * float(captured.bias.abs().max()):
        raise InputError(
            f"layer {captured.layer} of {model} adds a bias to its scores that still changes with distance at the end "
            f"of a window of {captured.query.shape[2]} tokens, and a sampled key has no distance; use longer windows, "
            "or a model with rotary, learned or no positions"
        )
    parts = {
        name: part[:1]
        for name in ("query", "key", "value", "mask", "bias")
        if (part := getattr(captured, name)) is not None
    }
    window = replace(captured, **parts)
    own = attend(window)
    change: Tensor = (attend(replace(window, bias=None)) - own).norm() / own.norm()
    return change


def _traits(
    captured: Captured, score_scale: float, made: Projections | None, note: str, bias_change: Tensor | None
) -> Traits:
    if made is not None and captured.hidden is None:
        made, note = None, "the input of the query projection could not be read"
    rough_mean = {name: getattr(captured, name).mean((0, 2), dtype=torch.float32) for name in ("query", "key")}
    if captured.hidden is not None:
        rough_mean["hidden"] = captured.hidden.mean((0, 1), dtype=torch.float32)[None]
    known = (captured.scale * score_scale, captured.softcap, captured.sinks, captured.sliding_window)
    shapes = {name: getattr(captured, name) for name in ("key", "value")}
    tokens = {name: part.new_empty(0, part.shape[1], part.shape[-1]) for name, part in shapes.items()}
    ratios = None if made is None else made.ratios(captured)
    return Traits(*known, rough_mean, made, ratios, note, tokens, bias_change)


def _layers(
    done: list[_Forward], causal: bool, chosen: NDArray[np.intp], length: int, precision: Precision, clusters: int
) -> dict[int, Layer]:
    """Each layer with its queries from all forward passes `done`, in about `clusters` groups of whole windows."""
    rank = np.unique(chosen[:, 0], return_inverse=True)[1]
    windows_each = max(1, round((int(rank.max()) + 1) / clusters))  # windows per group of queries
    layers = {}
    for index in sorted(done[0].parts):
        parts = [forward.parts[index] for forward in done]
        rows, keys, values = (torch.cat(part) for part in zip(*parts, strict=True))
        traits = done[0].traits[index]
        whole = causal and (traits.sliding_window is None or traits.sliding_window >= length)
        heads, shared = rows.shape[1], keys.shape[1]
        query = rows.transpose(0, 1).reshape(shared, heads // shared, *rows.shape[::2]).contiguous()
        atom = _atom(query, keys, values, traits, whole)
        layers[index] = Layer(index, query, atom, whole, rank // windows_each, traits, precision)
    return layers


def _atom(query: Tensor, keys: Tensor, values: Tensor, traits: Traits, first: bool) -> State | None:
    """Attention of queries (Hkv, G, m, k) to the sink: the first token of the window (if `first`) and a learned sink.

    `keys` and `values` (m, Hkv, ·) belong to the first token of each query's window. None if the layer has no sink.
    """
    if not first and traits.sinks is None:
        return None
    shared = len(query)
    # one key for each query, or none
    key, value = (part.double().transpose(0, 1)[:, None, :, None][..., : int(first), :] for part in (keys, values))
    scores = scores_of(query.double()[..., None, :], key, traits.softcap)
    sinks = None if traits.sinks is None else traits.sinks.double().view(shared, -1, 1, 1)
    lse, output = attend_subset(scores, value, sinks=sinks)
    counts = torch.full((shared,), int(first), dtype=torch.int64, device=query.device)
    return State(counts, lse.flatten(1), output.flatten(1, 3))


def layer_sinks(layer: Layer, lse: Tensor, pool: float, sizes: Array, window: int) -> list[Sink] | None:
    """Softmax mass on the attention sink of each head (a token in every context); None if the layer has no sink.

    Among n other tokens, a sink of score s has the share e^s / (e^s + n μ), with μ the mean of e^{score} over tokens.
    This is a heuristic, accurate if many tokens share the mass. μ is estimated from `lse` (Hkv, G · m), the log-sum-exp
    of each query's scores over `pool` tokens. Shares are given for `sizes` (J,) and for a window of `window` tokens.
    """
    if layer.atom is None:
        return None
    m = layer.query.shape[2]
    score, rest = (part.reshape(-1, m) for part in to_numpy(layer.atom.lse, lse))
    kinds = {"first token": layer.first, "learned sink": layer.traits.sinks is not None}
    kind = " and ".join(name for name, present in kinds.items() if present)
    log_length = score - rest + np.log(pool)
    shares = sink_share(sizes[:, None], log_length[:, None]).mean(-1)
    in_window = sink_share(window - 1, log_length).mean(-1).tolist()
    return [Sink(kind, *head) for head in zip(shares, in_window, to_json(dilution_length(log_length)), strict=True)]


def sink_share(n: ArrayLike, log_length: Array) -> Array:
    """Share of the softmax mass on a sink among n other tokens, for each query: e^s / (e^s + n μ).

    `log_length` (...) is log(e^s/μ), with s the sink's score and μ the mean of e^{score} over the other tokens.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(expit(log_length - np.log(np.asarray(n, dtype=float))))


def dilution_length(log_length: Array) -> Array:
    """Number of other tokens at which the sink's share (`sink_share`), averaged over queries (..., m), is one half."""
    low, high = log_length.min(-1), log_length.max(-1)  # at the smallest length every share is at least one half
    for _ in range(60):  # halvings of a bracket of the logarithm: enough for every digit
        middle = low + (high - low) / 2
        above = expit(log_length - middle[..., None]).mean(-1) > 0.5
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(low + (high - low) / 2))
