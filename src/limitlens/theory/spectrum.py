"""Spectral quantities of a head on which the rates depend: horizons, coupling, singular values.

Σ is the covariance of the tokens and A the score matrix: token X has the score <X, A x> for query x, with the factor
1/√k included in A. The rates depend on B = Σ^{1/2} A Σ^{1/2}, the score matrix of the whitened tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_covariance, check_number
from limitlens.measures._shared import symmetric_root
from limitlens.theory._inputs import score_matrix

_REPEATED = 1e-6  # relative gap below which two singular values count as equal


@dataclass(frozen=True)
class Reach:
    """Spectral quantities of one head over one law of tokens."""

    horizon: float  # two-sided, H = ‖Σ^{1/2} A Σ^{1/2}‖₂
    horizon_one_sided: float  # ‖Σ^{1/2} A‖₂
    coupling: float  # attention-reach coupling Ψ = ‖Σ‖₂ ‖Σ^{1/2} A‖₂²; always H² ≤ Ψ
    frobenius: float  # ‖B‖_F: root mean square over centred queries of the standard deviation of the scores
    trace: float  # tr B: the mean score of a token with itself
    dim: int  # d, of the tokens
    singular_values: Array = field(repr=False, compare=False)  # of B, (r,), decreasing; the d - r left out are zero

    @property
    def multiplicity(self) -> int:
        """Multiplicity of the top singular value of B."""
        return int(np.sum(self.singular_values >= (1 - _REPEATED) * self.horizon))

    def is_pre_asymptotic(self, n: float) -> bool:
        """Whether n is too small for slopes to equal the exponents, which needs ln n well above ‖B‖_F² [V]."""
        return log(n) < self.frobenius**2

    def self_dominates(self, n: float) -> bool:
        """Whether a typical token gives itself the largest weight: tr B > ln n + ‖B‖_F²/2 [V]."""
        return self.trace > log(n) + self.frobenius**2 / 2

    def warnings(self, n: float, *, mask_self: bool = False) -> list[str]:
        """Reasons why the slopes at n tokens are not rates, one sentence each; empty if there is none."""
        found = []
        if self.self_dominates(n) and not mask_self:
            found.append(
                f"each token dominates its own softmax at n = {n:.3g}: its score with itself, about tr B = "
                f"{self.trace:.3g}, exceeds ln n + ‖B‖_F²/2 = {log(n) + self.frobenius**2 / 2:.3g}; outputs copy their "
                "queries and slopes are not rates, so pass mask_self=True to exclude the query's own token"
            )
        if self.is_pre_asymptotic(n):
            found.append(
                f"pre-asymptotic at n = {n:.3g}: ln n = {log(n):.3g} is below ‖B‖_F² = {self.frobenius**2:.3g}, so the "
                "local slope is not yet the exponent"
            )
        return found


def square_root(covariance: ArrayLike) -> Array:
    """Symmetric square root Σ^{1/2} of a (d, d) positive semi-definite matrix."""
    return symmetric_root(check_covariance("covariance", as_array("covariance", covariance, ndim=2)))


def whitened(covariance: ArrayLike, A: ArrayLike) -> Array:
    """B = Σ^{1/2} A Σ^{1/2}, shape (d, d): the score matrix of the whitened tokens.

    >>> theory.whitened([[4.0]], [[0.5]]).tolist()
    [[2.0]]
    """
    root = square_root(covariance)
    return np.asarray(root @ score_matrix(A, len(root)) @ root)


def reach(covariance: ArrayLike, A: ArrayLike) -> Reach:
    """Spectral quantities of a head from the covariance Σ of the tokens and its score matrix A, both (d, d).

    >>> found = theory.reach([[4.0]], [[0.5]])
    >>> found.horizon, found.horizon_one_sided, found.coupling
    (2.0, 1.0, 4.0)
    """
    root = square_root(covariance)
    half = root @ score_matrix(A, len(root))
    B = half @ root
    one_sided = float(np.linalg.norm(half, 2))
    covariance_norm = float(np.linalg.norm(root, 2)) ** 2
    values = np.asarray(np.linalg.svd(B, compute_uv=False))
    return _reach(values, one_sided, covariance_norm, float(np.trace(B)), len(root))


def reach_per_head(
    covariance: ArrayLike, Wq: Iterable[ArrayLike], Wk: Iterable[ArrayLike], head_dim: int | None = None
) -> list[Reach]:
    """Spectral quantities of every head of a layer, from one d × d eigenvalue and k × k problems per head.

    With A = Wkᵀ Wq / √k, C_q = Wq Σ Wqᵀ and C_k = Wk Σ Wkᵀ, the singular values of B are those of the k × k matrix
    C_k^{1/2} C_q^{1/2} / √k, and ‖Σ^{1/2}A‖₂² = λ_max(C_k^{1/2} Wq Wqᵀ C_k^{1/2}) / k: no d × d matrix is formed.
    Wq and Wk hold one projection (k, d) per query head; with grouped queries, repeat each key projection for the query
    heads that share it. `head_dim` is the k of the factor 1/√k if that differs from the number of rows.

    >>> queries = keys = [np.eye(2, 3), 2 * np.eye(2, 3)]
    >>> [round(found.horizon, 4) for found in theory.reach_per_head(np.eye(3), queries, keys)]
    [0.7071, 2.8284]
    """
    symmetric = check_covariance("covariance", as_array("covariance", covariance, ndim=2))
    covariance_norm = max(float(np.linalg.eigvalsh(symmetric)[-1]), 0.0)
    queries, keys = list(Wq), list(Wk)
    if len(queries) != len(keys):
        raise InputError(f"there are {len(queries)} Wq and {len(keys)} Wk; expected one Wk per query head")
    dim = len(symmetric)
    heads = []
    for q, k in ((as_array("Wq", q, ndim=2), as_array("Wk", k, ndim=2)) for q, k in zip(queries, keys, strict=True)):
        if q.shape != k.shape or q.shape[1] != dim:
            raise InputError(f"Wq has shape {q.shape} and Wk {k.shape}; expected both to be (head_dim, {dim})")
        rows = len(q) if head_dim is None else head_dim
        scale = check_number("head_dim", rows, "a positive integer", low=1) ** -0.5
        smoothed = q @ symmetric
        root_k = square_root(k @ symmetric @ k.T)
        values = scale * np.linalg.svd(root_k @ square_root(smoothed @ q.T), compute_uv=False)
        one_sided = scale * float(np.linalg.norm(root_k @ square_root(q @ q.T), 2))
        heads.append(_reach(values, one_sided, covariance_norm, scale * float(np.sum(smoothed * k)), dim))
    return heads


def horizon_from_covariances(cov_q: ArrayLike, cov_k: ArrayLike, scale: float) -> float:
    """Two-sided horizon H from the covariances of captured queries and keys: H² = scale² λ_max(Cov(q) Cov(k)).

    Exact when queries and keys are affine in the same tokens (Σ Aᵀ Σ A and Cov(q) Cov(k) then share their non-zero
    eigenvalues, and biases drop out); a working definition for heads with rotary embedding. `scale` is the factor of
    the scores, usually 1/√k.

    >>> theory.horizon_from_covariances(np.eye(2), 4 * np.eye(2), scale=0.5)
    1.0
    """
    root_q, root_k = square_root(cov_q), square_root(cov_k)
    if root_q.shape != root_k.shape:
        raise InputError(f"cov_q has shape {root_q.shape} and cov_k {root_k.shape}; expected the same (k, k)")
    return abs(float(scale)) * float(np.linalg.norm(root_k @ root_q, 2))


def mean_tilt(cov_k: ArrayLike, mean_q: ArrayLike, scale: float) -> float:
    """Whitened tilt of the average query, τ₀ = scale · |Cov(k)^{1/2} E q|, which adds to the spread of the scores.

    >>> theory.mean_tilt(4 * np.eye(2), [1.0, 0.0], scale=0.5)
    1.0
    """
    root = square_root(cov_k)
    mean = as_array("mean_q", mean_q, ndim=1)
    if mean.shape[0] != root.shape[0]:
        raise InputError(f"mean_q has length {mean.shape[0]} and cov_k shape {root.shape}; expected (k,) and (k, k)")
    return abs(float(scale)) * float(np.linalg.norm(root @ mean))


def _reach(singular_values: Array, one_sided: float, covariance_norm: float, trace: float, dim: int) -> Reach:
    horizon, frobenius = float(singular_values[0]), float(np.linalg.norm(singular_values))
    return Reach(horizon, one_sided, covariance_norm * one_sided**2, frobenius, trace, dim, singular_values)
