"""Bounds of the error of attention over n tokens: over all queries in a ball, and at one query for every n.

Over queries |x| ≤ R the error is C(R)/√n, with C(R) exponential in R² ‖Σ^{1/2}A‖₂² (proved). This says nothing below
n = C(R)², which is called `useful_from`. Proofs are in docs/theory.md.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

from limitlens.errors import Array, InputError, check_number
from limitlens.measures.base import Measure
from limitlens.theory.clt import LARGEST_COST, asymptotic_covariance, ends_before, log_weight_cost, one_tilt
from limitlens.theory.prediction import BOHBOT, DERIVED, Prediction, check_nonnegative, value_matrix
from limitlens.theory.spectrum import half_whitened, square_root
from limitlens.theory.statuses import claimed

_LARGEST_EXPONENT = 700.0  # largest x whose e^x fits in float64
_MOST_TERMS = 1e5  # ρ² above which the terms of `uniform_supremum` are not summed: its constant exceeds 10^21,000
_count = partial(check_number, "n", expected="a number of tokens of at least 1", low=1, below=np.inf)


@dataclass(frozen=True)
class UniformBound:
    """Bound constant/√n (or its order of magnitude) of the error of attention over all queries in a ball."""

    prediction: Prediction  # the constant
    log_constant: float  # its natural logarithm, for constants beyond the range of floats; infinite if unknown

    @property
    def useful_from(self) -> float:
        """Number of tokens n from which the bound is below 1; infinite if n exceeds the range of floating point."""
        return _exp(2 * self.log_constant)

    def at(self, n: float) -> float:
        """Value of the bound, constant/√n, at n tokens; infinite if it exceeds the range of floating point."""
        return _exp(self.log_constant - 0.5 * np.log(n))


def uniform_exponential(radius: float, horizon_one_sided: float) -> UniformBound:
    """Order e^{τ²}/√n of the error over queries |x| ≤ R, τ = R ‖S^{1/2}A‖₂, S a variance proxy (heuristic)."""
    tau = check_nonnegative("the radius", radius) * check_nonnegative("the one-sided horizon", horizon_one_sided)
    note = "the order of the proved constant, without the factor polynomial in R and d that makes it a bound"
    return _bound("uniform_exponential", tau**2, note, BOHBOT)


def uniform_gaussian(covariance: ArrayLike, A: ArrayLike, radius: float, V: ArrayLike | None = None) -> UniformBound:
    """Root mean square error at the worst query |x| ≤ R, as n → ∞, Gaussian tokens: max √tr(V S Vᵀ), over √n (proved).

    tr(V S Vᵀ) = e^{xᵀPx} (c + xᵀQx) with P = AᵀΣA, Q = AᵀΣVᵀVΣA, c = tr(VΣVᵀ). For the whole ball: `uniform_supremum`.
    """
    root = square_root(covariance)
    half = half_whitened(root, A)
    value = value_matrix(V, len(root)) @ root
    shift = check_nonnegative("the radius", radius) * value @ half
    log_square = _largest_log_trace(radius**2 * half.T @ half, shift.T @ shift, float(np.sum(value**2)))
    note = "as n → ∞, root mean square error at the worst single point; the largest error over the ball exceeds it"
    return _bound("uniform_gaussian", log_square / 2, note)


def uniform_supremum(covariance: ArrayLike, A: ArrayLike, radius: float, V: ArrayLike | None = None) -> UniformBound:
    """Upper bound constant/√n, as n → ∞, of the expected largest error over queries |x| ≤ R, Gaussian tokens (proved).

    The constant is ‖VΣ^{1/2}‖₂ Σ_{k ≥ 1} k ρ^{k-1} (√k E|g| + √(2/π) 1[k even]) / √k!, with ρ = R ‖Σ^{1/2}A‖₂ and g
    standard normal in R^d (docs/theory.md).
    """
    root = square_root(covariance)
    dim = len(root)
    gain = float(np.linalg.norm(value_matrix(V, dim) @ root, 2))
    if gain <= 0:
        raise InputError("the covariance is zero; expected tokens with some spread")
    rho = check_nonnegative("the radius", radius) * float(np.linalg.norm(half_whitened(root, A), 2))
    # Terms peak at k of about ρ² and then fall like ρ^k/√k!.
    k = np.arange(1.0, 50.0 + 4.0 * min(rho**2, _MOST_TERMS))
    length = np.sqrt(2.0) * np.exp(gammaln((dim + 1) / 2) - gammaln(dim / 2))  # E|g|
    largest = np.sqrt(k) * length + np.sqrt(2 / np.pi) * (k % 2 == 0)
    logs = np.log(k * largest) + (k - 1) * np.log(max(rho, 1e-300)) - gammaln(k + 1) / 2
    note = "as n → ∞, upper bound of the expected largest error over the ball"
    total = float(np.logaddexp.reduce(logs)) if rho**2 <= _MOST_TERMS else float("inf")
    return _bound("uniform_supremum", total + np.log(gain), note)


def _largest_log_trace(P: Array, Q: Array, c: float) -> float:
    """Maximum over unit x of xᵀPx + log(c + xᵀQx), as the minimum over λ of λ_max(P + λQ) + λc - log λ - 1."""
    from scipy.optimize import minimize_scalar

    if c <= 0:
        raise InputError("the covariance is zero; expected tokens with some spread")
    largest_q = float(np.linalg.eigvalsh(Q)[-1])

    def dual(log_lambda: float) -> float:
        weight = np.exp(log_lambda)
        return float(np.linalg.eigvalsh(P + weight * Q)[-1] + weight * c - log_lambda - 1.0)

    # The optimal λ is 1/(c + xᵀQx) for some x, which brackets it; the objective is convex there.
    bracket = (-np.log(c + max(largest_q, 0.0)), -np.log(c))
    return float(minimize_scalar(dual, bounds=bracket, method="bounded", options={"xatol": 1e-9}).fun)


def _exp(logarithm: float) -> float:
    return float(np.exp(logarithm)) if logarithm < _LARGEST_EXPONENT else float("inf")


def _bound(name: str, log_constant: float, note: str, reference: str = DERIVED) -> UniformBound:
    return UniformBound(claimed(name, _exp(log_constant), note, reference=reference), float(log_constant))


@dataclass(frozen=True)
class TiltCost:
    """Bounds, at every n, of the error D = Γ_n - Γ of attention over n tokens at one query x of tilt t = A x."""

    log_cost: float  # log(1 + χ²) = K(2t) - 2K(t), which is τ² for Gaussian tokens
    chi_squared: float  # χ², the chi-squared divergence of the tilted law from the law
    trace: float  # tr V S Vᵀ of the central limit theorem: n times the asymptotic mean square error
    limit: float  # |Γ|; NaN where K ends before t, and there is no limit
    reach: float  # R, the largest |v - Γ| over the support; infinite for unbounded laws

    def mean_square_bound(self, n: float) -> float:
        """Upper bound (√trace + reach · χ)²/n of the mean square error at n tokens; infinite if unbounded (proved)."""
        if not np.isfinite(self.reach):
            return float("inf")
        return float((np.sqrt(self.trace) + self.reach * np.sqrt(self.chi_squared)) ** 2) / _count(n)

    def mean_square_useful_from(self) -> float:
        """Number of tokens from which `mean_square_bound` is below the trivial reach²; infinite if unbounded."""
        return self.mean_square_bound(1.0) / self.reach**2 if np.isfinite(self.reach) else float("inf")

    def deviation_bound(self, n: float, error: float) -> float:
        """Upper bound of the probability that attention's error over n tokens exceeds `error` (proved).

        The minimum, at most 1, over 0 < δ < 1 of trace/(n error² (1-δ)²) + exp(-n δ²/(2(1+χ²))).
        """
        wanted = check_number("the error", error, "a positive number", closed=False)
        if not np.isfinite(self.trace):  # beyond the range of floats
            return 1.0
        delta = np.linspace(0.001, 0.999, 999)
        chebyshev = self.trace / (_count(n) * wanted**2 * (1 - delta) ** 2)
        return float(min(1.0, np.min(chebyshev + np.exp(-n * delta**2 / (2 * (1 + self.chi_squared))))))

    def deviation_useful_from(self, error: float) -> float:
        """Smallest number of tokens n at which `deviation_bound` is below 1; infinite beyond the range of floats."""
        low, high = 0.0, _LARGEST_EXPONENT
        if self.deviation_bound(np.exp(high), error) >= 1.0:
            return float("inf")
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if self.deviation_bound(np.exp(middle), error) < 1.0 else (middle, high)
        return float(np.ceil(np.exp(high)))


def tilt_cost(measure: Measure, tilt: ArrayLike, V: ArrayLike | None = None) -> TiltCost:
    """Bound the error of attention at the query x with tilt t = A x (d,), for one token distribution and values V X.

    >>> cost = theory.tilt_cost(ll.Sphere(3), [0.0, 0.0, 2.0])
    >>> round(cost.mean_square_bound(1000), 6), cost.deviation_useful_from(error=0.1)
    (0.006727, 186.0)
    """
    t = one_tilt(measure, tilt)
    value = value_matrix(V, measure.dim)
    end = ends_before(measure, t)
    limit = float("nan") if end == 1 else float(np.linalg.norm(value @ measure.grad_K(t)))
    cost = float("inf") if end in (1, 2) else float(log_weight_cost(measure, t))
    finite = cost <= LARGEST_COST
    return TiltCost(
        log_cost=cost,
        chi_squared=float(np.expm1(cost)) if finite else float("inf"),
        trace=float(np.trace(asymptotic_covariance(measure, t, V))) if finite else float("inf"),
        limit=limit,
        reach=float(np.linalg.norm(value, 2)) * measure.radius + limit,
    )
