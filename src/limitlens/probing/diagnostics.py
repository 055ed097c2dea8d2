"""Measurements of a layer after the corpus was read: errors, concentration of softmax weights, geometry of scores."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import array_like, native, to_numpy
from limitlens.attention.kernels import state_of
from limitlens.attention.subset import scores_of
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.layer import MIN_SNR, LayerCurves, layer_curves
from limitlens.probing.pilot import Layer, layer_sinks
from limitlens.probing.predict import predict_pool
from limitlens.probing.record import HeadRecord
from limitlens.record import to_json
from limitlens.statistics.bootstrap import student_factor
from limitlens.statistics.critical_factor import critical_factors, critical_rows, some_rows, within
from limitlens.statistics.error_curve import PredictedErrors
from limitlens.statistics.estimators import members, norm_by_squaring
from limitlens.statistics.regimes import classify, resampled
from limitlens.statistics.tails import TailReport, check_tails, sorted_shape, tail_length
from limitlens.theory.exact_bootstrap import BY_QUARTERS

FLOOR_QUERIES = 4  # queries of a head whose outputs are computed again in float64, to measure rounding errors
PRINCIPAL_AXES = 64  # principal axes of a layer's tokens along which their tails are tested, at most
_FEWEST_SCORES = 6  # smallest number of scores whose tail is fitted
_SCORES_AT_ONCE = 1 << 27  # scores formed at a time on a GPU
_FEWEST_TOKENS = 100  # smallest number of tokens whose tails are tested
_TOKENS_PER_AXIS = 16  # with fewer tokens per axis, whitening by their own covariance would make any tail look light


class LayerDetail(NamedTuple):
    """Concentration of the softmax weights of every query head of a layer, without the sink.

    Sums are over each of C groups of queries (by window of text), in W replicates, at J sample sizes.
    """

    effective_sums: Array  # (heads, W, C, J): effective tokens 1/Σw² of samples of each size
    top_sums: Array  # (heads, W, C): largest weight at the largest size
    entropy_sums: Array  # (heads, W, C): entropy of the weights at the largest size, in nats
    pareto_k: Array  # (heads,): Pareto shape of the weights, median over queries; NaN with too few tokens
    critical: NDArray[np.object_]  # (heads,): `CriticalFactor`, from one replicate
    floor: Array  # (heads,): relative error of a few outputs over the largest sample against float64


def layer_detail(collector: Collector, context: int) -> LayerDetail:
    """Measure how concentrated the softmax weights of every head of a layer are, such as effective tokens and entropy.

    The critical factor (factor on the scores that makes the largest weight 1/5) uses at most `context` tokens.
    """
    step = _heads_at_once(collector)
    starts = range(0, collector.key.shape[1], step)
    parts = [_some_heads(collector, slice(start, start + step), context) for start in starts]
    return LayerDetail(*map(np.concatenate, zip(*parts, strict=True)))


def _heads_at_once(collector: Collector) -> int:
    """Number of key/value heads computed at a time: one on a CPU (scores stay in cache), as many as fit on a GPU."""
    if collector.key.device.type == "cpu":
        return 1
    assignment = collector.assignment
    scores = collector.queries.detail_query.shape[1] * int(assignment.filled[: assignment.whole].sum(1).max())
    return max(1, _SCORES_AT_ONCE // max(scores, 1))


def _some_heads(collector: Collector, heads: slice, context: int) -> LayerDetail:
    """`LayerDetail` of the query heads that read the key/value heads of the slice `heads`."""
    assignment, layer = collector.assignment, collector.layer
    detail, query = layer.detail, collector.queries.detail_query[heads]
    q = len(detail)
    member = members(layer.clusters, query.device)[detail].T  # (C, q)
    sums = []
    for r in reversed(range(assignment.whole)):  # replicate 0 comes last: its largest sample is used below
        slots = array_like(query, assignment.slots_of(r))
        sizes = assignment.filled[r].cumsum().tolist()
        kept = (tokens[:, heads].index_select(0, slots) for tokens in (collector.key, collector.value))
        key, value = (tokens.transpose(0, 1) for tokens in kept)
        scores = scores_of(query, key, layer.traits.softcap)
        each = torch.cat((_effective_tokens(scores, sizes), _top_weight_and_entropy(scores)), -1)
        sums.append(member @ each.reshape(-1, q, len(sizes) + 2))  # (heads, C, ·)
    few, rows = within(sizes, context), some_rows(q)
    near = native(scores[..., : few[-1]].reshape(-1, q, few[-1])[:, array_like(scores, rows)])
    by_cluster, pareto, critical, floor = to_numpy(
        torch.stack(sums, 1), _pareto(scores.reshape(-1, q, scores.shape[-1])), critical_rows(near, few),
        _floor(collector, query[:, :FLOOR_QUERIES], key, value),
    )  # fmt: skip
    factors = np.empty(len(by_cluster), object)
    factors[:] = critical_factors(critical, few, layer.detail_clusters[rows], seed=assignment.seed)
    return LayerDetail(
        by_cluster[..., :-2], by_cluster[..., -2], by_cluster[..., -1], np.median(pareto, axis=-1), factors,
        np.repeat(floor, layer.query.shape[1]),
    )  # fmt: skip


def _effective_tokens(scores: Tensor, sizes: list[int]) -> Tensor:
    """Effective tokens 1/Σw² of the softmax over the first n of N scores (..., m, N), for n in `sizes`: (..., m, J)."""
    nested: list[Tensor] = []
    for start, stop in pairwise([0, *sizes]):
        if stop > start:
            block = scores[..., start:stop]
            peak = block.amax(-1, keepdim=True)  # of this block only, so that not all its weights underflow
            weights = torch.exp(block - peak)
            sums = torch.stack((weights.sum(-1), torch.linalg.vecdot(weights, weights))).double()
            both = sums.log() + torch.stack((peak, 2 * peak)).double()[..., 0]
            nested.append(torch.logaddexp(nested[-1], both) if nested else both)
        else:
            nested.append(nested[-1])
    lse, lse2 = torch.stack(nested, -1)
    return torch.exp(2 * lse - lse2)


def _top_weight_and_entropy(scores: Tensor) -> Tensor:
    """Largest softmax weight and entropy of the softmax weights, (..., m, 2), from scores (..., m, n)."""
    below = scores - scores.amax(-1, keepdim=True)  # relative to the largest score, so that nothing cancels
    weights = torch.exp(below)
    mass = weights.sum(-1, keepdim=True).double()
    entropy = mass.log() - torch.linalg.vecdot(weights, below)[..., None].double() / mass
    return torch.cat((1 / mass, entropy), -1)


def _floor(collector: Collector, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Relative error (h,) of the attention kernel against float64 in h key/value heads, for some queries (h, q, k)."""
    fast = state_of(query, key, value, kernel=collector.layer.kernel).output
    weights = torch.softmax(scores_of(query.double(), key.double(), collector.layer.traits.softcap), -1)
    exact = weights @ value.double()
    error, size = (part.square().sum((-2, -1)).sqrt() for part in (fast - exact, exact))
    return error / size.clamp_min(torch.finfo(torch.float64).tiny)


