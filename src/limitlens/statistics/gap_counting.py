"""The critical inverse temperature of rows of scores, from how many keys lie within a gap of the largest.

With gaps g_i = max s − s_i and their counting function N(g) = #{i: g_i ≤ g}, one over the largest weight at β is

    Z(β) = Σ e^{−β g_i} = ∫ e^{−βg} dN(g),

the Laplace transform of N: it falls from n at β = 0 to the number of keys that tie. The critical scale is where Z stops
being of order one, so N alone decides it (Hayase and Karakida, arXiv 2605.12697). It is taken here at Z(β) = 5, more
keys than chance lets tie; where keys thin out like a power, P(D ≤ s) ~ c s^a, any number gives the same growth with n:
the nearest gaps are then a Poisson process of some θ, with E Z = 1 + θ for a = 1, so that Z = 5 fixes θ and β grows as
the critical one, n^{1/a}. Verified by simulation for a = 1, 2 and 4, n from 300 to 30,000; a heuristic for real keys.
"""

import numpy as np

from limitlens.errors import Array

KEYS = 5.0  # the Z at which attention counts as critical
STEPS = 60  # Newton's; a row that needs more has keys that all but tie
CLOSE = 1e-6  # relative step at which a root counts as found


def critical_inverse_temperature(scores: Array, keys: float = KEYS) -> Array:
    """The β by which each row of scores (rows, n) must be multiplied for Z(β) = `keys`, (rows,).

    Infinite where so many keys tie for the largest score, 0 with no more than so many keys. ln Z is convex and falls,
    so Newton's steps from β = 0 never pass the root.
    """
    gaps = scores.max(axis=1, keepdims=True) - scores
    if scores.shape[1] <= keys:
        return np.zeros(len(scores))
    found = np.where((gaps <= 0).sum(axis=1) >= keys, np.inf, 0.0)
    rows = np.flatnonzero(np.isfinite(found))
    for _ in range(STEPS):
        if not len(rows):
            break
        gap, beta = gaps[rows], found[rows]
        weight = np.exp(-beta[:, None].astype(gap.dtype) * gap)
        mass = weight.sum(axis=1, dtype=float)
        step = np.log(mass / keys) * mass / np.einsum("rn,rn->r", weight, gap)
        found[rows] = beta + step
        rows = rows[step > CLOSE * found[rows]]
    return found
