"""Diagnostics of a head's attention weights: effective tokens, largest weight, entropy, tail, local dimension.

They use every score of some queries of each head over the replicates that keep all their tokens. They describe the
pooled tokens, so they leave out the atom that every context contains; only the predicted error includes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from limitlens.arrays import array_like, native, to_numpy
from limitlens.attention.kernels import state_of
from limitlens.attention.scores import scores_of
from limitlens.attention.state import State
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.moment_errors import members
from limitlens.probing.pilot import DETAIL_QUERIES
from limitlens.probing.plug_in import plug_in_errors
from limitlens.statistics.critical_factor import CriticalFactor, critical_factors, some_rows, within
from limitlens.statistics.gap_counting import critical_rows
from limitlens.statistics.local_exponent import (
    FEWEST_NEIGHBOURS,
    OUTSIDE,
    exponents,
    references,
    support_of,
    usual_count,
)
from limitlens.statistics.tails import sorted_shape, tail_length

FLOOR_QUERIES = 4  # queries of a head that are attended to again in float64
DIMENSION_QUERIES = 16  # queries of a head at which the local dimension of its keys is estimated
_FEWEST_SCORES = 6  # smallest number of scores whose tail is fitted
_SCORES_AT_ONCE = 1 << 27  # scores formed at a time on a GPU


@dataclass(frozen=True, eq=False)
class LayerDetail:
    """Diagnostics of every head of a layer; means over queries and replicates unless stated otherwise."""

    effective_tokens: Array  # (heads, J): 1/Σw² of samples of each size
    predicted_error: Array  # (heads, J): by the central limit theorem, from the largest sample (`probing.plug_in`)
    top_weight: Array  # (heads,): largest weight at the largest size
    entropy: Array  # (heads,): entropy of the weights at the largest size, in nats
    ranks: NDArray[np.int64]  # (K,): 1, 2, 4, ...
    ordered_weights: Array  # (heads, K): weights of these ranks in the largest sample of replicate 0
    pareto_k: Array  # (heads,): Pareto shape of the weights, median over queries; NaN with too few tokens
    local_dimension: Array  # (heads,): local exponent of the keys, median; NaN where most queries are outside them
    outside_support: Array  # (heads,): share of queries outside the support of the keys
    critical: tuple[CriticalFactor, ...]  # (heads,): score scale at which replicate 0 is critical
    effective_sums: Array  # (heads, W, C, J): effective tokens summed over the queries of a cluster, by whole replicate
    top_sums: Array  # (heads, W, C): largest weight, summed alike
    members: Array  # (C,): queries of each cluster
    floor: Array  # (heads,): relative error of a few outputs over the largest sample against float64

    def of(self, heads: slice) -> LayerDetail:
        """Restrict to some heads."""
        own = {part.name: getattr(self, part.name) for part in fields(self)}
        common = ("ranks", "members")
        return LayerDetail(**{name: part if name in common else part[heads] for name, part in own.items()})


def layer_detail(collector: Collector, context: int) -> LayerDetail:
    """Compute the diagnostics of a layer from every score of its whole replicates, a few key/value heads at a time."""
    step = _heads_at_once(collector)
    starts = range(0, collector.query.shape[0], step)
    parts = [_shared_detail(collector, slice(start, start + step), context) for start in starts]
    apart = ("ranks", "members", "critical")
    names = [part.name for part in fields(LayerDetail) if part.name not in apart]
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    critical = tuple(chain.from_iterable(part.critical for part in parts))
    return LayerDetail(ranks=parts[0].ranks, members=parts[0].members, critical=critical, **together)


def _heads_at_once(collector: Collector) -> int:
    """Key/value heads at a time: one on a CPU, so that its scores stay in cache; on a GPU as many as memory allows."""
    if collector.key.device.type == "cpu":
        return 1
    scores = collector.detail_query.shape[1] * int(
        collector.assignment.filled[: collector.assignment.whole].sum(1).max()
    )
    return max(1, _SCORES_AT_ONCE // max(scores, 1))


def _shared_detail(collector: Collector, heads: slice, context: int) -> LayerDetail:
    """Diagnostics of the query heads that read some key/value heads, G for each."""
    assignment, layer = collector.assignment, collector.layer
    m, detail = layer.query.shape[2], layer.detail
    q, query = len(detail), collector.detail_query[heads]
    atom = None if layer.atom is None else _of_queries(layer.atom[heads], m, detail)
    member = members(layer.clusters, query.device)[detail].T  # (C, q)
    sums = []
    for r in reversed(range(assignment.whole)):  # replicate 0 comes last: its largest sample is used below
        slots, sizes = (
            array_like(query, assignment.slots_of(r)),
            assignment.filled[r].cumsum().tolist(),
        )  # nested sizes in order
        kept = (tokens[:, heads].index_select(0, slots) for tokens in (collector.key, collector.value))
        key, value = (tokens.transpose(0, 1) for tokens in kept)
        scores = scores_of(query, key, layer.traits.softcap)
        lse, output, second, concentration = _attend(scores, value)
        each = (_effective(scores, sizes), *plug_in_errors(lse, output, second, atom, sizes), concentration)
        sums.append(member @ torch.cat(each, -1).reshape(-1, q, 3 * len(sizes) + 2))  # (heads, C, ·)
    top = _largest(scores, tail_length(scores.shape[-1]) + 1).double()
    ordered = torch.exp(top - lse[..., None]).reshape(-1, q, top.shape[-1]).mean(1)
    few, rows = within(sizes, context), some_rows(q)
    near = native(scores[..., : few[-1]].reshape(-1, q, few[-1])[:, array_like(scores, rows)])
    found = to_numpy(
        torch.stack(sums, 1), ordered, _pareto(top.reshape(-1, q, top.shape[-1])),
        *_around(layer.query[heads][:, :, layer.some(DIMENSION_QUERIES)], key),
        critical_rows(near, few),
        _floor(collector, query[:, :FLOOR_QUERIES], key, value),
    )  # fmt: skip
    by_cluster, weights, pareto, exponent, outside, critical, floor = found
    windows = layer.clusters[layer.places(DETAIL_QUERIES)]
    effective, square, size, largest = np.split(by_cluster, [len(sizes) * part for part in (1, 2, 3)], -1)
    mean = [part.sum(2).mean(1) / q for part in (effective, square, size, largest)]
    with np.errstate(divide="ignore", invalid="ignore"):  # where the limit is 0 there is no relative error
        plugged_in = np.sqrt(mean[1] / mean[2])
    ranks = 2 ** np.arange(int(np.log2(top.shape[-1])) + 1)
    dimension, share = _local_dimension(exponent, outside)
    return LayerDetail(
        mean[0], plugged_in, mean[3][:, 0], mean[3][:, 1], ranks, weights[:, -ranks], np.median(pareto, axis=-1),
        dimension, share, critical_factors(critical, few, windows[rows], seed=assignment.seed),
        effective_sums=effective, top_sums=largest[..., 0],
        members=np.bincount(windows, minlength=len(member)).astype(float),
        floor=np.repeat(floor, layer.query.shape[1]),
    )  # fmt: skip


def _effective(scores: Tensor, sizes: list[int]) -> Tensor:
    """Effective tokens 1/Σw² of nested samples, the first n of scores (..., m, N) for each of J sizes: (..., m, J)."""
    nested: list[Tensor] = []
    for start, stop in pairwise([0, *sizes]):
        if stop > start:
            block = scores[..., start:stop]
            peak = block.amax(-1, keepdim=True)  # of the block itself, so that not all its weights vanish
            weights = torch.exp(block - peak)
            sums = torch.stack((weights.sum(-1), torch.linalg.vecdot(weights, weights))).double()
            both = sums.log() + torch.stack((peak, 2 * peak)).double()[..., 0]
            nested.append(torch.logaddexp(nested[-1], both) if nested else both)
        else:
            nested.append(nested[-1])
    lse, lse2 = torch.stack(nested, -1)
    return torch.exp(2 * lse - lse2)


def _attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sum-exp, output and second moments, for `plug_in_errors`, of scores (..., m, n) over values (..., n, v).

    Last the largest weight and the entropy, (..., m, 2).
    """
    peak = scores.amax(-1, keepdim=True)
    below = scores - peak
    weights = torch.exp(below)
    mass = weights.sum(-1, keepdim=True).double()
    # From scores relative to the largest, so that nothing cancels.
    entropy = mass.log() - torch.linalg.vecdot(weights, below)[..., None].double() / mass
    output = (weights @ value).double() / mass
    lengths = value.square().sum(-1, keepdim=True)
    second = weights.square_() @ torch.cat((value, lengths, torch.ones_like(lengths)), -1)
    lse = (peak.double() + mass.log())[..., 0]
    return lse, output, second.double() / mass.square(), torch.cat((1 / mass, entropy), -1)


