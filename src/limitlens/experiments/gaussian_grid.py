"""Attention over very many one-dimensional Gaussian tokens: tokens are rounded to a grid and only counts are drawn.

The law is the discrete Gaussian, proportional to exp(-y²/2) on a grid of step 0.01: its cumulant generating function is
t²/2 to machine precision (the sum of a Gaussian over a fine grid does not depend on its shift), so the limit is exactly
H x. A replicate of a billion tokens costs one row of counts and two matrix-vector products.
"""

from dataclasses import dataclass

import numpy as np

from limitlens.errors import Array, InputError

STEP = 0.01
MARGIN = 2.0  # of the grid beyond √(2 ln n): 100 or more tokens leave it with probability below 1e-4
STEEPEST = 20.0  # largest horizon: beyond it all weights of the farthest query may underflow, below e^{-700}


@dataclass(frozen=True)
class GridErrors:
    """Errors of attention over n tokens, one entry per replicate, each of shape (replicates,)."""

    mean: Array  # signed, of the mean and variance of the outputs, queries being the tokens themselves
    variance: Array
    absolute: Array  # |Γ_n(x) - Γ(x)| and its square averaged over queries from the law, independent of the tokens
    square: Array


def check_horizon(horizon: float) -> None:
    """Refuse a horizon that is too large for the grid."""
    if not abs(horizon) <= STEEPEST:
        raise InputError(f"the horizon is {horizon}; expected at most {STEEPEST:g}; larger ones are close to hardmax")


def grid_errors(signed_horizon: float, n: int, replicates: int, seed: int) -> GridErrors:
    """Draw `replicates` samples of n standard normal tokens and attend to them with A = `signed_horizon`."""
    check_horizon(signed_horizon)
    if not 2 <= n <= 10**15:
        raise InputError(f"n is {n}; expected between 2 and 1e15 tokens")
    half = round((np.sqrt(2 * np.log(n)) + MARGIN) / STEP)
    y = np.arange(-half, half + 1) * STEP
    probability = np.exp(-(y**2) / 2)
    probability /= probability.sum()
    rng = np.random.default_rng(np.random.SeedSequence([seed, n]))
    counts = rng.multinomial(n, probability, size=replicates).T.astype(np.float64)
    scores = signed_horizon * np.outer(y, y)
    kernel = np.exp(scores - scores.max(axis=1, keepdims=True))
    output = (kernel @ (counts * y[:, None])) / (kernel @ counts)
    share = counts / n
    mean = np.sum(share * output, axis=0)
    error = output - signed_horizon * y[:, None]
    return GridErrors(
        mean=mean,
        variance=np.sum(share * output**2, axis=0) - mean**2 - signed_horizon**2,
        absolute=probability @ np.abs(error),
        square=probability @ error**2,
    )
