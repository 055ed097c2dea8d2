"""How far a head's scores are from critical: the factor on them at which the largest weight is one fifth.

Each query's row has its own critical factor (`statistics.gap_counting`); the head's is the median over queries, which
rows whose largest scores tie leave finite. Errors come from resampling the windows of the queries; the tokens are those
of one sample. A pool of n tokens holds a special token once for each window, and its copies tie: so no more tokens are
looked at than a context has. On real heads all this is a heuristic: keys are neither independent nor of one power law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array
from limitlens.statistics.bootstrap import random_stream, resample_counts

QUERIES = 32  # rows of a head that are solved, at most
RESAMPLES = 200


@dataclass(frozen=True, eq=False)
class CriticalFactor:
    """Above 1 the scores would have to be multiplied to be critical: the head averages; below 1 it has concentrated."""

    n: int  # among so many tokens of the pooled law: the largest size within a context
    factor: float  # infinite where most rows tie
    stderr: float
    growth: float | None  # γ of its growth n^γ up to there; None with an infinite factor or at one size
    growth_stderr: float | None


def within(sizes: Sequence[int], context: int) -> list[int]:
    """The sizes that are looked at: those within a context, or the smallest."""
    return [size for size in sizes if size <= context] or list(sizes[:1])


def some_rows(count: int) -> NDArray[np.intp]:
    """Which of so many queries are looked at, (at most `QUERIES`,)."""
    return np.unique(np.linspace(0, count - 1, QUERIES).astype(np.intp))


def critical_factors(
    rows: Array, sizes: Sequence[int], clusters: NDArray[np.intp], *, seed: int = 0
) -> tuple[CriticalFactor, ...]:
    """Those of heads, from the critical factors (J, heads, q) of queries in clusters (q,) at nested sizes."""
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
    return tuple(CriticalFactor(sizes[-1], *here, *(g if told else (None, None))) for *here, g, told in heads)


def _medians(rows: Array, weights: NDArray[np.int64]) -> Array:
    """Medians of rows (..., q) under each of these weights (w, q), (w, ...)."""
    order, total = np.argsort(rows, axis=-1), weights.sum(1)
    heaped = np.cumsum(weights.T.astype(np.int32)[np.moveaxis(order, -1, 0)], axis=0, dtype=np.int32)  # (q, ..., w)
    ends = [(heaped < np.maximum(share, 1)).sum(0) for share in ((total + 1) // 2, total // 2 + 1)]
    ranked = np.take_along_axis(rows, order, -1)
    return np.moveaxis(np.mean([np.take_along_axis(ranked, end, -1) for end in ends], axis=0), -1, 0)
