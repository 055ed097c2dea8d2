"""What a head does with its tokens: how many share the mass, how much the largest takes, how heavy the tail is.

Measured on the replicates that were kept whole and on some queries of each head, from every score. The atom that
every context contains is left out, except from the predicted error: these are properties of the pooled law.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from limitlens.attention.kernels import state_of, state_of_scores
from limitlens.attention.state import State
from limitlens.errors import Array
from limitlens.heads.critical_factor import CriticalFactor, critical_factors
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import scores_of
from limitlens.probing.plug_in import plug_in_errors
from limitlens.sampling.workers import product
from limitlens.statistics.local_exponent import FEWEST_NEIGHBOURS, OUTSIDE, local_exponent, support
from limitlens.statistics.tails import pareto_shape, tail_length

FLOOR_QUERIES = 4  # queries of a head attended again in float64
DIMENSION_QUERIES = 16  # queries of a head at which the local dimension of its keys is estimated
_FEWEST_SCORES = 6  # below this there is no tail to fit


@dataclass(frozen=True, eq=False)
class LayerDetail:
    """Diagnostics of every head of a layer; means over queries and replicates unless said otherwise."""

    effective_tokens: Array  # (heads, J): 1/Σw² of samples of each size
    predicted_error: Array  # (heads, J): by the central limit theorem, from the largest sample (`probing.plug_in`)
    top_weight: Array  # (heads,): the largest weight and the entropy of the weights, in nats, at the largest size
    entropy: Array
    ranks: NDArray[np.int64]  # (K,), (heads, K): the weights of rank 1, 2, 4, ... in the largest sample of replicate 0
    ordered_weights: Array
    # (heads,): medians over queries, NaN with too few tokens: Pareto shape of the weights, local exponent of the keys
    pareto_k: Array
    local_dimension: Array  # NaN too where most queries lie outside the keys' support
    outside_support: Array  # (heads,): the share of queries that do
    critical: tuple[CriticalFactor, ...]  # (heads,): the factor at which the scores of replicate 0 are critical
    # (heads, W, C, J), (heads, W, C) and (C,): sums of effective tokens and of the largest weight over the queries of
    # each cluster in each whole replicate, and how many queries those are
    effective_sums: Array
    top_sums: Array
    members: Array
    floor: float  # relative difference of the outputs of a few queries over the largest sample from the same in float64


def layer_detail(collector: Collector, context: int) -> LayerDetail:
    """Attend the whole replicates once more, with every score in sight, one key/value head at a time."""
    parts = [_shared_detail(collector, head, context) for head in range(collector.query.shape[0])]
    apart = ("ranks", "members", "critical", "floor")
    names = [part.name for part in fields(LayerDetail) if part.name not in apart]
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    critical, floor = tuple(chain.from_iterable(part.critical for part in parts)), max(part.floor for part in parts)
    return LayerDetail(ranks=parts[0].ranks, members=parts[0].members, critical=critical, floor=floor, **together)


def _shared_detail(collector: Collector, head: int, context: int) -> LayerDetail:
    """The detail of the G query heads that read one key/value head."""
    deck, layer = collector.deck, collector.layer
    groups, m, _ = layer.query.shape[1:]
    query, tail = collector.detail_query[head], tail_length(deck.filled[0].sum())
    detail = layer.detail
    atom = None if layer.atom is None else _of_queries(layer.atom[head], groups, m, detail)
    member = torch.nn.functional.one_hot(torch.as_tensor(layer.clusters, device=query.device)[detail]).double()

    def heads(per_query: Tensor) -> Tensor:
        """Mean over queries, (G · q, ...) to (G, ...)."""
        return per_query.reshape(groups, -1, *per_query.shape[1:]).mean(1)

    def clusters(per_query: Tensor) -> Tensor:
        """Sums over the queries of each cluster, (G · q, ...) to (G, C, ...)."""
        return torch.einsum("gq...,qc->gc...", per_query.reshape(groups, len(member), *per_query.shape[1:]), member)

    found: list[tuple[Tensor, ...]] = []
    for r in reversed(range(deck.whole)):  # replicate 0 comes last, and its largest sample is looked at again
        chosen = torch.as_tensor(deck.slots_of(r), device=collector.key.device)  # nested sizes in order
        (key, value), sizes = collector.kept(chosen, head), deck.filled[r].cumsum().tolist()
        scores = scores_of(query, key, layer.traits.softcap)
        samples = _nested(scores, value, sizes)
        effective, last = torch.stack([sample.effective_sample_size for sample in samples], -1), samples[-1]
        plugged = map(heads, plug_in_errors(last, atom, sizes))
        shares = (clusters(effective), clusters(last.top_weights[..., 0]))
        found.append((*shares, heads(effective), heads(last.top_weights[..., 0]), heads(last.entropy), *plugged))
    every = [np.asarray(torch.stack(part).cpu()) for part in zip(*found, strict=True)]
    effective_tokens, top_weight, entropy, square, size = (part.mean(0) for part in every[2:])
    top = scores.topk(tail + 1, -1).values.double().reshape(groups, len(query) // groups, -1)
    ranks = 2 ** np.arange(int(np.log2(top.shape[-1])) + 1)
    dimension, outside = _local_dimension(layer.query[head][:, layer.some(DIMENSION_QUERIES)], key)
    each = np.asarray(scores.float().cpu()).reshape(groups, -1, len(key))
    windows = layer.clusters[detail.cpu().numpy()]
    with np.errstate(divide="ignore", invalid="ignore"):  # where the limit is 0 there is no relative error
        plugged_in = np.sqrt(square / size)
    return LayerDetail(
        effective_tokens, plugged_in, top_weight, entropy, ranks,
        effective_sums=every[0].swapaxes(0, 1), top_sums=every[1].swapaxes(0, 1),
        members=np.asarray(member.sum(0).cpu()),
        ordered_weights=np.asarray(heads(torch.exp(top.flatten(0, 1) - last.lse[:, None])).cpu())[:, ranks - 1],
        pareto_k=_pareto(np.asarray(top.cpu())),
        local_dimension=dimension, outside_support=outside,
        critical=tuple(critical_factors(rows, sizes, windows, context, seed=deck.seed) for rows in each),
        floor=_floor(collector, query[:FLOOR_QUERIES], key, value),
    )  # fmt: skip


def _nested(scores: Tensor, value: Tensor, sizes: list[int]) -> list[State]:
    """States with their detail of nested samples: the first n tokens of scores (m, N) and values (N, v), for each n."""
    state = State.empty((), len(scores), value.shape[-1], top=1, device=scores.device)
    samples = []
    for start, stop in pairwise([0, *sizes]):
        if stop > start:
            state = state.merge(state_of_scores(scores[:, start:stop], value[start:stop], top=1))
        samples.append(state)
    return samples


def _of_queries(state: State, groups: int, m: int, chosen: Tensor) -> State:
    """A state (G · m) restricted to some queries of each head."""
    lse, output = state.lse.reshape(groups, m)[:, chosen], state.output.reshape(groups, m, -1)[:, chosen]
    return State(state.count, lse.flatten(), output.flatten(0, 1))


def _floor(collector: Collector, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The kernel in its own precision against dense float64: a few queries over one sample (n, ·)."""
    fast = state_of(query, key, value, kernel=collector.layer.kernel).output
    weights = torch.softmax(scores_of(query.double(), key.double(), collector.layer.traits.softcap), -1)
    exact = weights @ value.double()
    return float((fast - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _pareto(top_scores: Array) -> Array:
    """The median over queries of the Pareto shape: the largest scores (heads, q, tail + 1) to (heads,)."""
    if top_scores.shape[-1] < _FEWEST_SCORES:
        return np.full(len(top_scores), np.nan)
    return np.asarray(np.median(pareto_shape(top_scores), axis=-1))


def _local_dimension(query: Tensor, key: Tensor) -> tuple[Array, Array]:
    """The median over queries (G, q, k) of the local exponent of keys (n, k) around them, and the share outside: (G,).

    All are normalised. Only queries within the keys' support count; with fewer than half of them there is none.
    """
    unit = normalize(key.double(), dim=-1)
    keys, cosine = (np.asarray(part.cpu()) for part in (unit, normalize(query.double(), dim=-1) @ unit.T))
    found, share = np.full((2, len(cosine)), np.nan)
    for head, rows in enumerate(np.sqrt(np.maximum(2 - 2 * cosine, 0))):
        if fits := [local_exponent(row) for row in rows if _spread(row)]:
            outside = support([fit.radius for fit in fits], keys, matmul=product) < OUTSIDE
            share[head] = outside.mean()
            if share[head] < 0.5:
                found[head] = np.median([fit.exponent for fit, out in zip(fits, outside, strict=True) if not out])
    return found, share


def _spread(distances: Array) -> bool:
    """Whether the nearest keys are enough, away from the query, and at different distances."""
    if len(distances) < 4 * FEWEST_NEIGHBOURS:
        return False
    nearest = np.partition(distances, FEWEST_NEIGHBOURS)[: FEWEST_NEIGHBOURS + 1]
    return bool(0 < nearest.min() < nearest.max())
