"""Cumulant generating function K of a coordinate of a uniform point on the unit sphere in R^d, and its derivatives.

With r ≥ 0, real d ≥ 1, ν = d/2 − 1 and I_ν the modified Bessel function,

    K(r) = log E exp(r X₁) = log[Γ(ν+1) (2/r)^ν I_ν(r)],    A(r) = K'(r) = I_{ν+1}(r) / I_ν(r),    A'(r) = K''(r).

Orders ν ≥ 24 use the Debye expansion. Lower orders follow by a stable downward recurrence: with g = A/r,

    g_ν = 1 / (2(ν+1) + r² g_{ν+1}),    K_ν = K_{ν+1} + log(1 + r² g_{ν+1} / (2(ν+1))),
    A'_ν = g_ν² (2(ν+1) − r² A'_{ν+1})    (loses a factor of about d/(d−1), so d = 1 has its own formula).

Relative errors, measured against 60 digits, are at most 1e-15 for K and A, and 5e-13 for A' (docs/measures.md).
"""

import math
from functools import lru_cache

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import by_blocks

_LOWEST_DEBYE_ORDER = 24.0
_DEBYE_TERMS = 11
_BLOCK = 1 << 13  # values evaluated at a time, so that temporaries fit into the processor's cache


def radial_K(r: ArrayLike, dim: float) -> Array:
    """K(r) = log E exp(r X₁) of a coordinate X₁ of a uniform point on the unit sphere in R^d, d = `dim`."""
    return _evaluate(r, dim, 0)


def radial_mean(r: ArrayLike, dim: float) -> Array:
    """Mean A(r) = I_{d/2}(r) / I_{d/2−1}(r) of X₁ for the density ∝ exp(r x₁) on the unit sphere in R^d, d = `dim`."""
    return np.minimum(np.asarray(r) * _evaluate(r, dim, 1), 1)


def radial_tangential(r: ArrayLike, dim: float) -> Array:
    """Variance A(r)/r of X₂ for the density ∝ exp(r x₁) on the unit sphere in R^d, A = `radial_mean`; 1/d at r = 0."""
    return _evaluate(r, dim, 1)


def radial_variance(r: ArrayLike, dim: float) -> Array:
    """Variance A'(r) = 1 − A² − (d−1)A/r of X₁ for the density ∝ exp(r x₁) on the unit sphere in R^d, A = E X₁."""
    return _evaluate(r, dim, 2)


def _evaluate(r: ArrayLike, dim: float, derivative: int) -> Array:
    """K(r) (`derivative` 0), A(r)/r (1) or A'(r) (2) for the unit sphere in R^d, d = `dim`, at radii r of any shape."""
    radii = as_array("r", r)
    if radii.size and radii.min() < 0:
        raise InputError(f"r holds {radii.min():.6g}; expected radii, so pass absolute values")
    order = check_number("dim", dim, "a dimension of at least 1", low=1) / 2 - 1
    return by_blocks(lambda rows: _recur(rows[:, 0], order, derivative), radii[..., None], _BLOCK)


def _recur(r: Array, order: float, derivative: int) -> Array:
    """K(r) (`derivative` 0), A(r)/r (1) or A'(r) (2) at r (m,) for the `order` ν = d/2 − 1, by recurrence."""
    if derivative == 2 and order == -0.5:  # d = 1: A = tanh, and the recurrence would lose the exponentially small A'
        decay: Array = np.exp(-2 * r)
        return 4 * decay / np.square(1 + decay)
    steps = max(0, math.ceil(_LOWEST_DEBYE_ORDER - order))
    top = order + steps
    square, s = r * r, np.hypot(r, top)
    p, series = top / s, _debye(top)
    phi = series.phi(p)
    tangential: Array = 1 / (s + top) - phi / (s * s)
    if derivative == 0:
        gap = square / (s + top)  # s − top
        correction = gap / s * series.increment(p)  # F(1) − F(p)
        found: Array = gap - top * np.log1p(gap / (2 * top)) - 0.5 * np.log1p(gap / top) - correction
    elif derivative == 2:
        found = p / (s + top) + ((1 - 2 * p * p) * phi + (1 - p * p) * series.p_phi_prime(p)) / (s * s)
    for step in range(steps, 0, -1):
        twice = 2 * (order + step)  # 2(μ+1) for the order μ below
        lift = square * tangential
        tangential = 1 / (twice + lift)
        if derivative == 0:
            found += np.log1p(lift / twice)
        elif derivative == 2:
            found = tangential * tangential * (twice - square * found)
    return tangential if derivative == 1 else found


class _Debye:
    """Debye expansion of log I_ν (modified Bessel function of order ν), as polynomials in p = ν/s with s = √(ν² + r²).

    log I_ν(r) = s + ν log(r/(ν+s)) − ½ log(2πs) + F(p), where F = Σ_k D_k(p)/ν^k solves
    νF' = ½(p²(1−p²)F')' + ½p²(1−p²)F'² + (1−5p²)/8 with F(0) = 0 (the logarithm of DLMF 10.41.3 and 10.41.9).
    `increment` is (F(p) − F(1))/(p − 1), `phi` is φ(p) = ½ + pF'(p), `p_phi_prime` is p φ'(p).
    """

    def __init__(self, order: float) -> None:
        zero, p = Polynomial([0.0]), Polynomial([0.0, 1.0])
        weight = p**2 * (1 - p**2) / 2
        slopes = [(1 - 5 * p**2) / 8]  # D_1', D_2', …
        for k in range(1, _DEBYE_TERMS):
            products = sum((slopes[i] * slopes[k - 2 - i] for i in range(k - 1)), zero)
            slopes.append((weight * slopes[-1]).deriv() + weight * products)
        slope = sum((term / order ** (k + 1) for k, term in enumerate(slopes)), zero)
        integral = slope.integ()
        self.increment = (integral - integral(1.0)) // (p - 1)
        self.phi = 0.5 + p * slope
        self.p_phi_prime = p * self.phi.deriv()


_debye = lru_cache(maxsize=256)(_Debye)
