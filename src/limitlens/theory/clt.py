"""Central limit theorem for an attention output, and the confidence it gives.

For a fixed tilt t, √n (Γ_n - Γ) → N(0, V S Vᵀ) with

    S = e^{K(2t) - 2K(t)} [∇²K(2t) + (∇K(2t) - ∇K(t)) (∇K(2t) - ∇K(t))ᵀ]    [P],

the covariance of an importance-sampling average. The plug-in Σ w_i² (v_i - Γ_n)(v_i - Γ_n)ᵀ estimates V S Vᵀ / n from
one set of tokens; whether its intervals may be believed is the business of `limitlens.theory.validity`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array
from limitlens.measures.base import Measure


def asymptotic_covariance(measure: Measure, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """V S Vᵀ, the limit of n · Cov(Γ_n - Γ) at each tilt, for any measure with K [P].

    Parameters
    ----------
    measure : Measure
    tilts : array of shape (..., d)
    V : array of shape (d_out, d), optional
        The value matrix; the identity when absent.

    Returns
    -------
    Array of shape (..., d_out, d_out)
    """
    t = measure.check_tilts(tilts)
    shift = measure.grad_K(2 * t) - measure.grad_K(t)
    spread = measure.hess_K(2 * t) + shift[..., :, None] * shift[..., None, :]
    return _carry(np.exp(log_weight_cost(measure, t))[..., None, None] * spread, V)


def asymptotic_covariance_gaussian(covariance: ArrayLike, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """The same for Gaussian tokens in closed form: e^{τ²} V (Σ + Σ t tᵀ Σ) Vᵀ, τ² = tᵀ Σ t [P].

    Parameters
    ----------
    covariance : array of shape (d, d)
    tilts : array of shape (..., d)
    V : array of shape (d_out, d), optional
    """
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
    """Σ_i w_i² (v_i - Γ_n)(v_i - Γ_n)ᵀ: the estimated covariance of an attention output.

    Parameters
    ----------
    weights : array of shape (..., n)
        Attention weights, normalised here.
    values : array of shape (n, d_out)

    Returns
    -------
    Array of shape (..., d_out, d_out)
    """
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

    With p proportional to e^{2 score}: Σ w² [E_p(v²) - 2 Γ_n E_p(v) + Γ_n²], Σ w² = e^{lse2 - 2 lse}.

    Parameters
    ----------
    lse, lse2 : arrays of shape (...)
        Log-sum-exp of the scores and of twice the scores.
    output, mean2, square2 : arrays of shape (..., d_out)
        Attention output, and the means of v and v² under weights proportional to e^{2 score}.
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
    """Normal confidence intervals Γ_n ± z √variance.

    Parameters
    ----------
    output, variance : arrays of shape (..., d_out)
        The attention output and its plug-in variance (the diagonal of `plug_in_covariance`).
    level : float
        The coverage asked for.
    """
    from scipy.special import ndtri

    center, spread = as_array("output", output), as_array("variance", variance)
    if (spread < 0).any():
        raise InputError(f"a variance is {spread.min():.3g}; expected zero or positive numbers")
    half = float(ndtri((1 + _level(level)) / 2)) * np.sqrt(spread)
    return Interval(center - half, center + half, level)


@dataclass(frozen=True)
class Ellipsoid:
    """Confidence regions {y : (y - center)ᵀ covariance⁺ (y - center) ≤ radius²}.

    Attributes
    ----------
    center : Array of shape (..., d_out)
    covariance : Array of shape (..., d_out, d_out)
    radius : float
        Square root of the chi-squared quantile.
    level : float
    """

    center: Array
    covariance: Array
    radius: float
    level: float

    def contains(self, value: ArrayLike) -> Array:
        """Whether each region holds the value: booleans of shape (...)."""
        gap = as_array("value", value) - self.center
        inverse = np.linalg.pinv(self.covariance, hermitian=True)
        return np.asarray(np.einsum("...i,...ij,...j->...", gap, inverse, gap) <= self.radius**2)


def ellipsoid(output: ArrayLike, covariance: ArrayLike, level: float = 0.95) -> Ellipsoid:
    """Confidence ellipsoid of an attention output, from the chi-squared law with d_out degrees of freedom.

    Parameters
    ----------
    output : array of shape (..., d_out)
    covariance : array of shape (..., d_out, d_out)
        Covariance of the output, e.g. `plug_in_covariance`.
    level : float
        The coverage asked for.
    """
    from scipy.special import chdtri

    center, spread = as_array("output", output), as_array("covariance", covariance)
    dim = center.shape[-1] if center.ndim else 0
    if spread.shape != (*center.shape, dim):
        raise InputError(f"output has shape {center.shape}, covariance {spread.shape}; expected (..., d), (..., d, d)")
    return Ellipsoid(center, spread, float(np.sqrt(chdtri(dim, 1 - _level(level)))), level)


def _carry(spread: Array, V: ArrayLike | None) -> Array:
    if V is None:
        return spread
    matrix = as_array("V", V, ndim=2)
    if matrix.shape[1] != spread.shape[-1]:
        raise InputError(f"V has shape {matrix.shape}; expected (d_out, {spread.shape[-1]})")
    return np.asarray(matrix @ spread @ matrix.T)


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"level is {level}; expected a coverage between 0 and 1, such as 0.95")
    return float(level)
