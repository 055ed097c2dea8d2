"""Central limit theorem for the attention output Γ_n over n tokens, and confidence intervals from one sample.

At a query x with tilt t = A x, √n (Γ_n - Γ) → N(0, V S Vᵀ) with S = e^{K(2t) - 2K(t)} [∇²K(2t) + m mᵀ], m = ∇K(2t) -
∇K(t) and K(t) = log E e^{<t,X>} (proved). One sample estimates V S Vᵀ / n by Σ u_i u_iᵀ, u_i = w_i (v_i - Γ_n), with
2/(κ - 1/n) degrees of freedom, κ = Σu_i⁴/(Σu_i²)² (Satterthwaite).
"""

from dataclasses import dataclass
from math import log
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from limitlens.errors import Array, InputError, as_array, check_kind, check_number
from limitlens.measures.base import Measure
from limitlens.measures.custom import CustomMeasure
from limitlens.outcome import Outcome
from limitlens.theory.prediction import value_matrix

DIRECTIONS = 8  # number of largest axes of V S Vᵀ along which `plug_in_degrees` looks for the fewest degrees of freedom
SAFE_DEGREES = 20.0  # degrees of freedom from which a 95% interval of `plug_in` covers 0.93 to 0.97
FEW_DEGREES = 4.0  # observed degrees of freedom below which coverage fell below 0.9 (one-sided laws)
LARGEST_COST = 600.0  # largest K(2t) - 2K(t) whose exponential can be multiplied in float64


def asymptotic_covariance(measure: Measure, tilts: ArrayLike, V: ArrayLike | None = None) -> Array:
    """Limit of n times the covariance of the attention output over n tokens, at queries of tilts t = A x (proved).

    Tilts (..., d) give V S Vᵀ (..., d_out, d_out), V the identity when absent. For Gaussian tokens S = e^{τ²} (Σ + Σ t
    tᵀ Σ), τ² = tᵀ Σ t.

    >>> theory.asymptotic_covariance(ll.Gaussian(0.0, 1.0), [1.0]).round(4).tolist()
    [[5.4366]]
    """
    t = measure.check_tilts(tilts)
    shift = measure.grad_K(2 * t) - measure.grad_K(t)
    spread = measure.hess_K(2 * t) + shift[..., :, None] * shift[..., None, :]
    matrix = value_matrix(V, measure.dim)
    return np.asarray(np.exp(log_weight_cost(measure, t))[..., None, None] * (matrix @ spread @ matrix.T))


def log_weight_cost(measure: Measure, tilts: ArrayLike) -> Array:
    """Logarithm K(2t) - 2K(t) of n over the effective sample size of attention weights, at tilts t = A x (proved)."""
    t = measure.check_tilts(tilts)
    return np.asarray(measure.K(2 * t) - 2 * measure.K(t))


@dataclass(frozen=True)
class PlugIn:
    """Attention outputs over one set of n tokens at queries (...), with errors estimated from these tokens alone."""

    output: Array  # Γ_n, (..., d_out)
    covariance: Array  # Σ u uᵀ, u = w (v - Γ_n), (..., d_out, d_out)
    degrees: Array  # degrees of freedom of each variance, (..., d_out); 0 if all tokens are equal

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper ends of Student's confidence interval for each output coordinate, both (..., d_out)."""
        check_number("level", level, "between 0 and 1, such as 0.95", closed=False, below=1.0)
        quantile = stdtrit(np.maximum(self.degrees, 1.0), (1 + level) / 2)
        half = quantile * np.sqrt(np.diagonal(self.covariance, axis1=-2, axis2=-1))
        return self.output - half, self.output + half


