"""Expected softmax weights and output moments of attention over random keys, as a scaling limit or exact at n keys.

`PoissonPoints(theta, a)` gives the limit, `KeyPoints(law, n, beta)` the exact value; x = βD is a key's rescaled gap.
The largest weight w₁ is that of the nearest key. With V and Λ of `points.py`,

    E e^{−λ(1/w₁ − 1)} = ψ(λ) = ∫ V(H(x, λ)) dΛ(x),     H(x, λ) = Λ([0, x]) + ∫_x^∞ (1 − exp(−λ e^{x−u})) dΛ(u).

For a = 1 (d = 3), E[1/w₁] = 1 + θ and P(w₁ ≥ 1/2) = e^{−γθ}/Γ(1+θ) (generalised Dickman law).
"""

import math
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from limitlens.errors import Array, InputError, as_array, check_kind
from limitlens.theory.scaling.laws import negligible_beyond, tanh_sinh
from limitlens.theory.scaling.points import Points, PoissonPoints

_MOST_KEYS = 45.0  # the nearest key is within reach(45) but for a probability e^{−45}
_NEAREST_NODES, _PATH_NODES = 151, 201
_STEP = 0.3  # step of log λ: the trapezoidal rule is exact to e^{−π²/0.3} = 5e-15
_ORDER = 12  # order of the Euler inversion: about 7 digits, with 10⁴ times the rounding error of ψ

_EXPECTED = "the gaps of keys, theory.PoissonPoints(theta, a) or theory.KeyPoints(law, n, beta)"
check_points = partial(check_kind, "points", kinds=Points, expected=_EXPECTED)


def participation(points: Points) -> float:
    """Expected participation E Σw² of softmax weights w: 1 if one key has all the weight, 1/m for m equal keys.

    >>> round(theory.participation(theory.KeyPoints(theory.uniform(5), 10_000, 122.0)), 4)
    0.2045
    """
    check_points(points)
    return points.mean_over(lambda x, z: _softened(z, 2))


def entropy(points: Points) -> float:
    """Expected entropy E[−Σ w log w] of the softmax weights w over random keys.

    >>> round(theory.entropy(theory.PoissonPoints(1.0, 2.0)), 4)
    2.1443
    """
    check_points(points)
    return points.mean_over(lambda x, z: -(z + np.euler_gamma) * _softened(z, 1))


def gap_mean(points: Points) -> float:
    """Expected gap β E(1 − <q, Γ>) = E Σ w x between the attention output Γ and the unit query q, times β."""
    return points.mean_over(lambda x, z: x * _softened(z, 1))


def gap_variance(points: Points) -> float:
    """Variance β² Var <q, Γ> = Var Σ w x of the attention output Γ along the query q, times β²."""
    mean = gap_mean(points)
    single = points.mean_over(lambda x, z: np.square(x - mean) * _softened(z, 2))
    return single + points.mean_over(lambda x, z: (x - mean) * _softened(z, 1), chosen=2)


def tangential_variance(points: Points, tangent_dim: int) -> float:
    """Variance, times β, of an output coordinate orthogonal to the query: E Σw²ρ²/tangent_dim, ρ² = tangent_square."""
    return points.mean_over(lambda x, z: points.tangent_square(x) * _softened(z, 2)) / tangent_dim


def keys_holding(points: Points, share: float = 0.9) -> float:
    """Number of nearest keys that together hold a `share` of the softmax weight, when many keys share it (large θ).

    Λ([0, x]) with ∫_0^x e^{−u} dΛ = share · θ; in the scaling limit θ x^a/Γ(a+1), x the `share` quantile of Gamma(a).
    """
    goal = share * math.exp(points.log_theta)

    def missing(x: float) -> float:
        nodes, mass = points.between(np.zeros(1), np.array([x]))
        return float(mass[0] @ np.exp(-nodes[0])) - goal

    high = min(negligible_beyond(points.a), points.edge)
    x = float(optimize.brentq(missing, 1e-12 * high, high))
    return float(points.cumulative(np.array([x]))[0])


