"""The error over a ball |x| ≤ R: the order of its constant, its worst point, and a bound of the largest error.

Attention converges like C(R)/√n uniformly over the ball, with C(R) exponential in τ² = R² ‖Σ^{1/2}A‖₂² [P]. A number
C(R)/√n says nothing before n = C(R)², where it reaches 1: that n is part of every answer.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.theory.prediction import Prediction, Status
from limitlens.theory.spectrum import score_matrix, square_root

_LARGEST_EXPONENT = 700.0
_nonnegative = partial(check_number, expected="a finite number that is zero or positive")


@dataclass(frozen=True)
class UniformBound:
    """A law constant/√n about the error over a ball."""

    prediction: Prediction  # the constant
    log_constant: float  # its logarithm, for constants beyond the range of floating point

    @property
    def useful_from(self) -> float:
        """n at which the bound reaches 1: below it says nothing. Infinite beyond the range of floating point."""
        return float(np.exp(2 * self.log_constant)) if 2 * self.log_constant < _LARGEST_EXPONENT else float("inf")

    def at(self, n: float) -> float:
        """The bound at n tokens."""
        return float(np.exp(min(self.log_constant - 0.5 * np.log(n), _LARGEST_EXPONENT)))


def uniform_exponential(radius: float, horizon_one_sided: float) -> UniformBound:
    """The exponential part e^{τ²}, τ = R ‖Σ^{1/2}A‖₂, of the constant for tokens with variance proxy Σ: no bound [H].

    It is the square root of the most a tilt can cost: K(2t) ≤ 2 τ² and K(t) ≥ 0 give e^{K(2t) - 2K(t)} ≤ e^{2τ²}.

    >>> round(theory.uniform_exponential(radius=2.0, horizon_one_sided=0.5).prediction.value, 3)
    2.718
    """
    tau = _nonnegative("the radius", radius) * _nonnegative("the one-sided horizon", horizon_one_sided)
    return _bound("uniform_exponential", tau**2, Status.HEURISTIC)


def uniform_gaussian(covariance: ArrayLike, A: ArrayLike, radius: float, V: ArrayLike | None = None) -> UniformBound:
    """The worst point for Gaussian tokens: the largest √tr(V S Vᵀ) over |x| ≤ R, from the central limit theorem [P].

    tr(V S Vᵀ) = e^{xᵀPx} (c + xᵀQx) with P = AᵀΣA, Q = AᵀΣVᵀVΣA, c = tr(VΣVᵀ), and log u = min over λ of
    λu - log λ - 1. The objective grows with both forms, whose joint range is convex where it matters, so the maximum
    over the sphere is the minimum over λ of R² λ_max(P + λQ) + λc - log λ - 1, a convex problem in one variable. It is
    about one point at a time: the largest error of a sample over the ball is larger (`uniform_supremum`).

    >>> round(theory.uniform_gaussian([[1.0]], [[0.5]], radius=2.0).prediction.value, 3)
    2.332
    """
    root = square_root(covariance)
    half = root @ score_matrix(A, len(root))
    value = root if V is None else as_array("V", V, ndim=2) @ root
    carried = _nonnegative("the radius", radius) * value @ half
    log_square = _largest_log_trace(radius**2 * half.T @ half, carried.T @ carried, float(np.sum(value**2)))
    return _bound("uniform_gaussian", log_square / 2)


def uniform_supremum(covariance: ArrayLike, A: ArrayLike, radius: float, V: ArrayLike | None = None) -> UniformBound:
    """A bound of E sup over |x| ≤ R of |Γ_n - Γ|√n for Gaussian tokens as n → ∞ [P].

    In whitened coordinates the error at the tilt t is ∇g(t), g the Gaussian field of covariance e^{<t,t'>} - 1: a sum
    of homogeneous Gaussian polynomials of covariance <t,t'>^k/k!. By Banach the gradient of the k-th is at most
    k ρ^{k-1} times its maximum on the unit sphere, for |t| ≤ ρ = R ‖Σ^{1/2}A‖₂, and by Sudakov and Fernique, comparing
    with √k <g, t>, that maximum is at most (√k E|g| + √(2/π))/√k!, g standard normal in R^d. So the bound is

        ‖VΣ^{1/2}‖₂ Σ_{k ≥ 1} k ρ^{k-1} (√k E|g| + √(2/π) 1[k even]) / √k!.

    >>> round(theory.uniform_supremum([[1.0]], [[0.5]], radius=2.0).prediction.value, 3)
    8.989
    """
    root = square_root(covariance)
    value = root if V is None else as_array("V", V, ndim=2) @ root
    gain, dim = float(np.linalg.norm(value, 2)), len(root)
    if gain <= 0:
        raise InputError("the covariance is zero; expected tokens with some spread")
    rho = _nonnegative("the radius", radius) * float(np.linalg.norm(root @ score_matrix(A, dim), 2))
    # Terms peak at k of about ρ² and then fall like ρ^k/√k!; from ρ² = 3,000 on their sum is infinite to a float.
    k = np.arange(1.0, 50.0 + 4.0 * min(rho**2, 3000.0))
    length = np.sqrt(2.0) * np.exp(gammaln((dim + 1) / 2) - gammaln(dim / 2))  # E|g|
    largest = np.sqrt(k) * length + np.sqrt(2 / np.pi) * (k % 2 == 0)
    logs = np.log(k * largest) + (k - 1) * np.log(max(rho, 1e-300)) - gammaln(k + 1) / 2
    return _bound("uniform_supremum", float(np.logaddexp.reduce(logs)) + np.log(gain))


def _largest_log_trace(P: Array, Q: Array, c: float) -> float:
    """max over |x| = 1 of xᵀPx + log(c + xᵀQx)."""
    if c <= 0:
        raise InputError("the covariance is zero; expected tokens with some spread")
    largest_q = float(np.linalg.eigvalsh(Q)[-1])

    def dual(log_lambda: float) -> float:
        weight = np.exp(log_lambda)
        return float(np.linalg.eigvalsh(P + weight * Q)[-1] + weight * c - log_lambda - 1.0)

    # The optimal λ is 1/(c + xᵀQx) for some x, which brackets it; the objective is convex there.
    low, high = -np.log(c + max(largest_q, 0.0)), -np.log(c)
    golden = (np.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-9:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if dual(left) < dual(right) else (left, high)
    return dual((low + high) / 2)


def _bound(name: str, log_constant: float, status: Status = Status.PROVED) -> UniformBound:
    constant = float(np.exp(log_constant)) if log_constant < _LARGEST_EXPONENT else float("inf")
    return UniformBound(Prediction.of(name, constant, status), float(log_constant))
