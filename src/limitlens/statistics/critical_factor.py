"""Critical factor of a head: the factor β on its scores at which the largest softmax weight of a query is 1/5.

With the gaps g_i = max s − s_i of a query's scores s, one over the largest weight at the factor β is

    Z(β) = Σ e^{−β g_i},

and the critical factor solves Z(β) = 5. Where P(gap ≤ s) ~ c s^a, it grows with n like n^{1/a}, as does the critical
scale of Hayase and Karakida, arXiv 2605.12697 (verified by simulation for a = 1, 2 and 4, n from 300 to 30,000). On
real heads it is a heuristic, since keys are not independent. The factor of a head is the median over its queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitlens.arrays import array_like, library, torch
from limitlens.errors import Array
from limitlens.statistics.bootstrap import random_stream, resample_counts

QUERIES = 32  # largest number of queries of a head that are used
RESAMPLES = 200  # resamples of the windows of the queries, for standard errors
KEYS = 5.0  # one over the largest weight at which attention counts as critical
STEPS = 60  # of Newton's method at most; a row that needs more has keys that nearly tie
CLOSE = 1e-6  # relative step at which the iteration stops
_STEPS_PER_CHECK = 10  # steps on a GPU before the host waits to know whether all rows are solved; real heads need fewer


@dataclass(frozen=True, eq=False)
class CriticalFactor:
    """Factor on a head's scores that makes its largest softmax weight 1/5; if above 1, the head averages over keys."""

    n: int  # number of tokens: the largest size within a context
    factor: float  # infinite where the largest scores of most queries tie
    stderr: float
    growth: float | None  # exponent γ if the factor grows like n^γ; None with an infinite factor or one size
    growth_stderr: float | None


def within(sizes: Sequence[int], context: int) -> list[int]:
    """Sizes of at most `context` tokens, or else the first: larger samples repeat special tokens, whose scores tie."""
    return [size for size in sizes if size <= context] or list(sizes[:1])


def some_rows(count: int) -> NDArray[np.intp]:
    """Evenly spaced indices of at most `QUERIES` of `count` queries, for which the critical factor is computed."""
    return np.unique(np.linspace(0, count - 1, QUERIES).astype(np.intp))


def critical_factors(
    rows: Array, sizes: Sequence[int], clusters: NDArray[np.intp], *, seed: int = 0
) -> tuple[CriticalFactor, ...]:
    """Critical factor of each head, the median over its queries, with bootstrap standard errors.

    `rows` (J, heads, q) are the factors of single queries at J nested sizes, from `critical_rows`. Windows of text are
    resampled; `clusters` (q,) says which window each query comes from.
    """
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
    """Weighted medians (w, ...) over the last axis of rows (..., q), one for each of w vectors of counts (w, q)."""
    order, total = np.argsort(rows, axis=-1), weights.sum(1)
    heaped = np.cumsum(weights.T.astype(np.int32)[np.moveaxis(order, -1, 0)], axis=0, dtype=np.int32)  # (q, ..., w)
    ends = [(heaped < np.maximum(share, 1)).sum(0) for share in ((total + 1) // 2, total // 2 + 1)]
    ranked = np.take_along_axis(rows, order, -1)
    return np.moveaxis(np.mean([np.take_along_axis(ranked, end, -1) for end in ends], axis=0), -1, 0)


def critical_rows(scores: Any, sizes: Sequence[int]) -> Any:
    """Factor β on the scores (..., N) of each query that makes its largest softmax weight over the first n keys 1/5.

    Solves Σ_j e^{−β (max s − s_j)} = 5 at J sizes n: (J, ...). β is infinite if 5 or more keys tie, and 0 if n ≤ 5.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    if library(scores) is np:
        gaps = (rows[:, :size].max(1, keepdims=True) - rows[:, :size] for size in sizes)
        found = np.stack([_solve(gap, gap.shape[1], 0) for gap in gaps])
    else:  # all sizes at once: keys beyond a size have gap 0, and are subtracted from the counts as padding
        counts = array_like(scores, np.asarray(sizes))
        beyond = torch.arange(rows.shape[1], device=scores.device) >= counts[:, None]
        largest = torch.stack([rows[:, :size].amax(1) for size in sizes])
        gaps = (largest[..., None] - rows).masked_fill(beyond[:, None], 0.0)
        counts = counts.repeat_interleave(len(rows), output_size=len(sizes) * len(rows))
        found = _solve(gaps.flatten(0, 1), counts, rows.shape[1] - counts)
    return found.reshape(len(sizes), *scores.shape[:-1])


def critical_of_first(scores: Any, counts: NDArray[np.int64]) -> Any:
    """Factor of each of the rows of scores (rows, N) over its own number of first keys, `counts` (rows,): (rows,)."""
    lib, many = library(scores), array_like(scores, counts)
    beyond = array_like(scores, np.arange(scores.shape[1])) >= many[:, None]
    gaps = lib.where(beyond, -lib.inf, scores).max(1)
    gaps = lib.where(beyond, 0.0, (gaps if lib is np else gaps.values)[:, None] - scores)
    return _solve(gaps, many, scores.shape[1] - many)


def _solve(gaps: Any, count: Any, padding: Any) -> Any:
    """Solve Σ e^{−β gap} = `KEYS` for β (rows,), given gaps (rows, n) of which `count` are real and `padding` zeros."""
    lib = library(gaps)
    beta = lib.zeros_like(gaps[:, 0], dtype=lib.float64)
    tied = ((gaps <= 0).sum(1) - padding >= KEYS) & (count > KEYS)
    unsolved = ~tied & (count > KEYS)
    for step_number in range(1, STEPS + 1):
        # On a CPU only unsolved rows are computed; a GPU computes all, since the host would wait to know which.
        rows = np.flatnonzero(unsolved) if lib is np else ...
        gap, before = gaps[rows], beta[rows]
        weight = lib.exp(-lib.asarray(before, dtype=gap.dtype)[:, None] * gap)
        mass = weight.sum(1, dtype=lib.float64) - (padding if isinstance(padding, int) else padding[rows])
        step = lib.log(mass / KEYS) * mass / lib.einsum("rn,rn->r", weight, gap)
        beta[rows] = lib.where(unsolved[rows], before + step, before)
        unsolved[rows] &= step > CLOSE * beta[rows]
        if (lib is np or step_number % _STEPS_PER_CHECK == 0) and not unsolved.any():
            break
    return lib.where(tied, lib.inf, beta)
