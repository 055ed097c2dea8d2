"""Central limit theorem for an attention output, and the confidence it gives.

For a fixed tilt t, √n (Γ_n - Γ) → N(0, V S Vᵀ) with

    S = e^{K(2t) - 2K(t)} [∇²K(2t) + (∇K(2t) - ∇K(t)) (∇K(2t) - ∇K(t))ᵀ]    [P],

the covariance of an importance-sampling average. The plug-in Σ u_i u_iᵀ, u_i = w_i (v_i - Γ_n), estimates V S Vᵀ / n
from one set of tokens, few where weights are uneven: so its regions are those of Student and Hotelling with its degrees
of freedom 2/(κ - 1/n), κ = Σu_i⁴/(Σu_i²)² (Satterthwaite). `Validity` says whether they may be believed.
"""

from dataclasses import dataclass
from functools import partial
from math import log

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri, fdtri, ndtri, stdtrit

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure
from limitlens.outcome import Outcome

check_level = partial(check_number, "level", expected="between 0 and 1, such as 0.95", closed=False, below=1.0)
DIRECTIONS = 8  # axes of V S Vᵀ along which a law's degrees of freedom are sought
SAFE_DEGREES = 20.0  # degrees of freedom of the plug-in from which its 95% interval covers 0.93 to 0.97
FEW_DEGREES = 4.0  # observed ones below which an interval has covered less than 0.9 (one-sided laws)


