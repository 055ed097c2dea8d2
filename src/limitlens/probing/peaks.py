"""Hardmax attention of real heads: the value at the largest score among n tokens, against that among all of the pool.

The largest score is mergeable (`attention.state.Peak`), so the cells of every replicate give the whole curve in the one
pass. For Gaussian tokens the error falls like a power of ln n, not of n (`theory.hardmax`): the fit says which.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.state import Peak
from limitlens.errors import Array
from limitlens.probing.moment_errors import Squares
from limitlens.probing.pilot import scores_of
from limitlens.sampling.placement import LEFT_OVER

if TYPE_CHECKING:
    from limitlens.probing.collect import Collector

SCORES_AT_ONCE = 1 << 18  # scores formed at a time, few enough to stay in cache


def peak_over(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> Peak:
    """The largest score of queries (..., q, k) over tokens (..., n, ·), n ≥ 1, and its value.

    A state with its detail would say the same for fifteen times the work: the argmax needs no exponentials.
    """
    chunk = max(1, SCORES_AT_ONCE // max(1, key.shape[:-2].numel() * query.shape[-2]))
    parts = (slice(start, start + chunk) for start in range(0, key.shape[-2], chunk))
    peaks = (Peak.of(scores_of(query, key[..., part, :], softcap), value[..., part, :]) for part in parts)
    return reduce(Peak.merge, peaks)


def hardmax_errors(collector: Collector) -> Squares:
    """Squared errors of every head's argmax at every size and replicate, relative to its value over the pool."""
    found = [_shared(collector, head) for head in range(collector.query.shape[0])]
    return Squares(*(np.concatenate(part) for part in zip(*found, strict=True)))


def _shared(collector: Collector, head: int) -> tuple[Array, Array, Array]:
    """Squares (G, C, R, J), outputs (G, C, J) and scale (G, J) of the query heads that read one key/value head."""
    deck, query = collector.deck, collector.detail_query[head]
    groups, clusters = collector.layer.query.shape[1], collector.layer.clusters[collector.layer.detail.cpu().numpy()]
    cells = [[_cell(collector, head, r, j) for j in range(deck.filled.shape[1])] for r in range(deck.replicates)]
    left_over = [Peak(peak.score[head], peak.value[head]) for peak in collector.peaks[-LEFT_OVER:]]
    best = reduce(Peak.merge, [*(cell for row in cells for cell in row), *left_over]).value.double()
    _, clusters = np.unique(clusters, return_inverse=True)
    cluster = torch.nn.functional.one_hot(torch.as_tensor(clusters, device=query.device))
    member = cluster.double() * cluster.shape[1] / len(clusters)  # (q, C)

    def of(peak: Peak) -> Tensor:
        """Squared differences from the pool's, (G, C)."""
        return (peak.value - best).square().sum(-1).reshape(groups, -1) @ member

    squares = torch.stack([torch.stack([of(peak) for peak in accumulate(row, Peak.merge)], -1) for row in cells], -2)
    own = (best.square().sum(-1).reshape(groups, -1) @ member)[..., None].expand(*squares.shape[:2], squares.shape[-1])
    scale = own.mean(1)
    return squares.cpu().numpy(), (own / scale[:, None].clamp_min(1e-300)).cpu().numpy(), scale.sqrt().cpu().numpy()


def _cell(collector: Collector, head: int, r: int, j: int) -> Peak:
    """The peak of the detail queries of one key/value head over a cell; over nothing where it got no tokens."""
    deck = collector.deck
    if not deck.kept[r, j]:
        peak = collector.peaks[deck.number[r, j]]
        return Peak(peak.score[head], peak.value[head])
    cell = slice(int(deck.start[r, j]), int(deck.start[r, j] + deck.filled[r, j]))
    key, value = collector.key[cell, head], collector.value[cell, head]
    query = collector.detail_query[head]
    if not len(key):
        return Peak.empty((), len(query), value.shape[-1], like=value)
    return peak_over(query, key, value, collector.layer.traits.softcap)
