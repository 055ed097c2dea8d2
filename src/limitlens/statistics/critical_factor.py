"""Critical factor of a head: the factor on its scores at which the largest weight is one fifth.

Each query has its own critical factor (`statistics.gap_counting`); the head's is the median over queries, which stays
finite when the largest scores of some queries tie. Standard errors come from resampling the windows of the queries; the
tokens are those of one sample. A pool of n tokens holds a special token once for each window, and its copies tie, so no
more tokens are used than a context has. On real heads this is a heuristic: keys are not independent, nor of one power
law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array
from limitlens.statistics.bootstrap import random_stream, resample_counts

QUERIES = 32  # queries of a head that are used, at most
RESAMPLES = 200


@dataclass(frozen=True, eq=False)
class CriticalFactor:
    """Critical factor of a head: above 1 the head averages, below 1 it has concentrated."""

    n: int  # number of tokens: the largest size within a context
    factor: float  # infinite where the largest scores of most queries tie
    stderr: float
    growth: float | None  # exponent γ of its growth like n^γ; None with an infinite factor or one size
    growth_stderr: float | None


def within(sizes: Sequence[int], context: int) -> list[int]:
    """The sizes within a context, or the smallest size."""
    return [size for size in sizes if size <= context] or list(sizes[:1])


def some_rows(count: int) -> NDArray[np.intp]:
    """Indices of at most `QUERIES` of `count` queries, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, QUERIES).astype(np.intp))


def critical_factors(
    rows: Array, sizes: Sequence[int], clusters: NDArray[np.intp], *, seed: int = 0
) -> tuple[CriticalFactor, ...]:
    """Critical factors of heads from those of their queries (J, heads, q) at nested sizes, queries in clusters (q,)."""
    _, place = np.unique(clusters, return_inverse=True)
    drawn = resample_counts(random_stream(seed, 0xC817), int(place.max()) + 1, RESAMPLES)[:, place]
    medians = _medians(rows, np.vstack((np.ones(len(place), int), drawn)))
    x = np.log(np.asarray(sizes, float))
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(medians)  # (w, J, heads)
        factor = medians[0, -1]
        stderr = factor * logs[1:, -1].std(0, ddof=1)
        slopes = np.einsum("wjh,j->wh", logs, x - x.mean()) / np.square(x - x.mean()).sum()
        growth = np.stack((slopes[0], slopes[1:].std(0, ddof=1)), 1)
    known = [len(sizes) > 1 and bool(np.isfinite(head).all()) for head in logs.transpose(2, 0, 1)]
    heads = zip(factor.tolist(), stderr.tolist(), growth.tolist(), known, strict=True)
    return tuple(CriticalFactor(sizes[-1], *own, *(slope if fits else (None, None))) for *own, slope, fits in heads)


def _medians(rows: Array, weights: NDArray[np.int64]) -> Array:
    """Weighted medians of rows (..., q) for each of the weights (w, q): (w, ...)."""
    order, total = np.argsort(rows, axis=-1), weights.sum(1)
    heaped = np.cumsum(weights.T.astype(np.int32)[np.moveaxis(order, -1, 0)], axis=0, dtype=np.int32)  # (q, ..., w)
    ends = [(heaped < np.maximum(share, 1)).sum(0) for share in ((total + 1) // 2, total // 2 + 1)]
    ranked = np.take_along_axis(rows, order, -1)
    return np.moveaxis(np.mean([np.take_along_axis(ranked, end, -1) for end in ends], axis=0), -1, 0)
