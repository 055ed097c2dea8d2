"""Expectations of the softmax weights and moments of the output, in the scaling limit or exact at finite n.

`PoissonPoints(theta, a)` gives the scaling limit, `KeyPoints(law, n, beta)` the exact value at n. The output is given
by its gap β(1 − <q, Γ>) = Σ w x along the query, and √β times its coordinates across it.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.errors import Array, InputError, as_array
from limitlens.theory._inputs import value_matrix
from limitlens.theory.scaling.control import check_keys, critical_beta
from limitlens.theory.scaling.laws import GapLaw
from limitlens.theory.scaling.points import KeyPoints, Points


def participation(points: Points) -> float:
    """Expected participation E Σ w²: 1 for a single key, 1/m for m equal ones. Its kernel is e^{2z − e^z}.

    >>> round(theory.participation(theory.PoissonPoints(1.0, 1.0)), 4)  # the scaling limit in dimension 3
    0.4385
    >>> round(theory.participation(theory.KeyPoints(theory.uniform(5), 10_000, 122.0)), 4)  # exact at n
    0.2045
    """
    return points.mean_over(lambda x, z: _softened(z, 2))


def beta_sharing(n: float, law: GapLaw, keys: float) -> float:
    """The β at which n keys have the effective number 1/EΣw² = `keys`, exactly; comparable across dimensions.

    >>> round(theory.beta_sharing(10_000, theory.uniform(5), keys=5), 1)
    120.2
    """
    if not 1 < keys < check_keys(n):
        raise InputError(f"keys is {keys:g} of {n:g}; expected more than one and less than all of them")

    def excess(log_beta: float) -> float:
        return math.log(keys * participation(KeyPoints(law, n, math.exp(log_beta))))

    low = high = math.log(critical_beta(n, law, min(1.0, n / 2)))
    while excess(low) > 0:
        low -= 1
    while excess(high) < 0:
        high += 1
    return math.exp(float(optimize.brentq(excess, low, high, xtol=1e-9)))


def entropy(points: Points) -> float:
    """Expected entropy E[−Σ w log w] = −d/dp E Σ w^p at p = 1. Its kernel is −(z + γ) e^{z − e^z}, γ Euler's constant.

    >>> round(theory.entropy(theory.PoissonPoints(1.0, 2.0)), 4)
    2.1443
    """
    return points.mean_over(lambda x, z: -(z + np.euler_gamma) * _softened(z, 1))


def gap_mean(points: Points) -> float:
    """Expected gap of the output along the query, E Σ w x = β E(1 − <q, Γ>).

    >>> round(theory.gap_mean(theory.PoissonPoints(1.0, 2.0)), 4)
    2.2773
    """
    return points.mean_over(lambda x, z: x * _softened(z, 1))


def gap_variance(points: Points) -> float:
    """Variance of the output along the query times β², Var Σ w x: a sum over keys plus one over pairs of keys.

    >>> round(theory.gap_variance(theory.PoissonPoints(1.0, 2.0)), 4)
    0.4741
    """
    mean = gap_mean(points)
    single = points.mean_over(lambda x, z: np.square(x - mean) * _softened(z, 2))
    return single + points.mean_over(lambda x, z: (x - mean) * _softened(z, 1), chosen=2)


def tangential_variance(points: Points, tangent_dim: int) -> float:
    """Variance of one coordinate of the output across the query times β, E Σ w² ρ² / tangent_dim.

    Keys are uniform around the query, so pairs of keys average to zero; ρ is √β times a key's distance to the axis.

    >>> round(theory.tangential_variance(theory.PoissonPoints(1.0, 2.0), tangent_dim=4), 4)
    0.1386
    """
    return points.mean_over(lambda x, z: points.tangent_square(x) * _softened(z, 2)) / tangent_dim


def output_law(points: KeyPoints, query: ArrayLike, V: ArrayLike | None = None) -> tuple[Array, Array]:
    """Mean (d_out,) and covariance (d_out, d_out) of the output V Γ_n at a unit query (d,), exact at n [V].

    V (d_out, d) is the identity when absent. For keys uniform around the query, E Γ_n = (1 − E Σwx/β) q and
    Cov Γ_n = v qqᵀ + u (I − qqᵀ), v and u the variances along and across it; values V k give V (Cov Γ_n) Vᵀ.

    >>> mean, covariance = theory.output_law(theory.KeyPoints(theory.uniform(3), 1000, 20.0), [0.0, 0.0, 1.0])
    >>> mean.round(4).tolist(), covariance.shape
    ([0.0, 0.0, 0.9495], (3, 3))
    """
    q = as_array("query", query, ndim=1)
    value = value_matrix(V, len(q))
    around = points.law.tangent_dim
    if around is None or len(q) != around + 1 or abs(float(q @ q) - 1) > 1e-6:
        given = f"the query has shape {q.shape} and length {float(np.linalg.norm(q)):.4g}"
        raise InputError(f"{given}; expected a unit query of the dimension of the keys, and keys uniform around it")
    along = gap_variance(points) / points.beta**2
    across = tangential_variance(points, around) / points.beta
    spread = along * np.outer(q, q) + across * (np.eye(len(q)) - np.outer(q, q))
    return value @ q * (1 - gap_mean(points) / points.beta), np.asarray(value @ spread @ value.T)


def _softened(z: Array, power: int) -> Array:
    """e^{pz − e^z}."""
    return np.exp(power * z - np.exp(z))
