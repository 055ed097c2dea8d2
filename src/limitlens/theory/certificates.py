"""Sample sizes for attention from a sample of keys: |Γ̂ − Γ| ≤ ε|Γ| with probability 1 − δ.

With weights w and Z = Σw over all keys, one key moves the output by u = w (v − Γ)/Z. If key j is read with probability
π_j and weighted by 1/π_j, then Γ̂ − Γ ≈ Σ (I_j/π_j − 1) u_j, of covariance C = Σ (1/π_j − 1) u_j u_jᵀ.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri, fdtri

from limitlens.errors import Array, as_array, check_number

FEWEST_DEGREES = 1.0  # degrees of freedom of a variance estimate, at least


def error_quantile(trace: ArrayLike, square: ArrayLike, delta: float, degrees: ArrayLike = np.inf) -> Array:
    """Quantile 1 − δ of |Γ̂ − Γ|² = Σ λ_i χ²_i, for λ the eigenvalues of C (asymptotic).

    Only `trace` = Σλ and `square` = Σλ² are needed: the law is close to (Σλ/f) χ²_f with f = (Σλ)²/Σλ² (Satterthwaite).
    If C is an estimate whose trace has `degrees` degrees of freedom, the law is Σλ · F(f, degrees) instead.

    >>> theory.error_quantile(1.0, 1.0, 0.1).round(4).tolist(), theory.error_quantile(1.0, 0.1, 0.1).round(4).tolist()
    (2.7055, 1.5987)
    """
    total, squares = np.asarray(trace, dtype=float), np.asarray(square, dtype=float)
    freedom = np.clip(total**2 / np.maximum(squares, np.finfo(float).tiny), 1.0, 1e6)
    nu = np.clip(np.asarray(degrees, dtype=float), FEWEST_DEGREES, 1e6)
    exact = np.isinf(np.asarray(degrees, dtype=float))
    return np.asarray(total * np.where(exact, chdtri(freedom, delta) / freedom, fdtri(freedom, nu, 1 - delta)))


def sample_size(influence: ArrayLike, norm: float, error: float, delta: float, population: float = np.inf) -> float:
    """Number of keys to sample uniformly for |Γ̂ − Γ| ≤ error · `norm` with probability 1 − δ (asymptotic).

    `influence` (m, v) holds R u_j of m sampled keys, u_j = w_j (v_j − Γ) / Z, for a tail of R keys. If the sample is
    drawn without replacement from `population` = R keys, n₀ keys become n₀ / (1 + n₀ / R).

    >>> influence = np.linspace(-1, 1, 101)[:, None]
    >>> round(theory.sample_size(influence, 1.0, error=0.1, delta=0.1, population=1000), 1)
    86.3
    """
    u = as_array("influence", influence, ndim=2)
    check_number("norm", norm, "a positive norm of the output", closed=False)
    covariance = np.atleast_2d(np.cov(u.T))
    squares = float((covariance**2).sum())
    needed = (
        float(error_quantile(np.trace(covariance), squares, delta, variance_degrees((u**2).sum(1))))
        / (error * norm) ** 2
    )
    return needed / (1 + needed / population)


def variance_degrees(terms: ArrayLike, probabilities: ArrayLike = 0.0) -> Array:
    """Degrees of freedom 2 (Σy)² / Σ(1 − π)y² of a variance Σy summed over sampled keys (..., m) (heuristic)."""
    y = np.asarray(terms, dtype=float)
    spread = ((1 - np.asarray(probabilities)) * y**2).sum(-1)
    return np.asarray(2 * y.sum(-1) ** 2 / np.maximum(spread, np.finfo(float).tiny))


def bernstein_radius(variance: ArrayLike, largest: ArrayLike, bound: ArrayLike, delta: float) -> Array:
    """Radius r of |Σ X_j| with probability 1 − δ, for independent vectors X_j of mean 0, |X_j| ≤ `bound` (proved).

    `variance` is an unbiased estimate of V = ΣE|X_j|², a sum of independent numbers in [0, `largest`], or V itself if
    `largest` is 0. With probability 1 − δ/2, √V ≤ a + √(a² + variance), a² = largest · ln(2/δ)/2 (Chernoff), and then
    r = bL/3 + √((bL/3)² + 2VL), L = ln(4/δ) (Pinelis, 1994).

    >>> theory.bernstein_radius(1.0, largest=0.01, bound=0.1, delta=0.1).round(4).tolist()
    3.1943
    """
    a = np.sqrt(np.asarray(largest, dtype=float) * np.log(2 / delta) / 2)
    root = a + np.sqrt(a**2 + np.asarray(variance, dtype=float))
    linear = np.asarray(bound, dtype=float) * np.log(4 / delta) / 3
    return np.asarray(linear + np.sqrt(linear**2 + 2 * root**2 * np.log(4 / delta)))


def priority_reads(
    tail: ArrayLike, spread: ArrayLike, freedom: ArrayLike, effective: ArrayLike, error: float, delta: float,
    first: float = 1.0,
) -> Array:  # fmt: skip
    """Number of keys sampled by predicted weight for |Γ̂ − Γ| ≤ error · |Γ| with probability 1 − δ (heuristic).

    A tail of weight τ = `tail`, with `spread` = Σ_tail a |v − Γ|² / |Γ|² for attention weights a, needs the level c =
    q · τ · spread / ε², q the quantile 1 − δ of χ²_f / f, and at least `first`. Keys read for certain reduce it to
    c / (1 + c/N), N = τ² / Σ_tail a² the `effective` tokens of the tail.

    >>> theory.priority_reads(0.5, spread=1.0, freedom=1.0, effective=100.0, error=0.1, delta=0.1).round(1).tolist()
    57.5
    """
    f = np.asarray(freedom, dtype=float)
    quantile = error_quantile(1.0, 1 / np.maximum(f, 1.0), delta)
    level = np.maximum(first, quantile * np.asarray(tail) * np.asarray(spread) / error**2)
    return np.asarray(level / (1 + level / np.maximum(np.asarray(effective, dtype=float), 1e-12)))
