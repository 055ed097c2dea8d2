"""Hardmax attention (argmax for softmax) over one-dimensional Gaussian tokens of mean 0: the mean output.

For A > 0 the mean output over n tokens that are their own queries is (N₊ max + N₋ min)/n, N± the numbers of positive
and negative tokens. Its expected absolute value falls like 1/√ln n.
"""

from functools import partial
from math import log, pi, sqrt

import numpy as np
from scipy.special import log_ndtr

from limitlens.errors import check_number
from limitlens.theory.prediction import Status
from limitlens.theory.statuses import CLAIMS

FINITE_FROM = 1000  # tokens from which simulations confirm the finite law within 2%
check_size = partial(check_number, "n", expected="a number of tokens of at least 2", low=2)
check_scale = partial(check_number, "scale", expected="a standard deviation of at least 0")


def hardmax_asymptotic(n: float, scale: float = 1.0) -> float:
    """E|mean output| of hardmax attention over many tokens N(0, `scale`²): ln(4) σ / (2 √(2 ln n)) (arXiv 2512.10656).

    Proved as n → ∞. Measured values are 1.44 times this at n = 1e2, 1.05 times at 1e4 and 1.03 times at 1e6.

    >>> round(theory.hardmax_asymptotic(10_000), 4)
    0.1615
    """
    return check_scale(scale) * log(4.0) / (2.0 * sqrt(2.0 * log(check_size(n))))


def hardmax_finite(n: float, scale: float = 1.0) -> float:
    """E|mean output| of hardmax attention over n tokens N(0, `scale`²): σ √(I² + (2/π) E[max]²/n), I = ∫ Φⁿ (1 - Φⁿ).

    Verified from n = 1,000 on (within 2.5%, 0.5% from 1e4 on for A > 0), heuristic below (within 22%).

    >>> round(theory.hardmax_finite(10_000), 4)
    0.17
    """
    expected, half_gap = extremes(check_size(n))
    return check_scale(scale) * sqrt(half_gap**2 + (2.0 / pi) * expected**2 / n)


def finite_status(n: float) -> Status:
    """Status of `hardmax_finite` at n tokens: heuristic below 1,000, where errors reach 22% and depend on A's sign."""
    return CLAIMS["hardmax.finite"].at(n >= FINITE_FROM)


def extremes(n: float) -> tuple[float, float]:
    """Expected maximum of n standard normal tokens, and I = ∫ Φⁿ (1 - Φⁿ), Φ the normal distribution function."""
    x, step = np.linspace(-10.0, sqrt(2.0 * log(n)) + 10.0, 4001, retstep=True)
    log_power = log_ndtr(x)
    density = n * np.exp((n - 1) * log_power - x**2 / 2) / sqrt(2.0 * pi)
    power = np.exp(n * log_power)
    return float(step * (x @ density)), float(step * (power @ (1.0 - power)))
