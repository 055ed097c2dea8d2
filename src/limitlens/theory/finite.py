"""Bounds that hold at every n, beside the asymptotic ones, and the n from which they say something.

Write D = Γ_n - Γ at one tilt, W = e^{<t,X> - K(t)} for the weight of a token (mean 1), Z for its average over the n
tokens and N for the average of W (v - Γ). Then D = N/Z exactly, E|N|² = tr S/n exactly, Var Z = χ²/n exactly, with
χ² = e^{K(2t)-2K(t)} - 1 the chi-squared divergence of the tilted law, and P(Z ≤ 1-δ) ≤ exp(-n δ² / (2 (1+χ²))) because
W ≥ 0. From these:

- bounded values |v - Γ| ≤ R: E|D|² ≤ (√(tr S) + R χ)²/n, because D = N + D(1-Z) and |D| ≤ R;
- any law: P(|D| > ε) ≤ tr S / (n ε² (1-δ)²) + exp(-n δ² / (2 (1+χ²))) for every δ in (0, 1).

Asymptotically n|D|² is a weighted sum of chi-squared variables with weights the eigenvalues of S, which concentrates:
P(n|D|² > tr S + 2‖S‖_F √x + 2‖S‖₂ x) ≤ e^{-x} (Laurent and Massart, 2000).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure
from limitlens.theory.clt import asymptotic_covariance, check_level, log_weight_cost

LARGEST_COST = 600.0  # of log(1 + χ²), with room for products of its exponential; beyond, bounds are infinite
_count = partial(check_number, "n", expected="a number of tokens of at least 1", low=1, below=np.inf)


@dataclass(frozen=True)
class TiltCost:
    """What the finite-n bounds at one tilt are made of."""

    log_cost: float  # log(1 + χ²) = K(2t) - 2K(t), which is τ² for Gaussian tokens
    chi_squared: float  # χ², the chi-squared divergence of the tilted law from the law
    covariance: Array  # V S Vᵀ of the central limit theorem, (d_out, d_out)
    limit: float  # |Γ|, what saying zero would cost
    reach: float  # R, the largest |v - Γ| over the support; infinite for unbounded laws

    @property
    def trace(self) -> float:
        """tr V S Vᵀ: n times the asymptotic mean square error."""
        return float(np.trace(self.covariance))


def tilt_cost(measure: Measure, tilt: ArrayLike, V: ArrayLike | None = None) -> TiltCost:
    """The cost of one tilt (d,), with values V (d_out, d) or the tokens themselves.

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(cost.chi_squared, 4), round(cost.reach, 4)
    (1.0746, 1.5373)
    """
    t = measure.check_tilts(tilt)
    if t.ndim != 1:
        raise InputError(f"tilt has shape {t.shape}; expected one tilt of shape ({measure.dim},)")
    limit = measure.grad_K(t[None])[0]
    value = np.eye(measure.dim) if V is None else as_array("V", V, ndim=2)
    output = value @ limit
    cost = float(log_weight_cost(measure, t[None])[0])
    finite = cost <= LARGEST_COST
    return TiltCost(
        log_cost=cost,
        chi_squared=float(np.expm1(cost)) if finite else float("inf"),
        covariance=asymptotic_covariance(measure, t[None], V)[0] if finite else np.full((len(output),) * 2, np.inf),
        limit=float(np.linalg.norm(output)),
        reach=float(np.linalg.norm(value, 2)) * measure.radius + float(np.linalg.norm(output)),
    )


def mean_square_asymptotic(cost: TiltCost, n: float) -> float:
    """E|D|² ≈ tr S/n [P, as n → ∞].

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(theory.mean_square_asymptotic(cost, 1000), 7)
    0.001
    """
    return cost.trace / _count(n)


def mean_square_bound(cost: TiltCost, n: float) -> float:
    """E|D|² ≤ (√(tr S) + R χ)²/n at every n, for bounded laws; infinite for others [P].

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(theory.mean_square_bound(cost, 1000), 6)
    0.006727
    """
    if not np.isfinite(cost.reach):
        return float("inf")
    return float((np.sqrt(cost.trace) + cost.reach * np.sqrt(cost.chi_squared)) ** 2) / _count(n)


def mean_square_useful_from(cost: TiltCost) -> float:
    """n from which `mean_square_bound` is below R², what |D| ≤ R gives for nothing; infinite for unbounded laws.

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(theory.mean_square_useful_from(cost), 2)
    2.85
    """
    return mean_square_bound(cost, 1.0) / cost.reach**2 if np.isfinite(cost.reach) else float("inf")


def deviation_bound(cost: TiltCost, n: float, error: float) -> float:
    """P(|D| > error) ≤ min over δ of tr S/(n error² (1-δ)²) + exp(-n δ²/(2(1+χ²))), capped at 1; any law [P].

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(theory.deviation_bound(cost, 10_000, error=0.1), 4)
    0.0115
    """
    delta, wanted = np.linspace(0.001, 0.999, 999), check_number("the error", error, "a positive number", closed=False)
    chebyshev = cost.trace / (_count(n) * wanted**2 * (1 - delta) ** 2)
    return float(min(1.0, np.min(chebyshev + np.exp(-n * delta**2 / (2 * (1 + cost.chi_squared))))))


def deviation_useful_from(cost: TiltCost, error: float) -> float:
    """Smallest n at which `deviation_bound` is below 1: before it, the bound says nothing.

    >>> theory.deviation_useful_from(theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0]), error=0.1)
    186.0
    """
    low, high = 0.0, 1.0
    while deviation_bound(cost, np.exp(high), error) >= 1.0:
        low, high = high, 2 * high
        if high > 700:
            return float("inf")
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if deviation_bound(cost, np.exp(middle), error) < 1.0 else (middle, high)
    return float(np.ceil(np.exp(high)))


def quadratic_error_quantile(cost: TiltCost, n: float, level: float = 0.95) -> float:
    """(tr S + 2‖S‖_F √x + 2‖S‖₂ x)/n, x = -log(1 - level): above |D|² with probability `level` [P, as n → ∞].

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(theory.quadratic_error_quantile(cost, 1000), 6)
    0.005387
    """
    x, spread = -np.log1p(-check_level(level)), cost.covariance
    if not np.isfinite(cost.trace):
        return float("inf")
    return float((cost.trace + 2 * np.linalg.norm(spread) * np.sqrt(x) + 2 * np.linalg.norm(spread, 2) * x) / _count(n))