def asymptotic_covariance(measure: Measure, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """V S Vᵀ, the limit of n · Cov(Γ_n - Γ): tilts (..., d), V (d_out, d) or identity, to (..., d_out, d_out) [P].

    For Gaussian tokens S = e^{τ²} (Σ + Σ t tᵀ Σ), τ² = tᵀ Σ t.

    >>> theory.asymptotic_covariance(ll.Gaussian(0.0, 1.0), [1.0]).round(4).tolist()
    [[5.4366]]
    """
    t = measure.check_tilts(tilts)
    shift = measure.grad_K(2 * t) - measure.grad_K(t)
    spread = measure.hess_K(2 * t) + shift[..., :, None] * shift[..., None, :]
    spread = np.exp(log_weight_cost(measure, t))[..., None, None] * spread
    if V is None:
        return spread
    matrix = as_array("V", V, ndim=2)
    if matrix.shape[1] != measure.dim:
        raise InputError(f"V has shape {matrix.shape}; expected (d_out, {measure.dim})")
    return np.asarray(matrix @ spread @ matrix.T)


def log_weight_cost(measure: Measure, tilts: ArrayLike) -> Array:
    """K(2t) - 2K(t) = log(1 + χ²): by how much the tilt multiplies the variance, shape (...).

    χ² is the chi-squared divergence of the tilted law from the law itself; for Gaussian tokens the value is τ².
    """
    t = measure.check_tilts(tilts)
    return np.asarray(measure.K(2 * t) - 2 * measure.K(t))


def effective_sample_size(measure: Measure, tilts: ArrayLike, n: float) -> Array:
    """n e^{2K(t) - K(2t)}, the limit of 1/Σw² over n tokens, shape (...) [P].

    >>> round(float(theory.effective_sample_size(ll.Gaussian(0.0, 1.0), [1.0], 1000)), 2)
    367.88
    """
    return np.asarray(n * np.exp(-log_weight_cost(measure, tilts)))


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


def interval(output: ArrayLike, variance: ArrayLike, level: float = 0.95, degrees: ArrayLike | None = None) -> Interval:
    """Intervals Γ_n ± q √variance per coordinate (..., d_out); variance as the plug-in's diagonal.

    q is Student's quantile of these `degrees` of freedom (..., d_out), the normal one when absent.

    >>> found = theory.interval([0.4], [0.01])
    >>> found.lower.round(3).tolist(), found.upper.round(3).tolist()
    ([0.204], [0.596])
    """
    center, spread = as_array("output", output), as_array("variance", variance)
    if (spread < 0).any():
        raise InputError(f"a variance is {spread.min():.3g}; expected zero or positive numbers")
    upper = (1 + check_level(level)) / 2
    half = (ndtri(upper) if degrees is None else stdtrit(as_array("degrees", degrees), upper)) * np.sqrt(spread)
    return Interval(center - half, center + half, level)


@dataclass(frozen=True)
class Ellipsoid:
    """Confidence regions {y : (y - center)ᵀ covariance⁺ (y - center) ≤ radius²}."""

    center: Array  # (..., d_out)
    covariance: Array  # (..., d_out, d_out)
    radius: Array  # (...): root of the quantile of Hotelling, or of the chi-squared law; infinite below d_out degrees
    level: float

    def contains(self, value: ArrayLike) -> Array:
        """Whether each region holds the value: booleans of shape (...)."""
        gap = as_array("value", value) - self.center
        inverse = np.linalg.pinv(self.covariance, hermitian=True)
        return np.asarray(np.einsum("...i,...ij,...j->...", gap, inverse, gap) <= self.radius**2)


def ellipsoid(
    output: ArrayLike, covariance: ArrayLike, level: float = 0.95, degrees: ArrayLike | None = None
) -> Ellipsoid:
    """Ellipsoids of coverage `level` about (..., d_out); covariance as that of `plug_in`.

    With m `degrees` of freedom (...) of the covariance the radius is Hotelling's, d m/(m-d+1) times the quantile of
    F(d, m-d+1); that of the χ² law with d degrees, for a covariance that is known, when absent.

    >>> round(float(theory.ellipsoid([0.0, 0.0], np.eye(2)).radius), 3)
    2.448
    """
    center, spread = as_array("output", output), as_array("covariance", covariance)
    dim = center.shape[-1] if center.ndim else 0
    if spread.shape != (*center.shape, dim):
        raise InputError(f"output has shape {center.shape}, covariance {spread.shape}; expected (..., d), (..., d, d)")
    if degrees is None:
        return Ellipsoid(center, spread, np.sqrt(chdtri(dim, 1 - check_level(level))), level)
    m = as_array("degrees", degrees)
    some = m > dim - 1  # else the sample says nothing of some direction
    left = np.where(some, m - dim + 1, 1.0)
    square = np.where(some, dim * m / left * fdtri(dim, left, check_level(level)), np.inf)
    return Ellipsoid(center, spread, np.sqrt(square), level)


@dataclass(frozen=True)
class PlugIn:
    """What one set of n tokens says of its own error, at queries (...)."""

    output: Array  # Γ_n, (..., d_out)
    covariance: Array  # Σ u uᵀ, u = w (v - Γ_n), (..., d_out, d_out)
    degrees: Array  # of freedom of each of its variances, (..., d_out); 0 where no token differs from another
    joint_degrees: Array  # of the whole matrix, (...)

    def interval(self, level: float = 0.95) -> Interval:
        """Student's intervals per coordinate."""
        variance = np.diagonal(self.covariance, axis1=-2, axis2=-1)
        return interval(self.output, variance, level, np.maximum(self.degrees, 1.0))

    def ellipsoid(self, level: float = 0.95) -> Ellipsoid:
        """Hotelling's ellipsoids."""
        return ellipsoid(self.output, self.covariance, level, self.joint_degrees)


def plug_in(weights: ArrayLike, values: ArrayLike) -> PlugIn:
    """Output, plug-in covariance and its degrees of freedom: weights (..., n), normalised here, values (n, d_out) [V].

    Degrees are 2/(κ - 1/n), at most n - 1: of a coordinate κ = Σu⁴/(Σu²)², of the matrix κ = 3 Σ|y|⁴/(d(d+2)), where
    y are the u whitened by it.

    >>> found = theory.plug_in([0.5, 0.25, 0.25], [[1.0], [0.0], [0.0]])
    >>> found.output.tolist(), found.degrees.round(3).tolist()
    ([0.5], [2.0])
    """
    w, v = as_array("weights", weights), as_array("values", values, ndim=2)
    if w.ndim == 0 or w.shape[-1] != v.shape[0]:
        raise InputError(f"weights have shape {w.shape} and values {v.shape}; expected (..., n) and (n, d_out)")
    if (w < 0).any() or (w.sum(-1) <= 0).any():
        raise InputError("weights hold a negative number or sum to zero; expected attention weights")
    w = w / w.sum(-1, keepdims=True)
    output = w @ v
    u = w[..., None] * (v - output[..., None, :])
    covariance = np.asarray(np.swapaxes(u, -1, -2) @ u)
    square = np.diagonal(covariance, axis1=-2, axis2=-1)
    lengths = np.einsum("...ni,...ij,...nj->...n", u, np.linalg.pinv(covariance, hermitian=True), u, optimize=True)
    rank = lengths.sum(-1)  # d_out, or less where values lie in a subspace
    one = np.divide((u**4).sum(-2), square**2, out=np.full(square.shape, np.inf), where=square > 0)
    whole = np.divide(3 * (lengths**2).sum(-1), rank * (rank + 2), out=np.full(rank.shape, np.inf), where=rank > 0.5)
    count = u.shape[-2]
    degrees, joint = (2 / np.maximum(kurtosis - 1 / count, 2 / max(count - 1, 1)) for kurtosis in (one, whole))
    return PlugIn(output, covariance, degrees, joint)


def plug_in_degrees(measure: Measure, tilt: ArrayLike, n: float, V: ArrayLike | None = None) -> float:
    """Degrees of freedom of the plug-in over n tokens of a law at one tilt (d,), in its worst direction [V].

    2n/(κ - 1), at most n - 1, κ = E U⁴/(E U²)² of the contribution U = W (v - Γ) of one token, W = e^{<t,X> - K(t)},
    along each of the `DIRECTIONS` largest axes a of V S Vᵀ: with the cumulants κ₂, κ₃, κ₄ of <a, X> under the law
    tilted by 4t, and m the shift of its mean, E U⁴ = e^{K(4t) - 4K(t)} (κ₄ + 4κ₃m + 3κ₂² + 6κ₂m² + m⁴).

    >>> round(theory.plug_in_degrees(ll.Gaussian(0.0, 1.0), [0.5], 1000), 1)
    54.8
    """
    t = measure.check_tilts(tilt)
    if t.ndim != 1:
        raise InputError(f"tilt has shape {t.shape}; expected one tilt of shape ({measure.dim},)")
    value = np.eye(measure.dim) if V is None else as_array("V", V, ndim=2)
    cost = log_weight_cost(measure, np.stack((t, 2 * t)))
    if not np.isfinite(cost).all() or cost.max() > 600:
        return 0.0
    spread, axes = np.linalg.eigh(asymptotic_covariance(measure, t, value))
    kept = spread[-DIRECTIONS:] > 1e-12 * max(float(spread[-1]), 1e-300)
    square, a = spread[-DIRECTIONS:][kept], (axes[:, -DIRECTIONS:].T @ value)[kept]
    if not len(a):
        return float("inf")  # nothing varies
    shift = a @ (measure.grad_K(4 * t) - measure.grad_K(t))
    middle = np.einsum("ki,ij,kj->k", a, measure.hess_K(4 * t), a)
    # In units of the spread, so that differences keep their digits; that at 4t may vanish on an atom.
    step = 0.01 / np.sqrt(np.maximum(middle, np.einsum("ki,ij,kj->k", a, measure.covariance, a)))
    ahead, behind = (np.einsum("ki,kij,kj->k", a, measure.hess_K(4 * t + s * step[:, None] * a), a) for s in (1, -1))
    third, fourth = (ahead - behind) / (2 * step), (ahead - 2 * middle + behind) / step**2
    moment = fourth + 4 * third * shift + 3 * middle**2 + 6 * middle * shift**2 + shift**4
    # e^{K(4t) - 4K(t)} over the square of e^{K(2t) - 2K(t)}, which is in S.
    kurtosis = np.exp(cost[1] + 2 * cost[0]) * moment / square**2
    return float(min(2 * n / max(float(kurtosis.max()) - 1, 1e-12), n - 1))


class Validity(Outcome):
    """Whether a plug-in confidence interval may be believed."""

    VALID = ("valid", "the interval covers about as often as it says")
    DOUBTFUL = (
        "doubtful",
        "the interval rests on few tokens: a 95% interval may cover less than 93% of the time",
        "use more tokens, or read the interval as a lower bound of the uncertainty",
    )
    MEANINGLESS = (
        "meaningless",
        "a few tokens carry the output and tokens not yet seen would carry it elsewhere",
        "do not use the interval; use many more tokens or a higher temperature",
    )


def interval_validity(measure: Measure, tilt: ArrayLike, n: float, V: ArrayLike | None = None) -> Validity:
    """Judge the 95% intervals of `plug_in` at one tilt (d,) over n tokens of a law, by its worst direction [V].

    Valid needs `SAFE_DEGREES` of freedom (`plug_in_degrees`). Meaningless is n ≤ e^D, D = KL(μ_2t | μ) =
    2<t, ∇K(2t)> - K(2t): the plug-in is an average under the law tilted by 2t, which n tokens cannot show (Chatterjee
    and Diaconis, 2018). For Gaussian tokens that is τ ≥ √(2 ln n)/2.

    >>> [theory.interval_validity(ll.Gaussian(0.0, 1.0), [tilt], 1000).value for tilt in (0.5, 1.0, 2.0)]
    ['valid', 'doubtful', 'meaningless']
    """
    t, count = measure.check_tilts(tilt), check_number("n", n, "more than one token", low=1, closed=False)
    if log(count) <= float(2 * t @ measure.grad_K(2 * t) - measure.K(2 * t)):
        return Validity.MEANINGLESS
    return Validity.VALID if plug_in_degrees(measure, t, count, V) >= SAFE_DEGREES else Validity.DOUBTFUL


def observed_validity(degrees: float) -> Validity:
    """Judge one interval by the degrees of freedom that its own tokens show (`PlugIn.degrees`) [V].

    It cannot know of a part of the law that the tokens did not show; `interval_validity` does, where the law is known.

    >>> theory.observed_validity(30.0).value, theory.observed_validity(5.0).value
    ('valid', 'doubtful')
    """
    if not degrees >= FEW_DEGREES:
        return Validity.MEANINGLESS
    return Validity.VALID if degrees >= SAFE_DEGREES else Validity.DOUBTFUL
