"""Critical inverse temperature of rows of scores, from how many keys lie within a gap of the largest score.

With gaps g_i = max s − s_i and their counting function N(g) = #{i: g_i ≤ g}, one over the largest weight at β is

    Z(β) = Σ e^{−β g_i} = ∫ e^{−βg} dN(g),

the Laplace transform of N. It falls from n at β = 0 to the number of keys that tie. The critical scale is where Z stops
being of order one, so N alone decides it (Hayase and Karakida, arXiv 2605.12697). Here it is the β of Z(β) = 5, more
keys than tie by chance. Where keys thin out like a power, P(D ≤ s) ~ c s^a, any number gives the same growth with n:
the nearest gaps are then a Poisson process of some θ, with E Z = 1 + θ for a = 1, so that Z = 5 fixes θ and β grows as
the critical one, n^{1/a}. Verified by simulation for a = 1, 2 and 4, n from 300 to 30,000; a heuristic for real keys.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from limitlens.arrays import array_like, library, torch

KEYS = 5.0  # the Z at which attention counts as critical
STEPS = 60  # of Newton's method at most; a row that needs more has keys that nearly tie
CLOSE = 1e-6  # relative step at which the iteration stops
_STEPS_PER_CHECK = 10  # steps on a GPU before the host waits to know whether all rows are solved; real heads need fewer


def critical_inverse_temperature(scores: Any, keys: float = KEYS) -> Any:
    """Solve Σ_j e^{−β (max s − s_j)} = `keys` for β, for each row s of scores (rows, n): (rows,) in float64.

    Infinite where at least `keys` keys tie for the largest score, 0 if n ≤ `keys`. Accepts arrays and tensors.
    """
    return _solve(library(scores).amax(scores, 1)[:, None] - scores, scores.shape[1], 0, keys)


def critical_rows(scores: Any, sizes: Sequence[int]) -> Any:
    """Critical inverse temperature of each row of scores (..., N) over its first n keys, n in `sizes`: (J, ...)."""
    rows = scores.reshape(-1, scores.shape[-1])
    if library(scores) is np:
        found = np.stack([critical_inverse_temperature(rows[:, :size]) for size in sizes])
    else:  # all sizes at once: keys beyond a size have gap 0, and are subtracted from the counts as padding
        counts = array_like(scores, np.asarray(sizes))
        beyond = torch.arange(rows.shape[1], device=scores.device) >= counts[:, None]
        largest = torch.stack([rows[:, :size].amax(1) for size in sizes])
        gaps = (largest[..., None] - rows).masked_fill(beyond[:, None], 0.0)
        counts = counts.repeat_interleave(len(rows), output_size=len(sizes) * len(rows))
        found = _solve(gaps.flatten(0, 1), counts, rows.shape[1] - counts, KEYS)
    return found.reshape(len(sizes), *scores.shape[:-1])


def _solve(gaps: Any, count: Any, padding: Any, keys: float) -> Any:
    """Solve Z(β) = `keys` for rows of gaps (rows, n), of which `count` are real and `padding` are zeros: (rows,).

    ln Z is convex and decreasing, so Newton's method from β = 0 never passes the root.
    """
    lib = library(gaps)
    beta = lib.zeros_like(gaps[:, 0], dtype=lib.float64)
    tied = ((gaps <= 0).sum(1) - padding >= keys) & (count > keys)
    unsolved = ~tied & (count > keys)
    for step_number in range(1, STEPS + 1):
        # On a CPU only unsolved rows are computed; a GPU computes all, since the host would wait to know which.
        rows = np.flatnonzero(unsolved) if lib is np else ...
        gap, before = gaps[rows], beta[rows]
        weight = lib.exp(-lib.asarray(before, dtype=gap.dtype)[:, None] * gap)
        mass = weight.sum(1, dtype=lib.float64) - padding
        step = lib.log(mass / keys) * mass / lib.einsum("rn,rn->r", weight, gap)
        beta[rows] = lib.where(unsolved[rows], before + step, before)
        unsolved[rows] &= step > CLOSE * beta[rows]
        if (lib is np or step_number % _STEPS_PER_CHECK == 0) and not unsolved.any():
            break
    return lib.where(tied, lib.inf, beta)
