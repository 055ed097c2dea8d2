"""The law of the largest weight w₁, in the scaling limit and at finite n.

If the nearest key is at x, the others are beyond it and 1/w₁ = 1 + Σ e^{x − x_i}. With V as in `points.py`,

    E e^{−λ(1/w₁ − 1)} = ψ(λ) = ∫ V(H(x, λ)) dΛ(x),     H(x, λ) = Λ([0, x]) + ∫_x^∞ (1 − exp(−λ e^{x−u})) dΛ(u),

whence E w₁ = ∫ e^{−λ} ψ(λ) dλ and, by inverting the Laplace transform ψ(λ)/λ, the distribution function. For a = 1
(d = 3) 1/w₁ − 1 follows the generalised Dickman law: E[1/w₁] = 1 + θ and P(w₁ ≥ 1/2) = e^{−γθ}/Γ(1+θ).
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.scaling._quadrature import tanh_sinh
from limitlens.theory.scaling.laws import negligible_beyond
from limitlens.theory.scaling.points import Points, PoissonPoints

_MOST_KEYS = 45.0  # the nearest key is within reach(45) up to a probability e^{−45}
_NEAREST_NODES, _PATH_NODES = 151, 201
_STEP = 0.3  # step of log λ: the trapezoidal rule is exact to e^{−π²/0.3} = 5e-15
_ORDER = 12  # order of the Euler inversion: about 7 digits, with 10⁴ times the rounding error of ψ


def mean_inverse_top(points: Points) -> float:
    """Expected inverse of the largest weight, E[1/w₁] = 1 + ∫ V₂(Λ[0, x]) ∫_x^∞ e^{x−u} dΛ(u) dΛ(x).

    >>> round(theory.mean_inverse_top(theory.PoissonPoints(1.0, 1.0)), 4)  # 1 + θ in dimension 3
    2.0
    """
    mass, within, ratio, rest = _grid(points, 1.0)
    return 1 + float(mass @ (points.void(within, chosen=2) * np.einsum("ij,ij->i", ratio, rest)))


def mean_top(points: Points) -> float:
    """Expected largest weight, E w₁ = ∫ e^{−λ} ψ(λ) dλ, integrated over log λ.

    >>> round(theory.mean_top(theory.PoissonPoints(1.0, 2.0)), 4)
    0.3461
    """
    lowest, highest = -math.log(mean_inverse_top(points)) - 37, 4.0
    log_lambda = np.arange(lowest, highest, _STEP)
    mass, within, ratio, rest = _grid(points, math.exp(highest))

    def transform(lam: float) -> float:
        """ψ(λ)."""
        return float(mass @ points.void(within + np.einsum("ij,ij->i", -np.expm1(-lam * ratio), rest)))

    return _STEP * float(np.exp(log_lambda - np.exp(log_lambda)) @ [transform(math.exp(value)) for value in log_lambda])


def top_cdf(weights: ArrayLike, points: PoissonPoints) -> Array:
    """P(w₁ ≤ t) in the scaling limit for weights t in (0, 1), by inverting the Laplace transform of 1/w₁ − 1.

    The Euler inversion (Abate and Whitt, 2006) of P(1/w₁ − 1 ≤ v) at v = 1/t − 1 has an absolute error of about 1e-7,
    and up to 5e-4 next to t = 1/2, where the density has a kink.

    >>> theory.top_cdf([0.3, 0.6], theory.PoissonPoints(1.0, 2.0)).round(4).tolist()
    [0.4117, 0.9602]
    """
    t = as_array("weights", weights)
    if t.size and not (t.min() > 0 and t.max() < 1):
        raise InputError(f"weights reach from {t.min():g} to {t.max():g}; expected weights strictly between 0 and 1")
    abscissae, coefficients = _euler(_ORDER)
    below = np.empty(t.size)
    for index, v in enumerate((1 / t - 1).ravel()):
        below[index] = coefficients @ np.array([(_rotated_laplace(points, s / v) / s).real for s in abscissae])
    return np.clip(1 - below.reshape(t.shape), 0, 1)


def _nearest(points: Points) -> tuple[Array, Array]:
    """Nodes for the nearest key and their masses under Λ, both (rows,)."""
    x, mass = points.between(np.zeros(1), points.reach([_MOST_KEYS]), _NEAREST_NODES)
    return x[0], mass[0]


def _grid(points: Points, largest: float) -> tuple[Array, Array, Array, Array]:
    """dΛ and Λ([0, x]) at nodes x for the nearest key, (rows,), e^{x−u} and dΛ at nodes u beyond it, (rows, nodes).

    They hold for every |λ| up to `largest`: u ends where λ e^{x−u} is negligible.
    """
    x, mass = _nearest(points)
    end = np.minimum(x + math.log(max(1.0, largest)) + negligible_beyond(points.a), points.edge)
    u, rest = points.between(np.minimum(x, end), end)
    return mass, points.cumulative(x), np.exp(x[:, None] - u), rest


def _rotated_laplace(points: PoissonPoints, lam: complex) -> complex:
    """ψ(λ) for one λ = |λ| e^{iφ} with positive real part.

    exp(−λ e^{x−u}) oscillates along the real u ≥ x. The integrand is analytic, so the path goes from x to x + iφ and
    then parallel to the real axis, where λ e^{x−u} is real.
    """
    x, mass = _nearest(points)
    size, angle = abs(lam), math.atan2(lam.imag, lam.real)
    node, _, weight = tanh_sinh(_PATH_NODES)
    climb = angle * node
    length = math.log(max(1.0, size)) + negligible_beyond(points.a)
    along = length * node
    rising = -np.expm1(-lam * np.exp(-1j * climb)) * (1j * angle * weight)
    level = -np.expm1(-size * np.exp(-along)) * (length * weight)
    power = points.a - 1
    inner = (x[:, None] + 1j * climb) ** power @ rising + (x[:, None] + 1j * angle + along) ** power @ level
    expected = points.cumulative(x) + points.theta / math.gamma(points.a) * inner
    return complex(mass @ points.void(expected))


@lru_cache(maxsize=1)
def _euler(order: int) -> tuple[NDArray[np.complex128], Array]:
    """Abscissae s and coefficients of f(v) ≈ Σ coefficient · Re F(s/v)/v, where F is the Laplace transform of f."""
    k = np.arange(2 * order + 1)
    taper = np.ones(2 * order + 1)
    taper[0] = 0.5
    taper[order + 1 :] = 1 - np.cumsum(special.comb(order, np.arange(order))) / 2**order
    abscissae = np.asarray(order * math.log(10) / 3 + 1j * math.pi * k, dtype=np.complex128)
    return abscissae, 10 ** (order / 3) * (-1.0) ** k * taper