def _of_queries(state: State, m: int, chosen: Tensor) -> State:
    """Restrict a state (h, G · m) to some queries of each head."""
    parts = (part.reshape(len(part), -1, m, *part.shape[2:]) for part in (state.lse, state.output))
    lse, output = (part[:, :, chosen].flatten(1, 2) for part in parts)
    return State(state.count, lse, output)


def _floor(collector: Collector, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Relative error of the kernel against dense float64 attention, for a few queries over one sample, (h,)."""
    fast = state_of(query, key, value, kernel=collector.layer.kernel).output
    weights = torch.softmax(scores_of(query.double(), key.double(), collector.layer.traits.softcap), -1)
    exact = weights @ value.double()
    away, size = ((part * part).sum((-2, -1)).sqrt() for part in (fast - exact, exact))
    return away / size.clamp_min(torch.finfo(torch.float64).tiny)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest scores in increasing order: (..., N) to (..., count)."""
    rows = native(scores)
    if isinstance(rows, Tensor):
        return rows.topk(count, -1).values.flip(-1)
    return torch.from_numpy(np.sort(np.partition(rows, -count)[..., -count:]))


def _pareto(largest: Tensor) -> Any:
    """Pareto shape of each query's weights from its largest scores in increasing order: (..., m + 1) to (...)."""
    if largest.shape[-1] < _FEWEST_SCORES:
        return torch.full_like(largest[..., 0], torch.nan)
    return sorted_shape(native(largest))


def _around(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The local exponent of keys (h, n, k) around queries (h, G, q, k), and whether they lie outside: (h · G, q) twice.

    `statistics.local_exponent` and its `support` for all heads at once; all vectors are normalised. NaN where the
    nearest keys are too few, at the query, or all at one distance.
    """
    n, shape = key.shape[1], (query.shape[0] * query.shape[1], query.shape[2])
    if n < 4 * FEWEST_NEIGHBOURS:
        none = torch.full(shape, torch.nan, dtype=torch.float64, device=key.device)
        return none, none
    unit, count = normalize(key.double(), dim=-1), usual_count(n)
    others = unit[:, array_like(key, references(n))]
    cosine = torch.cat((normalize(query.double(), dim=-1).flatten(1, 2), others), 1) @ unit.mT
    square = (2 - 2 * _largest(cosine, min(count, n - 1) + 1).flip(-1)).clamp_min(0)
    distance, asked = square.sqrt(), query.shape[1] * query.shape[2]
    nearest, own = distance[:, :asked, :count], distance[:, asked:, -1]
    spread = (nearest[..., 0] > 0) & (nearest[..., FEWEST_NEIGHBOURS] > nearest[..., 0])
    outside = support_of(nearest[..., -1], own) < OUTSIDE
    return exponents(nearest).masked_fill(~spread, torch.nan).reshape(shape), outside.reshape(shape)


def _local_dimension(exponent: Array, outside: Array) -> tuple[Array, Array]:
    """The median over queries of the exponents (heads, q) around them, and the share of them outside: (heads,) twice.

    Only queries within the keys' support count; with fewer than half of them there is none.
    """
    found, share = np.full((2, len(exponent)), np.nan)
    for head, known in enumerate(~np.isnan(exponent)):
        if known.any():
            share[head] = outside[head, known].mean()
            if share[head] < 0.5:
                found[head] = np.median(exponent[head, known & (outside[head] == 0)])
    return found, share