def _pareto(scores: Tensor) -> Any:
    """Pareto tail shape of the softmax weights of each query, (...), from its scores (..., n); NaN if n is small."""
    count = tail_length(scores.shape[-1]) + 1  # only the largest scores matter
    if count < _FEWEST_SCORES:
        return torch.full_like(scores[..., 0], torch.nan)
    rows = native(scores)
    if isinstance(rows, Tensor):
        return sorted_shape(rows.topk(count, -1).values.flip(-1).double())
    return sorted_shape(np.sort(np.partition(rows, -count)[..., -count:]).astype(float))


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """Spectral quantities of each query head's attention scores, and whether the layer's tokens have heavy tails."""

    # (heads,) each: two-sided "horizon" H; "score_std", standard deviation of scores over tokens, RMS over queries;
    # "mean_tilt" τ₀, that of the mean query's scores; if weights are known, "horizon_one_sided" and "coupling" Ψ
    numbers: dict[str, Array]
    note: str  # why the one-sided horizon and the coupling are not known, or a caveat, or empty
    tails: TailReport | None  # tails of the tokens along their leading principal axes; None with too few tokens
    tokens: str  # the tokens tested: "hidden states", or "keys" where hidden states are not known


def layer_geometry(whole: Collector, layers: Sequence[Collector]) -> list[LayerGeometry]:
    """Spectral quantities of each head's attention scores (`theory.spectrum`); `whole` joins the heads of all `layers`.

    The horizon is scale · √λ_max(RᵀCov(q)R) with Cov(k) = RRᵀ. The mean tilt is scale · √(E qᵀ Cov(k) E q). The
    one-sided horizon ‖Σ^{1/2} A‖ is the horizon with Wq Wqᵀ in place of Cov(q) = Wq Σ Wqᵀ.
    """
    moments, (shared, groups, _, dim), count = whole.moments, whole.layer.query.shape, len(layers)
    mean_q, cov_k = moments["query"].mean.reshape(shared, groups, -1), moments["key"].covariance
    query = whole.queries.query.double()
    spread = (query @ cov_k * query).sum(-1).reshape(shared * groups, -1).mean(-1)
    tilt = (mean_q @ cov_k * mean_q).sum(-1).flatten()
    pairs, largest, axes = [(cov_k, moments["query"].covariance)], tilt.new_zeros(count), [None] * count
    traits, with_weights = [layer.layer.traits for layer in layers], []
    if "hidden" in moments:
        covariance = moments["hidden"].covariance
        values, axes = torch.linalg.eigh(covariance)
        largest = values[:, -1]
        for place, (own, cov_hidden) in enumerate(zip(traits, covariance, strict=True)):
            if own.projections is not None and own.factor is not None:
                W = (part.double() for part in (own.projections.query, own.projections.key))
                Wq, Wk = (part.reshape(-1, dim, part.shape[-1]) for part in W)
                pairs.append((Wk @ cov_hidden @ Wk.mT, Wq @ Wq.mT))
                with_weights.append(place)
    norms = _score_norms(*(torch.cat(side) for side in zip(*pairs, strict=True)))
    found = to_numpy(norms, *(part.clamp_min(0).sqrt() for part in (tilt, spread)), largest)
    horizons, tilts, spreads = (part.reshape(-1, shared * groups // count) for part in found[:-1])
    white = dict(zip(with_weights, horizons[count:], strict=True))
    geometries = []
    for place, (layer, own, top) in enumerate(zip(layers, traits, found[-1], strict=True)):
        horizon, mean_tilt = (part[place] * abs(own.scale) for part in (horizons, tilts))
        numbers = {"horizon": horizon, "mean_tilt": mean_tilt, "score_std": spreads[place]}
        if place in white:
            one_sided = white[place] * abs(own.scale * (own.factor or 1.0))
            numbers |= {"horizon_one_sided": one_sided, "coupling": top * one_sided**2}
        geometries.append(LayerGeometry(numbers, own.reason, *_tails(layer, axes[place])))
    return geometries


def _score_norms(key: Tensor, query: Tensor) -> Tensor:
    """Unscaled horizon √λ_max(RᵀBR) of each query head, for covariances RRᵀ of keys (Hkv, d, d) and B of queries."""
    if key.device.type != "cpu":  # single eigenproblems leave a GPU idle; A B has the same eigenvalues as RᵀBR
        return norm_by_squaring(key.repeat_interleave(len(query) // len(key), 0) @ query).sqrt()
    values, axes = torch.linalg.eigh(key)
    root = (axes * values.clamp_min(0).sqrt()[..., None, :]).repeat_interleave(len(query) // len(key), 0)
    found: Tensor = torch.linalg.eigvalsh(root.mT @ query @ root)
    return found[..., -1].clamp_min(0).sqrt()


def _tails(collector: Collector, axes: Tensor | None) -> tuple[TailReport | None, str]:
    """Tail test of some of a layer's tokens ("hidden states" or "keys") along their leading principal `axes` (d, d)."""
    slots, tokens, store = collector.assignment.slots_of(0), "keys", collector.key
    if collector.hidden is not None:
        tokens, store = "hidden states", collector.hidden
    slots = slots[slots < len(store)]
    if len(slots) < _FEWEST_TOKENS:
        return None, tokens
    rows = store.index_select(0, array_like(store, slots)).flatten(1).double()
    known = torch.linalg.eigh(torch.cov(rows.T))[1] if axes is None else axes
    leading = known[:, -min(PRINCIPAL_AXES, max(1, len(rows) // _TOKENS_PER_AXIS)) :]
    return check_tails(rows @ leading), tokens


@dataclass(frozen=True, eq=False)
class Measured:
    """All measurements of one layer; `special` (heads,) is the share of the softmax mass on special tokens."""

    layer: Layer
    curves: LayerCurves
    detail: LayerDetail
    geometry: LayerGeometry
    special: Array
    predictions: list[tuple[PredictedErrors, ...]]  # by head: without the sink, and with it if there is one


def measure(collectors: Sequence[Collector], window: int) -> list[Measured]:
    """Compute all measurements of layers of equal shape, after the text was read in windows of `window` tokens."""
    with torch.inference_mode():
        whole = Collector.joined(collectors)
        work: tuple[Callable[[], Any], ...] = (
            partial(predict_pool, whole), partial(layer_curves, whole), partial(layer_detail, whole, window),
            partial(layer_geometry, whole, collectors),
        )  # fmt: skip
        predictions, curves, detail, geometries = _run_all(work, whole.key.device)
        share = torch.exp(whole.states[-1].lse - curves.reference.lse)
        special = np.asarray(share.reshape(-1, whole.layer.query.shape[2]).mean(-1).cpu())
    shared, groups = collectors[0].layer.query.shape[:2]
    found = []
    for place, (own, geometry) in enumerate(zip(collectors, geometries, strict=True)):
        pairs = slice(place * shared, (place + 1) * shared)
        heads = slice(pairs.start * groups, pairs.stop * groups)
        own_detail = LayerDetail(*(part[heads] for part in detail))
        parts = (curves.of(heads, pairs), own_detail, geometry, special[heads], predictions[heads])
        found.append(Measured(own.layer, *parts))
    return found


def _run_all(work: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Results of the functions `work`; on a GPU each runs in its own CUDA stream, since small kernels leave it idle."""
    if device.type == "cpu":
        return [piece() for piece in work]
    torch.linalg.eigh(torch.eye(1, device=device))  # the first call must come from one thread
    here, streams = torch.cuda.current_stream(device), _streams(device, len(work))

    def in_stream(piece: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        stream.wait_stream(here)
        with torch.cuda.stream(stream), torch.inference_mode():
            return piece()

    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(in_stream, work, streams))
    for stream in streams:
        here.wait_stream(stream)
    return found


@cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """CUDA streams of a device, cached over calls, because memory freed on a stream is reused only there."""
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def head_records(measured: Measured, causal: bool, window: int, unread: float, seed: int) -> list[HeadRecord]:
    """Records of the query heads of a measured layer, in order.

    `window` is the number of tokens per window of text, `unread` the share of windows that samples are not drawn from.
    Standard errors count this share of the variance by windows, without Student's factor: it is one part of a sum.
    """
    layer, curves, detail, geometry = measured.layer, measured.curves, measured.detail, measured.geometry
    sizes = np.rint(curves.counts.mean(0))
    known = {"floor": np.full(len(sizes), detail.floor.max()), "seed": seed}
    known["finite_population_correction"] = curves.finite_population_correction
    sinks = layer_sinks(layer, curves.reference.lse, curves.pool, sizes, window)
    members = np.bincount(layer.detail_clusters, minlength=detail.top_sums.shape[2]).astype(float)
    effective, top, entropy = (sums.sum(2).mean(1) / members.sum() for sums in detail[:3])
    numbers = geometry.numbers | {"pareto_k": detail.pareto_k, "top_weight": top, "entropy": entropy}
    by_head = {name: to_json(values) for name, values in numbers.items()}

    def record(head: int) -> HeadRecord:
        verdict = classify(effective[head], sizes, float(top[head]))
        sums = (detail.effective_sums[head], detail.top_sums[head], members)
        verdict = resampled(verdict, *sums, sizes, seed)
        sink = sinks[head] if sinks else None
        predicted = [
            {"prediction": one, "text": one.text_shifts(sizes), "text_share": unread / student_factor(BY_QUARTERS) ** 2}
            for one in measured.predictions[head]
        ]
        noisy: dict[str, Any] = {"min_snr": MIN_SNR}
        extra = {"output": predicted[0], "atomic": predicted[-1], "mean": noisy, "covariance": noisy, "hardmax": noisy}
        found = {kind: curves.curve(kind, head, sizes, **known, **extra[kind]) for kind in curves.kinds}
        without_sink = found.pop("output")
        with_sink = found.pop("atomic", None)
        return HeadRecord(
            layer=layer.index, head=head, kv_head=head // layer.query.shape[1],
            sliding_window=layer.traits.sliding_window, geometry_note=geometry.note or None,
            curve=with_sink or without_sink, without_sink=with_sink and without_sink,
            effective_tokens=effective[head], effective_tokens_growth=verdict.growth, sink=sink,
            sink_mass=sink.share_in_window if sink else None if causal else float(measured.special[head]),
            regime=verdict.regime, regime_reason=verdict.reason, regime_agreement=verdict.agreement,
            critical=detail.critical[head], moment_curves=found,
            **{name: values[head] for name, values in by_head.items()},
        )  # fmt: skip

    return [record(head) for head in range(len(top))]
