"""The control parameter θ, the effective number of keys, and the inverse problems around θ = 1.

    θ = n E e^{−βD} = n e^{K(β)−β}            exact, for any law of the keys,
    θ ~ n c Γ(a+1) β^{−a}                     as β grows, when P(D ≤ s) ~ c s^a.

θ → ∞: attention averages (subcritical). θ of order one: a handful of keys share the mass (critical). θ → 0: it
collapses onto the nearest key (supercritical). The critical scale is θ = 1, that is β ~ (n c Γ(a+1))^{1/a}, 1/a = 2/α.

How many keys share the mass at θ = 1 depends on the exponent: E Σw² is .44, .20 and .052 in dimension 3, 5 and 9, and
about 2^{−a} beyond. So a regime is named by the expected participation itself, not by θ alone. This is the regime of
one query at one n; that of a measured head (`limitlens.heads.regimes`) also asks how its effective tokens grow with n.
"""

import math
from functools import partial
from typing import Literal

from scipy import optimize

from limitlens.errors import InputError, check_number
from limitlens.theory.scaling.laws import GapLaw, Local

Regime = Literal["averaging", "selective", "frozen"]

AVERAGING_FROM = 20.0  # keys that share the mass, 1/EΣw²: in dimension 3 this is θ = 10
FROZEN_FROM = 0.9  # EΣw²: in dimension 3 this is θ = 0.1
_SMALLEST_LOG = -690.0  # of θ

# Each hands back the number it was given, or raises an `InputError`.
check_keys = partial(check_number, "n", expected="a number of keys of at least 2", low=2)
check_beta = partial(check_number, "beta", expected="a positive inverse temperature", closed=False)
check_theta = partial(check_number, "theta", expected="a positive effective number of keys", closed=False)


def theta(n: float, beta: float, law: GapLaw) -> float:
    """θ = n E e^{−βD}, exact.

    >>> round(theory.theta(10_000, 122.0, theory.uniform(5)), 4)
    0.9995
    """
    log_theta = math.log(check_keys(n)) + float(law.log_laplace(check_beta(beta)))
    if log_theta < _SMALLEST_LOG:
        raise InputError(
            f"beta is {beta:g} for an exponent of {law.exponent:g}, which makes theta e^{log_theta:.0f}; "
            "expected a theta that a float can hold, so lower beta"
        )
    return math.exp(log_theta)


def theta_asymptotic(n: float, beta: float, local: Local) -> float:
    """θ ~ n c Γ(a+1) β^{−a}.

    >>> round(theory.theta_asymptotic(10_000, 122.0, theory.uniform(5)), 4)
    1.0078
    """
    return check_keys(n) * math.exp(_log_scale(local) - local.a * math.log(check_beta(beta)))


def critical_beta(n: float, law: GapLaw, target: float = 1.0) -> float:
    """The β at which n keys have the effective number θ = `target`, exact.

    >>> round(theory.critical_beta(10_000, theory.uniform(5)), 2)
    121.97
    """
    if not check_theta(target) < check_keys(n):
        raise InputError(f"theta is {target:g} with n = {n:g} keys; expected less than n, so add keys or lower theta")
    goal = math.log(target / n)
    upper = critical_beta_asymptotic(n, law, target)
    while float(law.log_laplace(upper)) > goal:
        upper *= 2
    lower = upper
    while lower > 0 and float(law.log_laplace(lower)) < goal:
        lower = lower / 2 if lower > 1e-300 else 0.0
    return float(optimize.brentq(lambda beta: float(law.log_laplace(beta)) - goal, lower, upper, rtol=1e-14))


def critical_beta_asymptotic(n: float, local: Local, target: float = 1.0) -> float:
    """β ~ (n c Γ(a+1) / θ)^{1/a}.

    >>> round(theory.critical_beta_asymptotic(10_000, theory.uniform(5)), 2)
    122.47
    """
    return math.exp((math.log(check_keys(n) / check_theta(target)) + _log_scale(local)) / local.a)


def critical_n(beta: float, law: GapLaw, target: float = 1.0) -> float:
    """The number of keys n at which β gives θ = `target`, exact.

    >>> round(theory.critical_n(122.0, theory.uniform(5)))
    10005
    """
    return check_theta(target) * math.exp(-float(law.log_laplace(check_beta(beta))))


def critical_n_asymptotic(beta: float, local: Local, target: float = 1.0) -> float:
    """n ~ θ β^a / (c Γ(a+1)).

    >>> round(theory.critical_n_asymptotic(122.0, theory.uniform(5)))
    9923
    """
    return check_theta(target) * math.exp(local.a * math.log(check_beta(beta)) - _log_scale(local))


def regime(participation: float) -> Regime:
    """What attention does when E Σw² = `participation`: averages, selects among a few keys, or has frozen onto one.

    >>> [theory.regime(shared) for shared in (0.01, 0.2, 0.95)]
    ['averaging', 'selective', 'frozen']
    """
    if participation < 1 / AVERAGING_FROM:
        return "averaging"
    return "frozen" if participation > FROZEN_FROM else "selective"


def _log_scale(local: Local) -> float:
    """log(c Γ(a+1))."""
    return local.log_c + math.lgamma(local.a + 1)