def plug_in(weights: ArrayLike, values: ArrayLike) -> PlugIn:
    """Attention output and its estimated covariance, from softmax weights (..., n) and values (n, d_out) (verified).

    With u = w (v - output) for normalised w, a coordinate has min(n - 1, 2/(Σu⁴/(Σu²)² - 1/n)) degrees of freedom.

    >>> estimate = theory.plug_in([0.5, 0.25, 0.25], [[1.0], [0.0], [0.0]])
    >>> estimate.output.tolist(), estimate.degrees.round(3).tolist()
    ([0.5], [2.0])
    """
    w = as_array("weights", weights)
    v = as_array("values", values, ndim=2)
    if w.ndim == 0 or w.shape[-1] != v.shape[0]:
        raise InputError(f"weights have shape {w.shape} and values {v.shape}; expected (..., n) and (n, d_out)")
    if (w < 0).any() or (w.sum(-1) <= 0).any():
        raise InputError("weights hold a negative number or sum to zero; expected attention weights")
    w = w / w.sum(-1, keepdims=True)
    output = w @ v
    u = w[..., None] * (v - output[..., None, :])
    covariance = np.asarray(np.swapaxes(u, -1, -2) @ u)
    square = np.diagonal(covariance, axis1=-2, axis2=-1)
    kurtosis = np.divide((u**4).sum(-2), square**2, out=np.full(square.shape, np.inf), where=square > 0)
    n = len(v)
    return PlugIn(output, covariance, 2 / np.maximum(kurtosis - 1 / n, 2 / max(n - 1, 1)))


def ends_before(measure: Measure, tilt: Array) -> int | None:
    """First k of 1, 2 and 4 at which K(k t) of a user-defined law is not finite, so that K ends before k t; or None."""
    for k in (1, 2, 4) if isinstance(measure, CustomMeasure) else ():
        try:
            with np.errstate(all="ignore"):
                measure.K(k * tilt)
                measure.hess_K(k * tilt)
        except InputError:  # raised where the law returns NaN or infinity
            return k
    return None


def log_tokens_needed(measure: Measure, tilt: ArrayLike) -> float:
    """Logarithm of the tokens that represent a law reweighted by e^{2<t,X>}, on which the plug-in variance rests.

    It is the divergence 2<t, ∇K(2t)> - K(2t) of the reweighted law (Chatterjee and Diaconis, 2018), 2τ² for Gaussian
    tokens.
    """
    t = one_tilt(measure, tilt)
    return float(2 * t @ measure.grad_K(2 * t) - measure.K(2 * t))


def one_tilt(measure: Measure, tilt: ArrayLike) -> Array:
    """Check that one tilt (d,) of the right dimension is given, and return it as an array."""
    t = measure.check_tilts(tilt)
    if t.ndim != 1:
        raise InputError(f"tilt has shape {t.shape}; expected one tilt of shape ({measure.dim},)")
    return t


def plug_in_degrees(measure: Measure, tilt: ArrayLike, n: float, V: ArrayLike | None = None) -> float:
    """Degrees of freedom of the variance that `plug_in` estimates from n tokens, in the worst direction (verified).

    They are min(n - 1, 2n/(κ - 1)), κ = E U⁴/(E U²)² of one token's contribution U = e^{<t,X> - K(t)} <a, v - Γ> along
    an axis a of V S Vᵀ. With the cumulants κ₂, κ₃, κ₄ of <a, v> under the law reweighted by e^{4<t,X>}, and m its mean
    minus <a, Γ>, E U⁴ = e^{K(4t) - 4K(t)} (κ₄ + 4κ₃m + 3κ₂² + 6κ₂m² + m⁴).
    """
    t = one_tilt(measure, tilt)
    value = value_matrix(V, measure.dim)
    cost = log_weight_cost(measure, np.stack((t, 2 * t)))
    if not np.isfinite(cost).all() or cost.max() > LARGEST_COST:
        return 0.0
    spread, axes = np.linalg.eigh(asymptotic_covariance(measure, t, value))
    kept = spread[-DIRECTIONS:] > 1e-12 * max(float(spread[-1]), 1e-300)
    square = spread[-DIRECTIONS:][kept]
    a = (axes[:, -DIRECTIONS:].T @ value)[kept]
    if not len(a):
        return float("inf")  # the output does not vary
    shift = a @ (measure.grad_K(4 * t) - measure.grad_K(t))
    middle = np.einsum("ki,ij,kj->k", a, measure.hess_K(4 * t), a)
    # The step of the differences is in units of the spread, which may vanish at 4t if the law has atoms.
    step = 0.01 / np.sqrt(np.maximum(middle, np.einsum("ki,ij,kj->k", a, measure.covariance, a)))
    ahead, behind = (np.einsum("ki,kij,kj->k", a, measure.hess_K(4 * t + s * step[:, None] * a), a) for s in (1, -1))
    third = (ahead - behind) / (2 * step)
    fourth = (ahead - 2 * middle + behind) / step**2
    moment = fourth + 4 * third * shift + 3 * middle**2 + 6 * middle * shift**2 + shift**4
    # The exponent is K(4t) - 4K(t); `square` is E U² with its own factor e^{K(2t) - 2K(t)}.
    kurtosis = np.exp(cost[1] + 2 * cost[0]) * moment / square**2
    return float(min(2 * n / max(float(kurtosis.max()) - 1, 1e-12), n - 1))


