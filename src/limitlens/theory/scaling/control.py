"""Effective number θ of keys on a sphere in attention, and the regimes (averaging, selective, frozen) it separates.

θ = n E e^{−βD} = n e^{K(β)−β} at inverse temperature β, D = 1 − <q, k> the gap between query and key. As β grows, θ ~ n
c Γ(a+1) β^{−a} if P(D ≤ s) ~ c s^a. For θ → ∞ attention averages over many keys, for θ of order one a few keys share
the weight, for θ → 0 the nearest key has it all. At θ = 1, β ~ (n c Γ(a+1))^{1/a}.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from scipy import optimize

from limitlens.errors import InputError, check_kind, check_number
from limitlens.theory.scaling.laws import GapLaw, Law, LocalPower

Regime = Literal["averaging", "selective", "frozen"]

AVERAGING_FROM = 20.0  # effective number of keys 1/EΣw²: in dimension 3 this is θ = 10
FROZEN_FROM = 0.9  # EΣw²: in dimension 3 this is θ = 0.1
_SMALLEST_LOG = -690.0  # smallest log θ

# Each function returns its argument, or raises an `InputError`.
check_keys = partial(check_number, "n", expected="a number of keys of at least 2", low=2)
check_beta = partial(check_number, "beta", expected="a positive inverse temperature", closed=False)
check_law = partial(check_kind, "the law", kinds=Law, expected="a law of gaps, such as theory.uniform(5)")
check_theta = partial(check_number, "theta", expected="a positive effective number of keys", closed=False)


def theta(n: float, beta: float, law: Law) -> float:
    """Effective number of keys θ = n E e^{−βD}, D = 1 − <q, k>: exact for a `GapLaw`, asymptotic for a `LocalPower`.

    >>> round(theory.theta(10_000, 122.0, theory.uniform(5)), 4)
    0.9995
    """
    check_law(law)
    log_theta = math.log(check_keys(n)) + float(law.log_laplace(check_beta(beta)))
    if log_theta < _SMALLEST_LOG and isinstance(law, GapLaw):
        given = f"beta is {beta:g} for an exponent of {law.exponent:g}, which makes theta e^{log_theta:.0f}"
        raise InputError(f"{given}; expected a theta that a float can hold, so lower beta")
    return math.exp(log_theta)


def critical_beta(n: float, law: Law, target: float = 1.0) -> float:
    """Inverse temperature β at which n keys have θ = `target` effective ones: (n c Γ(a+1)/θ)^{1/a} for a `LocalPower`.

    >>> round(theory.critical_beta(10_000, theory.uniform(5)), 2)
    121.97
    """
    check_law(law)
    goal = math.log(check_theta(target) / check_keys(n))
    if isinstance(law, LocalPower):
        return math.exp((law.log_laplace(1.0) - goal) / law.a)
    if goal >= 0:
        raise InputError(f"theta is {target:g} with n = {n:g} keys; expected less than n, so add keys or lower theta")
    upper = critical_beta(n, law.local, target)
    while float(law.log_laplace(upper)) > goal:
        upper *= 2
    lower = upper
    while lower > 0 and float(law.log_laplace(lower)) < goal:
        lower = lower / 2 if lower > 1e-300 else 0.0
    return float(optimize.brentq(lambda beta: float(law.log_laplace(beta)) - goal, lower, upper, rtol=1e-14))


def critical_n(beta: float, law: Law, target: float = 1.0) -> float:
    """Number of keys n that at β have θ = `target` effective ones; θ β^a / (c Γ(a+1)) for a `LocalPower`."""
    return check_theta(target) * math.exp(-float(law.log_laplace(check_beta(beta))))


def regime(participation: float) -> Regime:
    """Name the regime of attention from `participation` = E Σw²: averaging, selective (few keys) or frozen (one key).

    >>> [theory.regime(shared) for shared in (0.01, 0.2, 0.95)]
    ['averaging', 'selective', 'frozen']
    """
    check_number("participation", participation, "E Σw², a number from 0 to 1", below=1 + 1e-9)
    if participation < 1 / AVERAGING_FROM:
        return "averaging"
    return "frozen" if participation > FROZEN_FROM else "selective"


@dataclass(frozen=True)
class Averaging:
    """Mean, bias and variances of the output Γ_n when many keys share the weight, by the central limit theorem."""

    mean: float  # A(β), the limit of <q, Γ_n>: mean of <q, k> = 1 − D under weights e^{−βD}
    shrinkage: float  # 1 − mean, to full relative accuracy: a/β − (d−1)(d−3)/(8β²) + … for uniform keys
    bias: float  # E<q, Γ_n> − mean at order 1/n: −(A(2β) − A(β)) / n_eff
    radial_variance: float  # [Var_{2β}(D) + (A(2β) − A(β))²] / n_eff
    # variance of one coordinate across the query, E_{2β}[D(2−D)] / (tangent_dim · n_eff), for keys uniform around it
    tangential_variance: float | None
    effective_sample_size: float  # n_eff = n e^{2K(β) − K(2β)}, which tends to 2^a θ
    tangential_mean: float  # T(β), the limit towards the keys' mean direction, orthogonal to the query; 0 on axis
    tangential_bias: float  # its bias at order 1/n: −(T(2β) − T(β)) / n_eff


def averaging(n: float, beta: float, law: GapLaw) -> Averaging:
    """Mean, bias and variances of the output over n keys at `beta`: accurate for θ > 10, Gaussian for θ > 100."""
    tilted = law.tilted(np.array([check_beta(beta), 2 * beta]))
    log_laplace, (mean, mean_2), (_, variance_2), (aside, aside_2) = (values.tolist() for values in tilted)
    size = check_keys(n) * math.exp(2 * log_laplace[0] - log_laplace[1])
    variance = (variance_2 + (mean - mean_2) ** 2) / size
    across = None
    if law.tangent_dim is not None:
        across = (2 * mean_2 - variance_2 - mean_2**2) / (law.tangent_dim * size)
    return Averaging(1 - mean, mean, (mean_2 - mean) / size, variance, across, size, aside, (aside - aside_2) / size)


def collapse_deficit(n: float, beta: float, local: Law) -> float:
    """Expected weight of all keys but the nearest, large β: E(1 − w₁) ≈ ln 2 · a Γ(2 − 1/a) (nc)^{1/a} / β, a > 1/2."""
    wanted = "more than 1 for the collapse law (keys on a circle have a logarithm instead): use the exact mean_top"
    check_number("the local exponent", 2 * local.a, wanted, low=1, closed=False)
    log_scale = (math.log(check_keys(n)) + local.log_c) / local.a
    return math.log(2) * local.a * math.gamma(2 - 1 / local.a) * math.exp(log_scale) / check_beta(beta)


def nearest_distance(n: float, local: Law, rank: int = 1) -> float:
    """Mean distance √2 Γ(rank + 1/α)/Γ(rank) (nc)^{−1/α} from query to `rank`-th nearest of n keys, α = 2a, n large."""
    inverse = 1 / (2 * local.a)
    log_ratio = math.lgamma(rank + inverse) - math.lgamma(rank)
    return math.sqrt(2) * math.exp(log_ratio - inverse * (math.log(check_keys(n)) + local.log_c))
