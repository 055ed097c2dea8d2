"""Hardmax attention (argmax for softmax) over Gaussian tokens of mean 0: the size of the mean output.

For d = 1 and A > 0 the mean output over n tokens that are their own queries is (N₊ max + N₋ min)/n, N± the numbers of
positive and negative tokens. Its expected absolute value falls like 1/√ln n. In d > 1, if all singular values of
Σ^{1/2} A Σ^{1/2} are equal, it is the Steiner point of the convex hull of the tokens, and falls like (ln n)^{−(d+1)/4}.
"""

from functools import partial
from math import cos, log, pi, sin, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr, ndtri

from limitlens.errors import as_array, check_covariance, check_number
from limitlens.theory.curve import expected_norm
from limitlens.theory.prediction import Status, value_matrix
from limitlens.theory.scaling.laws import gauss_panels
from limitlens.theory.statuses import CLAIMS

FINITE_FROM = 1000  # tokens from which simulations confirm the finite law within 2%
ISOTROPIC_FROM, ISOTROPIC_DIM = 1000, 5  # tokens and dimension for which simulations confirm the law in d > 1 within 7%
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


def hardmax_isotropic(n: float, covariance: ArrayLike, V: ArrayLike | None = None) -> float:
    """E|mean output| of hardmax attention over n tokens N(0, Σ) in d > 1, if Σ^{1/2} A Σ^{1/2} is a rotation times c.

    Whitened, a query's output is the token of the largest <y, u>, u its direction. With h(u) the maximum over tokens,
    the mean output over all u is s = d ∫ h(u) u du (Steiner point), so E|s|² = d² E[ρ C(ρ)], ρ = <u, u'> for uniform u
    and u', and C(ρ) = Cov(h(u), h(u')). The n queries add E|y|²/n = (E[max²] + d − 1)/n, and s is nearly Gaussian.
    Maxima at an angle above 1/√(2 ln n) are nearly independent, so |s| ~ (2 ln n)^{−(d+1)/4} as n → ∞ (heuristic).

    >>> round(theory.hardmax_isotropic(1000, [[1.0, 0.0], [0.0, 1.0]]), 4)
    0.2619
    """
    spread = check_covariance("covariance", as_array("covariance", covariance, ndim=2))
    dim = int(check_number("the dimension", len(spread), "at least 2; use hardmax_finite in dimension 1", low=2))
    angle, step = gauss_panels(np.append(0, pi / 2.0 ** np.arange(4, -1, -1)))
    share = np.sin(angle) ** (dim - 2) * step
    covariances = np.array([_covariance_of_maxima(check_size(n), one) for one in angle])
    steiner = dim**2 * float((share / share.sum()) @ (np.cos(angle) * covariances))
    square = extremes(n)[0] ** 2 + _covariance_of_maxima(n, 0.0)  # E[max²]
    value = value_matrix(V, dim)
    return expected_norm((steiner + (square + dim - 1) / n) / dim * value @ spread @ value.T)


def _covariance_of_maxima(n: float, angle: float) -> float:
    """Covariance of the maxima of n normal pairs with correlation cos(angle), ∫∫ [P(X ≤ a, Y ≤ b)ⁿ − Φⁿ(a) Φⁿ(b)]."""
    node, weight = np.polynomial.legendre.leggauss(64)
    low, high = max(-8.0, -float(ndtri(-np.expm1(-35.0 / n)))), -float(ndtri(1e-11 / n))
    a, step = low + (high - low) * (node + 1) / 2, (high - low) / 2 * weight
    tail = ndtr(-a)
    either = tail[:, None] + tail - np.outer(tail, tail)  # P(X > a or Y > b) of independent pairs
    square, product = np.add.outer(a**2, a**2), np.outer(a, a)
    half = (pi / 2 - angle) / 2
    for u, du in zip(half * (node + 1), half * weight, strict=True):  # Plackett, r = sin u
        either -= du / (2 * pi) * np.exp(-(square - 2 * product * sin(u)) / (2 * cos(u) ** 2))
    alone = np.exp(n * log_ndtr(a))
    return float(step @ (np.exp(n * np.log1p(-np.minimum(either, 1 - 1e-16))) - np.outer(alone, alone)) @ step)


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
