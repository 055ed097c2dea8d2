"""Expected softmax weights and output moments of attention over random keys, as a scaling limit or exact at n keys.

`PoissonPoints(theta, a)` gives the limit, `KeyPoints(law, n, beta)` the exact value; x = βD is a key's rescaled gap.
The largest weight w₁ is that of the nearest key. With V and Λ of `points.py`,

    E e^{−λ(1/w₁ − 1)} = ψ(λ) = ∫ V(H(x, λ)) dΛ(x),     H(x, λ) = Λ([0, x]) + ∫_x^∞ (1 − exp(−λ e^{x−u})) dΛ(u).

For a = 1 (d = 3), E[1/w₁] = 1 + θ and P(w₁ ≥ 1/2) = e^{−γθ}/Γ(1+θ) (generalised Dickman law).
"""

import math
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.errors import Array, check_kind
from limitlens.theory.prediction import value_matrix
from limitlens.theory.scaling.laws import negligible_beyond
from limitlens.theory.scaling.points import KeyPoints, Points

_MOST_KEYS = 45.0  # the nearest key is within reach(45) but for a probability e^{−45}
_NEAREST_NODES = 151
_STEP = 0.3  # step of log λ: the trapezoidal rule is exact to e^{−π²/0.3} = 5e-15

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


def tangential_mean(points: KeyPoints) -> float:
    """Expected output towards the keys' mean direction, orthogonal to the query, over n keys: E Σ w `law.sideways`."""
    return points.mean_over(lambda x, z: points.law.sideways(x / points.beta) * _softened(z, 1))


def output_law(points: KeyPoints, V: ArrayLike | None = None) -> tuple[Array, Array | None]:
    """Mean (d_out,) and covariance (d_out, d_out) of the output V Γ_n over n keys, for the query q = (1, 0, ..., 0).

    Exact at n (verified). V (d_out, d) is the identity if absent; the keys' mean direction lies in the plane of the
    first two axes. Keys uniform around the query have Cov Γ_n = v qqᵀ + u (I − qqᵀ), v and u the variances along and
    orthogonal to q; for others the covariance is None.

    >>> mean, _ = theory.output_law(theory.KeyPoints(theory.uniform(3), 1000, 20.0), [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> mean.round(4).tolist()
    [0.9495, 0.0]
    """
    check_kind("points", points, KeyPoints, "n keys, theory.KeyPoints(law, n, beta)")
    dim, around = points.law.dim, points.law.tangent_dim
    value = value_matrix(V, dim)
    mean = np.zeros(dim)
    mean[:2] = 1 - gap_mean(points) / points.beta, tangential_mean(points)
    if around is None:
        return value @ mean, None
    variances = np.full(dim, tangential_variance(points, around) / points.beta)
    variances[0] = gap_variance(points) / points.beta**2
    return value @ mean, (value * variances) @ value.T


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


def _grid(points: Points, largest: float) -> tuple[Array, Array, Array, Array]:
    """Quadrature over the nearest gap x: dΛ(x), Λ([0, x]) (rows,); and over u > x: e^{x−u}, dΛ(u) (rows, nodes)."""
    (x,), (mass,) = points.between(np.zeros(1), points.reach([_MOST_KEYS]), _NEAREST_NODES)
    end = np.minimum(x + math.log(max(1.0, largest)) + negligible_beyond(points.a), points.edge)
    u, rest = points.between(np.minimum(x, end), end)
    return mass, points.cumulative(x), np.exp(x[:, None] - u), rest


def _softened(z: Array, power: int) -> Array:
    return np.exp(power * z - np.exp(z))
