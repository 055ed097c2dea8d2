"""Expected properties of the ordered weights and of the output, for the limit and for finite n alike.

Of `PoissonPoints(theta, a)` they are the scaling limit, of `KeyPoints(law, n, beta)` exact at finite n. The output is
described by its gap β(1 − <q, Γ>) = Σ w x along the query, and √β times its coordinates across it.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.scaling.control import check_keys, critical_beta
from limitlens.theory.scaling.laws import GapLaw
from limitlens.theory.scaling.points import KeyPoints, Points


def participation(points: Points) -> float:
    """E Σ w²: one for a single key, 1/m for m equal ones. Kernel e^{2z − e^z}.

    >>> round(theory.participation(theory.PoissonPoints(1.0, 1.0)), 4)  # the scaling limit in dimension 3
    0.4385
    >>> round(theory.participation(theory.KeyPoints(theory.uniform(5), 10_000, 122.0)), 4)  # exact at n
    0.2045
    """
    return points.mean_over(lambda x, z: _softened(z, 2))


def beta_sharing(n: float, law: GapLaw, keys: float) -> float:
    """The β at which `keys` keys share the mass of n, 1/EΣw² = keys, exact: what a regime means in any dimension.

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
    """E[−Σ w log w] = −d/dp E Σ w^p at p = 1. Kernel −(z + γ) e^{z − e^z}, γ being Euler's constant.

    >>> round(theory.entropy(theory.PoissonPoints(1.0, 2.0)), 4)
    2.1443
    """
    return points.mean_over(lambda x, z: -(z + np.euler_gamma) * _softened(z, 1))


def gap_mean(points: Points) -> float:
    """E Σ w x = β E(1 − <q, Γ>).

    >>> round(theory.gap_mean(theory.PoissonPoints(1.0, 2.0)), 4)
    2.2773
    """
    return points.mean_over(lambda x, z: x * _softened(z, 1))


def gap_variance(points: Points) -> float:
    """Var Σ w x, the variance of the output along the query times β²: single keys plus pairs, about the mean.

    >>> round(theory.gap_variance(theory.PoissonPoints(1.0, 2.0)), 4)
    0.4741
    """
    mean = gap_mean(points)
    single = points.mean_over(lambda x, z: np.square(x - mean) * _softened(z, 2))
    return single + points.mean_over(lambda x, z: (x - mean) * _softened(z, 1), chosen=2)


def tangential_variance(points: Points, tangent_dim: int) -> float:
    """β Var of a coordinate of the output across the query, keys uniform around it: E Σ w² ρ² / tangent_dim.

    Directions average to zero, so single keys alone count; ρ is the distance to the axis.

    >>> round(theory.tangential_variance(theory.PoissonPoints(1.0, 2.0), tangent_dim=4), 4)
    0.1386
    """
    return points.mean_over(lambda x, z: points.tangent_square(x) * _softened(z, 2)) / tangent_dim


def output_law(points: KeyPoints, query: ArrayLike, V: ArrayLike | None = None) -> tuple[Array, Array]:
    """Mean (d_out,) and covariance (d_out, d_out) of the output V Γ_n at a unit query (d,), exact at n [V].

    V (d_out, d) is the identity when absent. Keys uniform around the query have E Γ_n = (1 − E Σwx/β) q and
    Cov Γ_n = v qqᵀ + u (I − qqᵀ), v and u the variances along and across it; values V k carry them to V · Vᵀ.

    >>> mean, covariance = theory.output_law(theory.KeyPoints(theory.uniform(3), 1000, 20.0), [0.0, 0.0, 1.0])
    >>> mean.round(4).tolist(), covariance.shape
    ([0.0, 0.0, 0.9495], (3, 3))
    """
    q, around = as_array("query", query, ndim=1), points.law.tangent_dim
    value = np.eye(len(q)) if V is None else as_array("V", V, ndim=2)
    if around is None or len(q) != around + 1 or value.shape[1] != len(q) or abs(float(q @ q) - 1) > 1e-6:
        told = f"the query has shape {q.shape} and length {float(np.linalg.norm(q)):.4g}, V shape {value.shape}"
        raise InputError(f"{told}; expected keys uniform around a unit query of their dimension, and V to match")
    along, across = gap_variance(points) / points.beta**2, tangential_variance(points, around) / points.beta
    spread = along * np.outer(q, q) + across * (np.eye(len(q)) - np.outer(q, q))
    return value @ q * (1 - gap_mean(points) / points.beta), np.asarray(value @ spread @ value.T)


def _softened(z: Array, power: int) -> Array:
    """e^{pz − e^z}."""
    return np.exp(power * z - np.exp(z))
