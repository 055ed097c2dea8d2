"""The two sides of the critical scale: attention that averages (θ → ∞) and attention that collapses (θ → 0)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from limitlens.errors import InputError
from limitlens.theory.scaling.control import check_beta, check_keys
from limitlens.theory.scaling.laws import GapLaw, Local, negligible_beyond
from limitlens.theory.scaling.points import Points


@dataclass(frozen=True)
class Averaging:
    """The output Γ_n of attention in the subcritical regime, by the central limit theorem.

    Attributes
    ----------
    mean : float
        The limit of <q, Γ_n>: A_d(β) for uniform keys.
    shrinkage : float
        1 − mean, to full relative accuracy: a/β − … for β large.
    bias : float
        E<q, Γ_n> − mean at order 1/n: −(A(2β) − A(β)) / effective_sample_size.
    radial_variance : float
        [Var_{2β}(D) + (A(2β) − A(β))²] / effective_sample_size.
    tangential_variance : float or None
        Of one coordinate across the query: E_{2β}[D(2−D)] / (tangent_dim · effective_sample_size), which is
        A_d(2β) / (2β effective_sample_size) for uniform keys; None when the keys are not uniform around the query.
    effective_sample_size : float
        n e^{2K(β) − K(2β)}, which tends to 2^a θ.
    """

    mean: float
    shrinkage: float
    bias: float
    radial_variance: float
    tangential_variance: float | None
    effective_sample_size: float


def averaging(n: float, beta: float, law: GapLaw) -> Averaging:
    """Mean, bias and variances of the output for θ large; good from θ of about 10, Gaussian in shape from about 100."""
    check_keys(n)
    tilts = np.array([check_beta(beta), 2 * beta])
    (log_single, log_double), (mean, sharper) = law.log_laplace(tilts), law.tilted_mean(tilts)
    spread = float(law.tilted_variance(2 * beta))
    size = n * math.exp(2 * log_single - log_double)
    across = None if law.tangent_dim is None else (2 * sharper - spread - sharper**2) / (law.tangent_dim * size)
    return Averaging(
        mean=1 - float(mean),
        shrinkage=float(mean),
        bias=float(sharper - mean) / size,
        radial_variance=(spread + float(mean - sharper) ** 2) / size,
        tangential_variance=None if across is None else float(across),
        effective_sample_size=size,
    )


def shrinkage_expansion(beta: float, dim: int) -> float:
    """1 − A_d(β) ≈ a/β − (d−1)(d−3)/(8β²), for β large: compare with `Averaging.shrinkage`, which is exact."""
    return (dim - 1) / (2 * check_beta(beta)) - (dim - 1) * (dim - 3) / (8 * beta**2)


def keys_holding(points: Points, share: float = 0.9) -> float:
    """The number of nearest keys that hold `share` of the mass when θ is large.

    It is Λ([0, x]) with ∫_0^x e^{−u} dΛ = share · θ; in the limit θ x^a/Γ(a+1), x being the `share` quantile of the
    Gamma(a) law.
    """
    goal = share * math.exp(points.log_theta)

    def missing(x: float) -> float:
        nodes, mass = points.between(np.zeros(1), np.array([x]))
        return float(mass[0] @ np.exp(-nodes[0])) - goal

    high = min(negligible_beyond(points.a), points.edge)
    x = float(optimize.brentq(missing, 1e-12 * high, high))
    return float(points.cumulative(np.array([x]))[0])


def collapse_deficit(n: float, beta: float, local: Local) -> float:
    """E(1 − w₁) ≈ ln 2 · a Γ(2 − 1/a) (nc)^{1/a} / β for θ → 0 and a > 1/2: the mass that leaks to the second key."""
    if not local.a > 0.5:
        raise InputError(
            f"the local exponent is {2 * local.a:g}; expected more than 1 for the collapse law "
            "(keys on a circle have a logarithm instead), so use the exact mean of the top weight"
        )
    log_scale = (math.log(check_keys(n)) + local.log_c) / local.a
    return math.log(2) * local.a * math.gamma(2 - 1 / local.a) * math.exp(log_scale) / check_beta(beta)


def nearest_distance(n: float, local: Local, rank: int = 1) -> float:
    """E|q − k| for the key of the given rank: √2 Γ(rank + 1/α)/Γ(rank) (nc)^{−1/α}, for n large."""
    inverse = 1 / (2 * local.a)
    log_ratio = math.lgamma(rank + inverse) - math.lgamma(rank)
    return math.sqrt(2) * math.exp(log_ratio - inverse * (math.log(check_keys(n)) + local.log_c))
