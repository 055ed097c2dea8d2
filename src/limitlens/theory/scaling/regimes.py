"""The two sides of the critical scale: attention that averages (θ → ∞) and attention that collapses (θ → 0)."""

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
    shrinkage: float  # 1 − mean, to full relative accuracy: a/β − … for β large
    bias: float  # E<q, Γ_n> − mean at order 1/n: −(A(2β) − A(β)) / n_eff
    radial_variance: float  # [Var_{2β}(D) + (A(2β) − A(β))²] / n_eff
    # of one coordinate across the query: E_{2β}[D(2−D)] / (tangent_dim · n_eff); None unless keys are uniform around it
    tangential_variance: float | None
    effective_sample_size: float  # n_eff = n e^{2K(β) − K(2β)}, which tends to 2^a θ


def averaging(n: float, beta: float, law: GapLaw) -> Averaging:
    """Mean, bias and variances of the output for θ large; good from θ of about 10, Gaussian in shape from about 100.

    >>> told = theory.averaging(10_000, 10.0, theory.uniform(5))
    >>> round(told.mean, 4), round(told.effective_sample_size, 1)
    (0.8111, 511.6)
    """
    check_keys(n)
    (log_single, log_double), (mean, sharper), (_, variance) = law.tilted(np.array([check_beta(beta), 2 * beta]))
    spread = float(variance)
    size = n * math.exp(2 * log_single - log_double)
    across = None if law.tangent_dim is None else (2 * sharper - spread - sharper**2) / (law.tangent_dim * size)
    bias, variance = float(sharper - mean) / size, (spread + float(mean - sharper) ** 2) / size
    return Averaging(1 - float(mean), float(mean), bias, variance, None if across is None else float(across), size)


def shrinkage_expansion(beta: float, dim: int) -> float:
    """1 − A_d(β) ≈ a/β − (d−1)(d−3)/(8β²), for β large: compare with `Averaging.shrinkage`, which is exact.

    >>> round(theory.shrinkage_expansion(100.0, dim=5), 5)
    0.0199
    """
    return (dim - 1) / (2 * check_beta(beta)) - (dim - 1) * (dim - 3) / (8 * beta**2)


def keys_holding(points: Points, share: float = 0.9) -> float:
    """The number Λ([0, x]) of nearest keys that hold `share` of the mass, ∫_0^x e^{−u} dΛ = share · θ, when θ is large.

    In the limit it is θ x^a/Γ(a+1), x being the `share` quantile of the Gamma(a) law.

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
    """E(1 − w₁) ≈ ln 2 · a Γ(2 − 1/a) (nc)^{1/a} / β for θ → 0 and a > 1/2: the mass that leaks to the second key.

    >>> round(theory.collapse_deficit(10_000, 10_000.0, theory.uniform(5)), 4)
    0.0106
    """
    wanted = "more than 1 for the collapse law (keys on a circle have a logarithm instead): use the exact mean_top"
    check_number("the local exponent", 2 * local.a, wanted, low=1, closed=False)
    log_scale = (math.log(check_keys(n)) + local.log_c) / local.a
    return math.log(2) * local.a * math.gamma(2 - 1 / local.a) * math.exp(log_scale) / check_beta(beta)


def nearest_distance(n: float, local: Law, rank: int = 1) -> float:
    """E|q − k| for the key of the given rank: √2 Γ(rank + 1/α)/Γ(rank) (nc)^{−1/α}, for n large.

    >>> round(theory.nearest_distance(10_000, theory.uniform(5)), 4)
    0.1377
    """
    inverse = 1 / (2 * local.a)
    log_ratio = math.lgamma(rank + inverse) - math.lgamma(rank)
    return math.sqrt(2) * math.exp(log_ratio - inverse * (math.log(check_keys(n)) + local.log_c))