def mean_inverse_top(points: Points) -> float:
    """Expected inverse of the largest weight, E[1/w₁] = 1 + ∫ V₂(Λ[0, x]) ∫_x^∞ e^{x−u} dΛ(u) dΛ(x)."""
    mass, within, ratio, rest = _grid(points, 1.0)
    return 1 + float(mass @ (points.void(within, chosen=2) * np.einsum("ij,ij->i", ratio, rest)))


def mean_top(points: Points) -> float:
    """Expected largest softmax weight, E w₁ = ∫ e^{−λ} ψ(λ) dλ with ψ the Laplace transform of 1/w₁ − 1.

    >>> round(theory.mean_top(theory.PoissonPoints(1.0, 2.0)), 4)
    0.3461
    """
    check_points(points)
    lowest, highest = -math.log(mean_inverse_top(points)) - 37, 4.0
    log_lambda = np.arange(lowest, highest, _STEP)
    mass, within, ratio, rest = _grid(points, math.exp(highest))
    transform = [  # ψ(λ)
        mass @ points.void(within + np.einsum("ij,ij->i", -np.expm1(-lam * ratio), rest)) for lam in np.exp(log_lambda)
    ]
    return _STEP * float(np.exp(log_lambda - np.exp(log_lambda)) @ transform)


def top_cdf(weights: ArrayLike, points: PoissonPoints) -> Array:
    """Probability P(w₁ ≤ t) that the largest softmax weight is at most t, for `weights` t in (0, 1), scaling limit.

    By Euler inversion (Abate and Whitt, 2006), with an absolute error of about 1e-7, and up to 5e-4 next to t = 1/2.

    >>> theory.top_cdf([0.3, 0.6], theory.PoissonPoints(1.0, 2.0)).round(4).tolist()
    [0.4117, 0.9602]
    """
    check_kind("points", points, PoissonPoints, "the scaling limit, theory.PoissonPoints(theta, a)")
    t = as_array("weights", weights)
    if t.size and not (t.min() > 0 and t.max() < 1):
        raise InputError(f"weights reach from {t.min():g} to {t.max():g}; expected weights strictly between 0 and 1")
    abscissae, coefficients = _euler(_ORDER)
    transform = [[(_rotated_laplace(points, s / v) / s).real for s in abscissae] for v in (1 / t - 1).ravel()]
    below = np.reshape(transform, (t.size, len(abscissae))) @ coefficients
    return np.clip(1 - below.reshape(t.shape), 0, 1)


def _grid(points: Points, largest: float) -> tuple[Array, Array, Array, Array]:
    """Quadrature over the nearest gap x: dΛ(x), Λ([0, x]) (rows,); and over u > x: e^{x−u}, dΛ(u) (rows, nodes)."""
    (x,), (mass,) = points.between(np.zeros(1), points.reach([_MOST_KEYS]), _NEAREST_NODES)
    end = np.minimum(x + math.log(max(1.0, largest)) + negligible_beyond(points.a), points.edge)
    u, rest = points.between(np.minimum(x, end), end)
    return mass, points.cumulative(x), np.exp(x[:, None] - u), rest


def _rotated_laplace(points: PoissonPoints, lam: complex) -> complex:
    """Laplace transform of 1/w₁ − 1, w₁ the largest weight, at complex λ = |λ| e^{iφ}.

    The path of integration climbs from the real axis by iφ, then runs parallel to the real axis.
    """
    (x,), (mass,) = points.between(np.zeros(1), points.reach([_MOST_KEYS]), _NEAREST_NODES)
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
    """Abscissae s and coefficients of the inverse Laplace transform f(v) ≈ Σ coefficient · Re F(s/v)/v of F."""
    k = np.arange(2 * order + 1)
    taper = np.ones(2 * order + 1)
    taper[0] = 0.5
    taper[order + 1 :] = 1 - np.cumsum(special.comb(order, np.arange(order))) / 2**order
    abscissae = np.asarray(order * math.log(10) / 3 + 1j * math.pi * k, dtype=np.complex128)
    return abscissae, 10 ** (order / 3) * (-1.0) ** k * taper


def _softened(z: Array, power: int) -> Array:
    return np.exp(power * z - np.exp(z))
