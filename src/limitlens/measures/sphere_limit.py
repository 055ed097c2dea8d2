"""Covariance of the limit outputs of attention over the uniform law on a sphere, by quadrature.

With X = R z uniform on the sphere of radius R in R^d, A = U diag(s) Wᵀ and τ(r) = A_d(r)/r (`measures.radial`),

    Γ(X) = R² τ(R |A X|) A X,    Cov Γ(X) = U diag(λ) Uᵀ,    λ_i = R⁶ s_i² E[τ(R² √Q)² z_i²],    Q = Σ_j s_j² z_j².

Weighting by d z_i² gives z_i² in z_j² = χ²_j/Σχ² three degrees of freedom instead of one, so only the density of the
ratio Q remains. From P(Q ≤ q) = P(Σ_j (s_j² − q) χ²_j ≤ 0) and the inversion of characteristic functions,

    p_i(q) = 1/π ∫ Re[φ r_i (Σ_j r_j + 2 r_i)] du,    r_j = 1/(1 − 2iu (s_j² − q)),    φ = Π_j r_j^{1/2}.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, as_array
from limitlens.measures.radial import radial_tangential

SMOOTH_FROM = 8  # dimension from which on the density is smooth enough for Gauss quadrature
_RATIOS, _FREQUENCIES = 400, 300  # quadrature nodes in q and in u


def limit_covariance(A: ArrayLike, radius: float = 1.0) -> Array:
    """Covariance (d, d) of ∇K(A X), X uniform on the sphere of this radius in d ≥ 8 dimensions [P; by quadrature]."""
    U, s, _ = np.linalg.svd(as_array("A", A, ndim=2))
    largest = float(s[0])
    if largest == 0:
        return np.zeros((len(s), len(s)))
    squares = np.square(s / largest)
    x, weights = _rule(_RATIOS)
    low, high = float(squares[-1]), 1.0
    if high - low < 1e-9:  # all singular values are equal, so Q is constant
        ratios, densities = np.ones(1), np.ones((1, len(s)))
    else:
        ratios = low + (high - low) * (x + 1) / 2
        densities = np.stack([_densities(squares, q) for q in ratios]) * weights[:, None]
        densities /= densities.sum(axis=0)
    tangential = radial_tangential(radius**2 * largest * np.sqrt(ratios), len(s))
    values = radius**6 * np.square(s) * (np.square(tangential) @ densities) / len(s)
    return np.asarray((U * values) @ U.T)


def _densities(squares: Array, q: float) -> Array:
    """The densities p_i of Q at q, up to a common factor: (d,)."""
    x, weights = _rule(_FREQUENCIES)
    angle = np.pi * (x + 1) / 4
    gaps = squares - q
    scale = float(np.sqrt(2 * np.square(gaps).sum()))
    u = np.tan(angle)[:, None] / scale
    r = 1 / (1 - 2j * u * gaps)
    phi = np.exp(np.log(r).sum(axis=1, keepdims=True) / 2)
    inside = np.real(phi * r * (r.sum(axis=1, keepdims=True) + 2 * r))
    return np.asarray((weights / np.cos(angle) ** 2 / scale) @ inside)


@cache
def _rule(nodes: int) -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(nodes)
