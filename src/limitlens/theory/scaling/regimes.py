"""The two sides of the critical scale: averaging over many keys (θ → ∞) and collapse onto one key (θ → 0)."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from limitlens.errors import check_number
from limitlens.theory.scaling.control import check_beta, check_keys
from limitlens.theory.scaling.laws import GapLaw, Law, negligible_beyond
from limitlens.theory.scaling.points import Points


@dataclass(frozen=True)
class Averaging:
    """The output Γ_n of attention in the subcritical regime, by the central limit theorem."""

    mean: float  # the limit of <q, Γ_n>: A_d(β) for uniform keys
    shrinkage: float  # 1 − mean, to full relative accuracy: about a/β for large β
    bias: float  # E<q, Γ_n> − mean at order 1/n: −(A(2β) − A(β)) / n_eff
    radial_variance: float  # [Var_{2β}(D) + (A(2β) − A(β))²] / n_eff
    # variance of one coordinate across the query, E_{2β}[D(2−D)] / (tangent_dim · n_eff), for keys uniform around it
    tangential_variance: float | None
    effective_sample_size: float  # n_eff = n e^{2K(β) − K(2β)}, which tends to 2^a θ


def averaging(n: float, beta: float, law: GapLaw) -> Averaging:
    """Mean, bias and variances of the output for large θ: accurate for θ > 10, and the output is Gaussian for θ > 100.

    >>> output = theory.averaging(10_000, 10.0, theory.uniform(5))
    >>> round(output.mean, 4), round(output.effective_sample_size, 1)
    (0.8111, 511.6)
    """
    check_keys(n)
    log_laplace, means, variances = law.tilted(np.array([check_beta(beta), 2 * beta]))
    size = n * math.exp(2 * log_laplace[0] - log_laplace[1])
    mean, mean_2, variance_2 = float(means[0]), float(means[1]), float(variances[1])  # of D, at β and 2β
    variance = (variance_2 + (mean - mean_2) ** 2) / size
    across = None
    if law.tangent_dim is not None:
        across = (2 * mean_2 - variance_2 - mean_2**2) / (law.tangent_dim * size)
    return Averaging(1 - mean, mean, (mean_2 - mean) / size, variance, across, size)


def shrinkage_expansion(beta: float, dim: int) -> float:
    """Expansion a/β − (d−1)(d−3)/(8β²) of 1 − A_d(β) for large β; `Averaging.shrinkage` is exact.

    >>> round(theory.shrinkage_expansion(100.0, dim=5), 5)
    0.0199
    """
    return (dim - 1) / (2 * check_beta(beta)) - (dim - 1) * (dim - 3) / (8 * beta**2)


def keys_holding(points: Points, share: float = 0.9) -> float:
    """The number Λ([0, x]) of nearest keys that hold a `share` of the weight for large θ: ∫_0^x e^{−u} dΛ = share · θ.

    In the scaling limit it is θ x^a/Γ(a+1), x the `share` quantile of the Gamma(a) law.

    >>> round(theory.keys_holding(theory.KeyPoints(theory.uniform(5), 10_000, 20.0)), 1)
    251.8
    """
    goal = share * math.exp(points.log_theta)

    def missing(x: float) -> float:
        nodes, mass = points.between(np.zeros(1), np.array([x]))
        return float(mass[0] @ np.exp(-nodes[0])) - goal

    high = min(negligible_beyond(points.a), points.edge)
    x = float(optimize.brentq(missing, 1e-12 * high, high))
    return float(points.cumulative(np.array([x]))[0])


def collapse_deficit(n: float, beta: float, local: Law) -> float:
    """Weight off the nearest key as θ → 0, E(1 − w₁) ≈ ln 2 · a Γ(2 − 1/a) (nc)^{1/a} / β, for a > 1/2.

    >>> round(theory.collapse_deficit(10_000, 10_000.0, theory.uniform(5)), 4)
    0.0106
    """
    wanted = "more than 1 for the collapse law (keys on a circle have a logarithm instead): use the exact mean_top"
    check_number("the local exponent", 2 * local.a, wanted, low=1, closed=False)
    log_scale = (math.log(check_keys(n)) + local.log_c) / local.a
    return math.log(2) * local.a * math.gamma(2 - 1 / local.a) * math.exp(log_scale) / check_beta(beta)


def nearest_distance(n: float, local: Law, rank: int = 1) -> float:
    """Mean distance E|q − k| of the key of a given rank for large n: √2 Γ(rank + 1/α)/Γ(rank) (nc)^{−1/α}.

    >>> round(theory.nearest_distance(10_000, theory.uniform(5)), 4)
    0.1377
    """
    inverse = 1 / (2 * local.a)
    log_ratio = math.lgamma(rank + inverse) - math.lgamma(rank)
    return math.sqrt(2) * math.exp(log_ratio - inverse * (math.log(check_keys(n)) + local.log_c))