class Validity(Outcome):
    """Whether a confidence interval of `plug_in` has the coverage that it states."""

    VALID = "valid", "the interval has about its nominal coverage"
    DOUBTFUL = (
        "doubtful",
        "the interval rests on few tokens: a 95% interval may cover less than 93% of the time",
        "use more tokens, or take the interval as a lower bound of the uncertainty",
    )
    MEANINGLESS = (
        "meaningless",
        "a few tokens determine the output, and tokens not yet seen would change it",
        "do not use the interval; use many more tokens or a higher temperature",
    )
    UNKNOWN = (
        "unknown",
        "K ends before 4t: validity of the normal approximation unknown",
        "compare with the scatter of outputs over independent samples, or use a higher temperature",
    )


def interval_validity(measure: Measure, tilt: ArrayLike, n: float, V: ArrayLike | None = None) -> Validity:
    """Whether 95% intervals of `plug_in` over n tokens of a known law hold, at one query of tilt t = A x (verified).

    Valid: at least `SAFE_DEGREES` degrees of freedom in the worst direction. Meaningless: ln n ≤ 2<t, ∇K(2t)> - K(2t),
    since n tokens cannot represent the law reweighted by e^{2<t,X>} (Chatterjee and Diaconis, 2018). For Gaussian
    tokens this is τ ≥ √(2 ln n)/2; also if K ends before 2t. Unknown: K ends before 4t. Doubtful: otherwise.

    >>> [theory.interval_validity(ll.Gaussian(0.0, 1.0), [tilt], 1000).value for tilt in (0.5, 1.0, 2.0)]
    ['valid', 'doubtful', 'meaningless']
    """
    t = one_tilt(measure, tilt)
    count = check_number("n", n, "more than one token", low=1, closed=False)
    end = ends_before(measure, t)
    if end in (1, 2) or log(count) <= log_tokens_needed(measure, t):
        return Validity.MEANINGLESS
    if end == 4:
        return Validity.UNKNOWN
    return Validity.VALID if plug_in_degrees(measure, t, count, V) >= SAFE_DEGREES else Validity.DOUBTFUL


def observed_validity(degrees: float) -> Validity:
    """Whether the `plug_in` interval of one sample holds, judged from its degrees of freedom alone (verified).

    >>> theory.observed_validity(30.0).value, theory.observed_validity(5.0).value
    ('valid', 'doubtful')
    """
    check_kind("degrees", degrees, Real, "a number of degrees of freedom")
    if not degrees >= FEW_DEGREES:
        return Validity.MEANINGLESS
    return Validity.VALID if degrees >= SAFE_DEGREES else Validity.DOUBTFUL
