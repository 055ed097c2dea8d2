"""Central limit theorem for an attention output, and the confidence it gives.

For a fixed tilt t, √n (Γ_n - Γ) → N(0, V S Vᵀ) with

    S = e^{K(2t) - 2K(t)} [∇²K(2t) + (∇K(2t) - ∇K(t)) (∇K(2t) - ∇K(t))ᵀ]    [P],

the covariance of an importance-sampling average. The plug-in Σ w_i² (v_i - Γ_n)(v_i - Γ_n)ᵀ estimates V S Vᵀ / n from
one set of tokens; whether its intervals may be believed is the business of `limitlens.theory.validity`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure

check_level = partial(check_number, "level", expected="between 0 and 1, such as 0.95", closed=False, below=1.0)


def asymptotic_covariance(measure: Measure, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """V S Vᵀ, the limit of n · Cov(Γ_n - Γ): tilts (..., d), V (d_out, d) or identity, to (..., d_out, d_out) [P]."""
    t = measure.check_tilts(tilts)
    shift = measure.grad_K(2 * t) - measure.grad_K(t)
    spread = measure.hess_K(2 * t) + shift[..., :, None] * shift[..., None, :]
    return _carry(np.exp(log_weight_cost(measure, t))[..., None, None] * spread, V)


def asymptotic_covariance_gaussian(covariance: ArrayLike, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """The same for Gaussian tokens in closed form: e^{τ²} V (Σ + Σ t tᵀ Σ) Vᵀ, τ² = tᵀ Σ t [P]."""
    sigma, t = as_array("covariance", covariance, ndim=2), as_array("tilts", tilts)
    pushed = t @ sigma
    spread = sigma + pushed[..., :, None] * pushed[..., None, :]
    return _carry(np.exp(np.sum(t * pushed, axis=-1))[..., None, None] * spread, V)


def log_weight_cost(measure: Measure, tilts: ArrayLike) -> Array:
    """K(2t) - 2K(t) = log(1 + χ²): by how much the tilt multiplies the variance, shape (...).

    χ² is the chi-squared divergence of the tilted law from the law itself; for Gaussian tokens the value is τ².
    """
    t = measure.check_tilts(tilts)
    return np.asarray(measure.K(2 * t) - 2 * measure.K(t))


def effective_sample_size(measure: Measure, tilts: ArrayLike, n: float) -> Array:
    """n e^{2K(t) - K(2t)}, the limit of 1/Σw² over n tokens, shape (...) [P]."""
    return np.asarray(n * np.exp(-log_weight_cost(measure, tilts)))


def plug_in_covariance(weights: ArrayLike, values: ArrayLike) -> Array:
    """Σ_i w_i² (v_i - Γ_n)(v_i - Γ_n)ᵀ: weights (..., n), normalised here, values (n, d_out) to (..., d_out, d_out)."""
    w, v = as_array("weights", weights), as_array("values", values, ndim=2)
    if w.ndim == 0 or w.shape[-1] != v.shape[0]:
        raise InputError(f"weights have shape {w.shape} and values {v.shape}; expected (..., n) and (n, d_out)")
    if (w < 0).any() or (w.sum(-1) <= 0).any():
        raise InputError("weights hold a negative number or sum to zero; expected attention weights")
    w = w / w.sum(-1, keepdims=True)
    residual = w[..., None] * (v - (w @ v)[..., None, :])
    return np.asarray(np.swapaxes(residual, -1, -2) @ residual)


def plug_in_from_moments(
    lse: ArrayLike, lse2: ArrayLike, output: ArrayLike, mean2: ArrayLike, square2: ArrayLike
) -> Array:
    """The diagonal of `plug_in_covariance` from what an attention state keeps.

    With p proportional to e^{2 score}: Σ w² [E_p(v²) - 2 Γ_n E_p(v) + Γ_n²], Σ w² = e^{lse2 - 2 lse}. Log-sum-exps
    (...) of the scores and of twice the scores, and Γ_n, E_p(v), E_p(v²) of shape (..., d_out), give (..., d_out).
    """
    gamma, first, second = as_array("output", output), as_array("mean2", mean2), as_array("square2", square2)
    participation = np.exp(as_array("lse2", lse2) - 2 * as_array("lse", lse))
    spread = np.clip(second - first**2, 0.0, None) + (first - gamma) ** 2
    return np.asarray(participation[..., None] * spread)


@dataclass(frozen=True)
class Interval:
    """Confidence intervals per coordinate, each of shape (..., d_out)."""

    lower: Array
    upper: Array
    level: float

    def contains(self, value: ArrayLike) -> Array:
        """Whether each interval holds the value: booleans of shape (..., d_out)."""
        point = as_array("value", value)
        return np.asarray((self.lower <= point) & (point <= self.upper))


def interval(output: ArrayLike, variance: ArrayLike, level: float = 0.95) -> Interval:
    """Normal intervals Γ_n ± z √variance per coordinate (..., d_out); variance as the plug-in's diagonal."""
    from scipy.special import ndtri

    center, spread = as_array("output", output), as_array("variance", variance)
    if (spread < 0).any():
        raise InputError(f"a variance is {spread.min():.3g}; expected zero or positive numbers")
    half = float(ndtri((1 + check_level(level)) / 2)) * np.sqrt(spread)
    return Interval(center - half, center + half, level)


@dataclass(frozen=True)
class Ellipsoid:
    """Confidence regions {y : (y - center)ᵀ covariance⁺ (y - center) ≤ radius²}."""

    center: Array  # (..., d_out)
    covariance: Array  # (..., d_out, d_out)
    radius: float  # square root of the chi-squared quantile
    level: float

    def contains(self, value: ArrayLike) -> Array:
        """Whether each region holds the value: booleans of shape (...)."""
        gap = as_array("value", value) - self.center
        inverse = np.linalg.pinv(self.covariance, hermitian=True)
        return np.asarray(np.einsum("...i,...ij,...j->...", gap, inverse, gap) <= self.radius**2)


def ellipsoid(output: ArrayLike, covariance: ArrayLike, level: float = 0.95) -> Ellipsoid:
    """Ellipsoids of coverage `level` (χ² law, d_out degrees) about (..., d_out); covariance as `plug_in_covariance`."""
    from scipy.special import chdtri

    center, spread = as_array("output", output), as_array("covariance", covariance)
    dim = center.shape[-1] if center.ndim else 0
    if spread.shape != (*center.shape, dim):
        raise InputError(f"output has shape {center.shape}, covariance {spread.shape}; expected (..., d), (..., d, d)")
    return Ellipsoid(center, spread, float(np.sqrt(chdtri(dim, 1 - check_level(level)))), level)


def _carry(spread: Array, V: ArrayLike | None) -> Array:
    if V is None:
        return spread
    matrix = as_array("V", V, ndim=2)
    if matrix.shape[1] != spread.shape[-1]:
        raise InputError(f"V has shape {matrix.shape}; expected (d_out, {spread.shape[-1]})")
    return np.asarray(matrix @ spread @ matrix.T)
