"""Spectral norms of a head's scores on which the decay of its attention error in n depends.

Token X of covariance Σ has the score <X, A x> for query x, with 1/√k in A; whitened tokens have B = Σ^{1/2} A Σ^{1/2}.
"""

from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_covariance, check_number
from limitlens.measures.base import symmetric_root


@dataclass(frozen=True)
class Reach:
    """Spectral quantities of one head's scores over one token distribution, on which its error rates depend."""

    horizon: float  # two-sided, H = ‖Σ^{1/2} A Σ^{1/2}‖₂
    horizon_one_sided: float  # ‖Σ^{1/2} A‖₂
    coupling: float  # attention-reach coupling Ψ = ‖Σ‖₂ ‖Σ^{1/2} A‖₂²; always H² ≤ Ψ
    frobenius: float  # ‖B‖_F: root mean square over centred queries of the standard deviation of the scores
    trace: float  # tr B: the mean score of a token with itself
    dim: int  # d, of the tokens
    multiplicity: int  # number of singular values of B that equal the largest up to a factor 1 - 1e-6
    mean_tilt: float = 0.0  # τ₀ = |Σ^{1/2} A E X|: standard deviation of the scores for the query E X

    def warnings(self, n: float, *, mask_self: bool = False) -> list[str]:
        """Reasons, one sentence each, why the slope of an error curve at n tokens is not the asymptotic exponent."""
        found = []
        threshold = log(n) + self.frobenius**2 / 2
        if self.trace > threshold and not mask_self:
            score = f"its score with itself, about tr B = {self.trace:.3g}, exceeds ln n + ‖B‖_F²/2 = {threshold:.3g}"
            remedy = "so pass mask_self=True to exclude the query's own token"
            copied = f"outputs copy their queries and slopes are not rates, {remedy}"
            found.append(f"each token dominates its own softmax at n = {n:.3g}: {score}; {copied}")
        spread = self.frobenius**2 + self.mean_tilt**2  # mean square of the scores' standard deviation
        if log(n) < spread:
            tilted = f" + mean tilt² = {self.mean_tilt**2:.3g}, in all {spread:.3g}" if self.mean_tilt > 0.05 else ""
            below = f"ln n = {log(n):.3g} is below ‖B‖_F² = {self.frobenius**2:.3g}{tilted}"
            found.append(f"pre-asymptotic at n = {n:.3g}: {below}, so the local slope is not yet the exponent")
        return found


def square_root(covariance: ArrayLike) -> Array:
    """Symmetric square root Σ^{1/2} (d, d) of a covariance matrix Σ (d, d); an `InputError` if Σ is not one."""
    return symmetric_root(check_covariance("covariance", as_array("covariance", covariance, ndim=2)))


def half_whitened(root: Array, A: ArrayLike) -> Array:
    """Product Σ^{1/2} A (d, d) of `root` = Σ^{1/2} and the score matrix A; an `InputError` if the shapes differ."""
    matrix = as_array("A", A, ndim=2)
    if matrix.shape != root.shape:
        raise InputError(f"A has shape {matrix.shape}; expected {root.shape} to match the covariance")
    return np.asarray(root @ matrix)


def whitened(covariance: ArrayLike, A: ArrayLike) -> Array:
    """Score matrix B = Σ^{1/2} A Σ^{1/2} (d, d) of the whitened tokens, from covariance Σ and score matrix A."""
    root = square_root(covariance)
    return half_whitened(root, A) @ root


def reach(covariance: ArrayLike, A: ArrayLike, mean: ArrayLike | None = None) -> Reach:
    """Spectral quantities of a head that its error rates depend on, from token covariance Σ and score matrix A (d, d).

    The `mean` E X (d,) of the tokens is zero when absent.

    >>> found = theory.reach([[4.0]], [[0.5]])
    >>> found.horizon, found.horizon_one_sided, found.coupling
    (2.0, 1.0, 4.0)
    """
    root = square_root(covariance)
    half = half_whitened(root, A)
    B = half @ root
    one_sided = check_number("‖Σ^{1/2} A‖", float(np.linalg.norm(half, 2)), "a score matrix A of usual size")
    values = np.linalg.svd(B, compute_uv=False)
    return Reach(
        horizon=float(values[0]),
        horizon_one_sided=one_sided,
        coupling=float(np.linalg.norm(root, 2)) ** 2 * one_sided**2,
        frobenius=float(np.linalg.norm(values)),
        trace=float(np.trace(B)),
        dim=len(root),
        multiplicity=int(np.sum(values >= (1 - 1e-6) * values[0])),
        mean_tilt=0.0 if mean is None else float(np.linalg.norm(half @ as_array("mean", mean, ndim=1))),
    )
