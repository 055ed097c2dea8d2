"""What a head does with its tokens: how many share the mass, how much the largest takes, how heavy the tail is.

Measured on the replicates that were kept whole and on the first queries of each head, from every score. The atom that
every context contains is left out, except from the predicted error: these are properties of the pooled law.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from limitlens.attention.kernels import state_of
from limitlens.attention.state import State
from limitlens.errors import Array
from limitlens.heads.collect import DETAIL_QUERIES, Collector
from limitlens.heads.pilot import scores_of
from limitlens.heads.plug_in import plug_in_errors
from limitlens.statistics.local_exponent import FEWEST_NEIGHBOURS, local_exponent
from limitlens.statistics.tails import pareto_shape, tail_length

FLOOR_QUERIES = 4  # queries of a head attended again in float64
DIMENSION_QUERIES = 16  # queries of a head at which the local dimension of its keys is estimated
_FEWEST_SCORES = 6  # below this there is no tail to fit


@dataclass(frozen=True, eq=False)
class LayerDetail:
    """Diagnostics of every head of a layer; means over queries and replicates unless said otherwise.

    Attributes
    ----------
    effective_tokens : (heads, J)
        1/Σw² of samples of each size.
    hardmax_error : (heads, J)
        Relative error of attention with argmax in the place of softmax against its own value over the whole pool: root
        mean square over queries, finite pool corrected for.
    predicted_error : (heads, J)
        Relative output error by the central limit theorem, from the largest sample, with the atom where there is one.
    top_weight, entropy : (heads,)
        The largest weight and the entropy of the weights, in nats, at the largest size.
    ranks, ordered_weights : (K,), (heads, K)
        The weights of rank 1, 2, 4, ... in the largest sample of replicate 0.
    pareto_k : (heads,)
        Pareto shape of the weights of the largest sample of replicate 0, median over queries; NaN with too few tokens.
    local_dimension : (heads,)
        Local exponent of normalised keys around normalised queries, median over queries; NaN with too few tokens.
    floor : float
        Relative difference of the outputs of a few queries over the largest sample from the same in float64.
    """

    effective_tokens: Array
    hardmax_error: Array
    predicted_error: Array
    top_weight: Array
    entropy: Array
    ranks: NDArray[np.int64]
    ordered_weights: Array
    pareto_k: Array
    local_dimension: Array
    floor: float


def layer_detail(collector: Collector) -> LayerDetail:
    """Attend the whole replicates once more, with every score in sight, one key/value head at a time."""
    parts = [_shared_detail(collector, head) for head in range(collector.query.shape[0])]
    together = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("effective_tokens", "hardmax_error", "predicted_error", "top_weight", "entropy", "ordered_weights")
    }
    return LayerDetail(
        **together,
        ranks=parts[0].ranks,
        pareto_k=np.concatenate([part.pareto_k for part in parts]),
        local_dimension=np.concatenate([part.local_dimension for part in parts]),
        floor=max(part.floor for part in parts),
    )


def _shared_detail(collector: Collector, head: int) -> LayerDetail:
    """The detail of the G query heads that read one key/value head."""
    deck, layer = collector.deck, collector.layer
    groups, m, _ = layer.query.shape[1:]
    query = collector.detail_query[head]
    atom = None if layer.atom is None else _of_detail_queries(layer.atom[head], groups, m)
    found: list[tuple[Tensor, ...]] = []
    scores = key = value = torch.empty(0)
    for r in reversed(range(deck.whole)):  # replicate 0 comes last, and its scores are used again
        key, value, sizes = _replicate(collector, head, r)
        scores = scores_of(query, key, layer.traits.softcap)
        plug_in = (part.reshape(groups, -1, len(sizes)).mean(1) for part in plug_in_errors(scores, value, atom, sizes))
        found.append((*_sums(collector, head, scores, value, sizes), *plug_in))
    effective, hardmax, top_weight, entropy, errors, outputs = (
        np.asarray(torch.stack(part).mean(0).cpu()) for part in zip(*found, strict=True)
    )
    top = scores.topk(tail_length(scores.shape[-1]) + 1, -1).values.double().reshape(groups, len(query) // groups, -1)
    lse = scores.logsumexp(-1).double().reshape(groups, -1, 1)
    ranks = 2 ** np.arange(int(np.log2(top.shape[-1])) + 1)
    return LayerDetail(
        effective_tokens=effective,
        hardmax_error=hardmax,
        predicted_error=np.sqrt(errors / outputs),
        top_weight=top_weight,
        entropy=entropy,
        ranks=ranks,
        ordered_weights=np.asarray(torch.exp(top - lse).mean(1).cpu())[:, ranks - 1],
        pareto_k=_pareto(np.asarray(top.cpu())),
        local_dimension=_local_dimension(layer.query[head, :, :DIMENSION_QUERIES], key),
        floor=_floor(collector, query[:FLOOR_QUERIES], key, value),
    )


def _of_detail_queries(state: State, groups: int, m: int) -> State:
    """A state (G · m) restricted to the detail queries of each head."""
    lse = state.lse.reshape(groups, m)[:, :DETAIL_QUERIES]
    output = state.output.reshape(groups, m, -1)[:, :DETAIL_QUERIES]
    return State(state.count, lse.flatten(), output.flatten(0, 1))


def _replicate(collector: Collector, head: int, r: int) -> tuple[Tensor, Tensor, list[int]]:
    """Keys (n, k) and values of a whole replicate, nested sizes in order, and these sizes."""
    deck = collector.deck
    chosen = torch.as_tensor(deck.slots_of(r), device=collector.key.device)
    sizes = [int(size) for size in deck.filled[r].cumsum()]
    return collector.key[chosen, head], collector.value[chosen, head], sizes


def _sums(collector: Collector, head: int, scores: Tensor, value: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Effective tokens and hardmax errors (G, J), top weights and entropies (G,), of nested samples.

    Scores are (G · q, n), values (n, v).
    """
    groups = collector.layer.query.shape[1]

    def heads(per_query: Tensor) -> Tensor:
        """Mean over queries, (G · q,) to (G,)."""
        return per_query.reshape(groups, -1).mean(-1)

    reference = collector.top_value[head].double()
    norm = heads(reference.square().sum(-1)).sqrt()
    # Each step is relative to its own largest score, and steps are merged by logarithms: nothing can underflow.
    lse = lse2 = best = torch.full(scores.shape[:-1], float("-inf"), dtype=torch.float64, device=scores.device)
    mean = torch.zeros_like(lse)
    winner = torch.zeros_like(reference)
    effective, hardmax, start = [], [], 0
    for size in sizes:
        if size > start:
            part = scores[:, start:size]
            top, place = part.max(-1)
            relative = part - top[:, None]
            weights = relative.exp()
            mass, peak = weights.sum(-1).double(), top.double()
            step, step2 = peak + mass.log(), 2 * peak + weights.square().sum(-1).double().log()
            share = torch.sigmoid(step - lse)
            mean = mean + share * (peak + (weights * relative).sum(-1) / mass - mean)
            lse, lse2 = torch.logaddexp(lse, step), torch.logaddexp(lse2, step2)
            better = peak > best
            winner = torch.where(better[:, None], value[start:size][place].double(), winner)
            best = torch.where(better, peak, best)
        effective.append(heads(torch.exp(2 * lse - lse2)))
        unseen = np.sqrt(1 - size / collector.deck.seen)
        hardmax.append(heads((winner - reference).square().sum(-1)).sqrt() / (norm * unseen))
        start = size
    return torch.stack(effective, -1), torch.stack(hardmax, -1), heads(torch.exp(best - lse)), heads(lse - mean)


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


def _local_dimension(query: Tensor, key: Tensor) -> Array:
    """The median over queries (G, q, k) of the local exponent of keys (n, k) around them, all normalised: (G,)."""
    cosine = normalize(query.double(), dim=-1) @ normalize(key.double(), dim=-1).T
    distances = np.asarray((2 - 2 * cosine).clamp_min(0).sqrt().cpu())
    found = np.full(len(distances), np.nan)
    for head, rows in enumerate(distances):
        exponents = [local_exponent(row).exponent for row in rows if _spread(row)]
        if exponents:
            found[head] = np.median(exponents)
    return found


def _spread(distances: Array) -> bool:
    """Whether the nearest keys are enough, away from the query, and at different distances."""
    if len(distances) < 4 * FEWEST_NEIGHBOURS:
        return False
    nearest = np.partition(distances, FEWEST_NEIGHBOURS)[: FEWEST_NEIGHBOURS + 1]
    return bool(0 < nearest.min() < nearest.max())
