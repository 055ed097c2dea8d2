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
from limitlens.statistics.gap_counting import critical_inverse_temperature

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


def critical_factors(
    scores: Array, sizes: Sequence[int], clusters: NDArray[np.intp], context: int, *, seed: int = 0
) -> CriticalFactor:
    """That of one head in a context, from scores (q, N) of queries in clusters (q,) over nested samples."""
    sizes = [size for size in sizes if size <= context] or sizes[:1]
    some = np.unique(np.linspace(0, len(scores) - 1, QUERIES).astype(int))
    rows = np.stack([critical_inverse_temperature(scores[some, :size]) for size in sizes])  # (J, q)
    _, place = np.unique(clusters[some], return_inverse=True)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xC817]))
    count = int(place.max()) + 1
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)[:, place]
    medians = _medians(rows, np.vstack((np.ones(len(some), int), drawn)))
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(medians)
        here = (sizes[-1], float(medians[0, -1]), float(medians[0, -1] * logs[1:, -1].std(ddof=1)))
    if len(sizes) < 2 or not np.isfinite(logs).all():
        return CriticalFactor(*here, None, None)
    x = np.log(np.asarray(sizes, float))
    slopes = logs @ (x - x.mean()) / np.square(x - x.mean()).sum()
    return CriticalFactor(*here, float(slopes[0]), float(slopes[1:].std(ddof=1)))


def _medians(rows: Array, weights: NDArray[np.int64]) -> Array:
    """Medians of rows (J, q) under each of these weights (w, q), (w, J)."""
    order = np.argsort(rows, axis=1)
    heaped = np.cumsum(weights[:, order], axis=2)  # (w, J, q)
    total = heaped[..., -1:]
    ends = [(heaped >= np.maximum(share, 1)).argmax(2) for share in ((total + 1) // 2, total // 2 + 1)]
    ranked = np.take_along_axis(rows, order, 1)
    return np.asarray(np.mean([ranked[np.arange(len(rows)), end] for end in ends], axis=0))
