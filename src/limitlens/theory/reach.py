"""How far attention reaches into the tails of its tokens: horizons, coupling and the spectrum behind them.

With Σ the covariance of the tokens and A the score matrix (the score of token X for query x is <X, A x>, the 1/√k
included in A), everything the rates depend on is in B = Σ^{1/2} A Σ^{1/2}, the score matrix of the whitened tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_covariance


@dataclass(frozen=True)
class Reach:
    """The spectral quantities of one head over one law of tokens.

    Attributes
    ----------
    horizon : float
        Two-sided horizon H = ‖Σ^{1/2} A Σ^{1/2}‖₂.
    horizon_one_sided : float
        ‖Σ^{1/2} A‖₂.
    coupling : float
        Attention-reach coupling Ψ = ‖Σ‖₂ ‖Σ^{1/2} A‖₂²; always H² ≤ Ψ.
    frobenius : float
        ‖B‖_F: the root mean square over centred queries of the standard deviation of the scores.
    trace : float
        tr B: the mean score of a token with itself.
    dim : int
        The dimension d of the tokens.
    singular_values : Array
        Singular values of B in decreasing order, shape (r,); the d - r left out are zero.
    """

    horizon: float
    horizon_one_sided: float
    coupling: float
    frobenius: float
    trace: float
    dim: int
    singular_values: Array = field(repr=False, compare=False)


def square_root(covariance: ArrayLike) -> Array:
    """Symmetric square root Σ^{1/2} of a (d, d) positive semi-definite matrix."""
    symmetric = check_covariance("covariance", as_array("covariance", covariance, ndim=2))
    eigenvalues, vectors = np.linalg.eigh(symmetric)
    return np.asarray((vectors * np.sqrt(np.clip(eigenvalues, 0.0, None))) @ vectors.T)


def whitened(covariance: ArrayLike, A: ArrayLike) -> Array:
    """B = Σ^{1/2} A Σ^{1/2}, shape (d, d): the score matrix of the whitened tokens."""
    root = square_root(covariance)
    return np.asarray(root @ _score_matrix(A, root.shape[0]) @ root)


def reach(covariance: ArrayLike, A: ArrayLike) -> Reach:
    """Spectral reach of a head given its score matrix.

    Parameters
    ----------
    covariance : array of shape (d, d)
        Σ, the covariance of the tokens.
    A : array of shape (d, d)
        The score matrix, 1/√k included: score(X, x) = <X, A x>.
    """
    root = square_root(covariance)
    half = root @ _score_matrix(A, root.shape[0])
    B = half @ root
    one_sided = float(np.linalg.norm(half, 2))
    return _assemble(
        singular_values=np.asarray(np.linalg.svd(B, compute_uv=False)),
        dim=root.shape[0],
        one_sided=one_sided,
        covariance_norm=float(np.linalg.norm(root, 2)) ** 2,
        trace=float(np.trace(B)),
    )


def reach_from_projections(covariance: ArrayLike, Wq: ArrayLike, Wk: ArrayLike, head_dim: int | None = None) -> Reach:
    """Spectral reach of one head given its projections, through k × k eigenproblems.

    With A = Wkᵀ Wq / √k, C_q = Wq Σ Wqᵀ and C_k = Wk Σ Wkᵀ, the singular values of B are those of the k × k matrix
    C_k^{1/2} C_q^{1/2} / √k, and ‖Σ^{1/2}A‖₂² = λ_max(C_k^{1/2} Wq Wqᵀ C_k^{1/2}) / k: no d × d matrix is formed.

    Parameters
    ----------
    covariance : array of shape (d, d)
    Wq, Wk : arrays of shape (k, d)
    head_dim : int, optional
        The k of the factor 1/√k where it is not the number of rows.
    """
    return reach_per_head(covariance, [as_array("Wq", Wq, ndim=2)], [as_array("Wk", Wk, ndim=2)], head_dim)[0]


def reach_per_head(
    covariance: ArrayLike, Wq: Iterable[ArrayLike], Wk: Iterable[ArrayLike], head_dim: int | None = None
) -> list[Reach]:
    """Spectral reach of every head of a layer: one d × d eigenvalue for all, k × k problems for each.

    Parameters
    ----------
    covariance : array of shape (d, d)
    Wq, Wk : sequences of arrays of shape (k, d), one per query head
        With grouped queries, repeat each key projection for the query heads that share it.
    head_dim : int, optional
        The k of the factor 1/√k where it is not the number of rows.
    """
    symmetric = check_covariance("covariance", as_array("covariance", covariance, ndim=2))
    covariance_norm = max(float(np.linalg.eigvalsh(symmetric)[-1]), 0.0)
    queries, keys = list(Wq), list(Wk)
    if len(queries) != len(keys):
        raise InputError(f"there are {len(queries)} Wq and {len(keys)} Wk; expected one Wk per query head")
    return [_reach_of_head(symmetric, covariance_norm, q, k, head_dim) for q, k in zip(queries, keys, strict=True)]


def horizon_from_covariances(cov_q: ArrayLike, cov_k: ArrayLike, scale: float) -> float:
    """Two-sided horizon from the covariances of captured queries and keys: H² = scale² λ_max(Cov(q) Cov(k)).

    Exact when queries and keys are affine in the same tokens (Σ Aᵀ Σ A and Cov(q) Cov(k) then share their non-zero
    eigenvalues, and biases drop out); a working definition for heads with rotary embedding.

    Parameters
    ----------
    cov_q, cov_k : arrays of shape (k, k)
    scale : float
        The factor of the scores, usually 1/√k.
    """
    root_q, root_k = square_root(cov_q), square_root(cov_k)
    if root_q.shape != root_k.shape:
        raise InputError(f"cov_q has shape {root_q.shape} and cov_k {root_k.shape}; expected the same (k, k)")
    return abs(float(scale)) * float(np.linalg.norm(root_k @ root_q, 2))


def mean_tilt(cov_k: ArrayLike, mean_q: ArrayLike, scale: float) -> float:
    """τ₀ = scale · |Cov(k)^{1/2} E q|: the tilt of the average query, which spreads the scores beside ‖B‖_F.

    Parameters
    ----------
    cov_k : array of shape (k, k)
    mean_q : array of shape (k,)
    scale : float
        The factor of the scores, usually 1/√k.
    """
    root = square_root(cov_k)
    mean = as_array("mean_q", mean_q, ndim=1)
    if mean.shape[0] != root.shape[0]:
        raise InputError(f"mean_q has length {mean.shape[0]} and cov_k shape {root.shape}; expected (k,) and (k, k)")
    return abs(float(scale)) * float(np.linalg.norm(root @ mean))


def _reach_of_head(
    covariance: Array, covariance_norm: float, Wq: ArrayLike, Wk: ArrayLike, head_dim: int | None
) -> Reach:
    q, k = as_array("Wq", Wq, ndim=2), as_array("Wk", Wk, ndim=2)
    dim = covariance.shape[0]
    if q.shape != k.shape or q.shape[1] != dim:
        raise InputError(f"Wq has shape {q.shape} and Wk {k.shape}; expected both to be (head_dim, {dim})")
    rows = q.shape[0] if head_dim is None else head_dim
    if rows < 1:
        raise InputError(f"head_dim is {rows}; expected a positive integer")
    scale = float(rows) ** -0.5
    smoothed = q @ covariance
    root_k = square_root(k @ covariance @ k.T)
    return _assemble(
        dim=dim,
        singular_values=scale * np.linalg.svd(root_k @ square_root(smoothed @ q.T), compute_uv=False),
        one_sided=scale * float(np.linalg.norm(root_k @ square_root(q @ q.T), 2)),
        covariance_norm=covariance_norm,
        trace=scale * float(np.sum(smoothed * k)),
    )


def _assemble(*, dim: int, singular_values: Array, one_sided: float, covariance_norm: float, trace: float) -> Reach:
    return Reach(
        horizon=float(singular_values[0]),
        horizon_one_sided=one_sided,
        coupling=covariance_norm * one_sided**2,
        frobenius=float(np.linalg.norm(singular_values)),
        trace=trace,
        dim=dim,
        singular_values=singular_values,
    )


def _score_matrix(A: ArrayLike, dim: int) -> Array:
    matrix = as_array("A", A, ndim=2)
    if matrix.shape != (dim, dim):
        raise InputError(f"A has shape {matrix.shape}; expected ({dim}, {dim}) to match the covariance")
    return matrix
