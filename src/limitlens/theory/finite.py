"""Bounds of the error at one query that hold at every n, and the smallest n at which they are not empty.

Write D = Γ_n - Γ at one tilt, W = e^{<t,X> - K(t)} for the weight of a token (mean 1), Z for its average over the n
tokens and N for the average of W (v - Γ). Then D = N/Z exactly, E|N|² = tr S/n exactly, Var Z = χ²/n exactly, with
χ² = e^{K(2t)-2K(t)} - 1 the chi-squared divergence of the tilted law, and P(Z ≤ 1-δ) ≤ exp(-n δ² / (2 (1+χ²))) because
W ≥ 0. From these follow `mean_square_bound`, because D = N + D(1-Z) and |D| ≤ R for bounded values |v - Γ| ≤ R, and
`deviation_bound`, since either |N| > ε(1-δ) or Z ≤ 1-δ. Asymptotically n|D|² is a weighted sum of chi-squared variables
with weights the eigenvalues of S, which concentrates (`quadratic_error_quantile`; Laurent and Massart, 2000).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, check_number
from limitlens.measures.base import Measure
from limitlens.theory._inputs import check_level, one_tilt, value_matrix
from limitlens.theory.clt import asymptotic_covariance, log_weight_cost

LARGEST_COST = 600.0  # largest log(1 + χ²) whose exponential can be multiplied in float64; beyond, bounds are infinite
_count = partial(check_number, "n", expected="a number of tokens of at least 1", low=1, below=np.inf)


@dataclass(frozen=True)
class TiltCost:
    """Quantities of one tilt that enter the finite-n bounds of D = Γ_n - Γ, and these bounds.

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(cost.mean_square_asymptotic(1000), 7), round(cost.mean_square_bound(1000), 6)
    (0.001, 0.006727)
    >>> round(cost.mean_square_useful_from(), 2), cost.deviation_useful_from(error=0.1)
    (2.85, 186.0)
    >>> round(cost.deviation_bound(10_000, error=0.1), 4), round(cost.quadratic_error_quantile(1000), 6)
    (0.0115, 0.005387)
    """

    log_cost: float  # log(1 + χ²) = K(2t) - 2K(t), which is τ² for Gaussian tokens
    chi_squared: float  # χ², the chi-squared divergence of the tilted law from the law
    covariance: Array  # V S Vᵀ of the central limit theorem, (d_out, d_out)
    limit: float  # |Γ|
    reach: float  # R, the largest |v - Γ| over the support; infinite for unbounded laws

    @property
    def trace(self) -> float:
        """tr V S Vᵀ: n times the asymptotic mean square error."""
        return float(np.trace(self.covariance))

    def mean_square_asymptotic(self, n: float) -> float:
        """E|D|² ≈ tr S/n [P, as n → ∞]."""
        return self.trace / _count(n)

    def mean_square_bound(self, n: float) -> float:
        """E|D|² ≤ (√(tr S) + R χ)²/n at every n, for bounded laws; infinite for others [P]."""
        if not np.isfinite(self.reach):
            return float("inf")
        return float((np.sqrt(self.trace) + self.reach * np.sqrt(self.chi_squared)) ** 2) / _count(n)

    def mean_square_useful_from(self) -> float:
        """n from which `mean_square_bound` improves on the trivial |D|² ≤ R²; infinite for unbounded laws."""
        return self.mean_square_bound(1.0) / self.reach**2 if np.isfinite(self.reach) else float("inf")

    def deviation_bound(self, n: float, error: float) -> float:
        """P(|D| > error) ≤ min over δ of tr S/(n error² (1-δ)²) + exp(-n δ²/(2(1+χ²))), capped at 1; any law [P]."""
        wanted = check_number("the error", error, "a positive number", closed=False)
        delta = np.linspace(0.001, 0.999, 999)
        chebyshev = self.trace / (_count(n) * wanted**2 * (1 - delta) ** 2)
        return float(min(1.0, np.min(chebyshev + np.exp(-n * delta**2 / (2 * (1 + self.chi_squared))))))

    def deviation_useful_from(self, error: float) -> float:
        """Smallest n at which `deviation_bound` is below 1."""
        low, high = 0.0, 1.0
        while self.deviation_bound(np.exp(high), error) >= 1.0:
            low, high = high, 2 * high
            if high > 700:
                return float("inf")
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.deviation_bound(np.exp(middle), error) < 1.0 else (middle, high)
        return float(np.ceil(np.exp(high)))

    def quadratic_error_quantile(self, n: float, level: float = 0.95) -> float:
        """(tr S + 2‖S‖_F √x + 2‖S‖₂ x)/n, x = -log(1 - level): above |D|² with probability `level` [P, as n → ∞]."""
        x = -np.log1p(-check_level(level))
        spread = self.covariance
        if not np.isfinite(self.trace):
            return float("inf")
        beyond = 2 * np.linalg.norm(spread) * np.sqrt(x) + 2 * np.linalg.norm(spread, 2) * x
        return float((self.trace + beyond) / _count(n))


def tilt_cost(measure: Measure, tilt: ArrayLike, V: ArrayLike | None = None) -> TiltCost:
    """The quantities of one tilt (d,) that its error bounds depend on; values are V (d_out, d) times the tokens.

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(cost.chi_squared, 4), round(cost.reach, 4)
    (1.0746, 1.5373)
    """
    t = one_tilt(measure, tilt)
    value = value_matrix(V, measure.dim)
    output = value @ measure.grad_K(t[None])[0]
    cost = float(log_weight_cost(measure, t[None])[0])
    finite = cost <= LARGEST_COST
    return TiltCost(
        log_cost=cost,
        chi_squared=float(np.expm1(cost)) if finite else float("inf"),
        covariance=asymptotic_covariance(measure, t[None], V)[0] if finite else np.full((len(output),) * 2, np.inf),
        limit=float(np.linalg.norm(output)),
        reach=float(np.linalg.norm(value, 2)) * measure.radius + float(np.linalg.norm(output)),
    )
