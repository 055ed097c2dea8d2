"""First-order effect (influence) of one token on the mean attention output, and the error of the mean that follows.

Over n Gaussian tokens that are also the queries, the error of the mean output is about the average of h over the
whitened tokens y. With B = Σ^{1/2} A Σ^{1/2}, P = BBᵀ (I + BBᵀ)^{-1} and Z(y) = det(I + BBᵀ)^{-1/2} e^{yᵀPy/2},
h(y) = B y + Z(y) (I - P) y. The terms are the token's effects as query and as key. For a horizon H = ‖B‖₂ < 1 the
variance of h is finite, and errors fall like n^{-1/2} (verified).
"""

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.theory.prediction import as_sizes, value_matrix
from limitlens.theory.spectrum import half_whitened, square_root, whitened

INFLUENCE_UP_TO = 2.0  # largest H; for larger ones the linearisation overpredicts the mean error by more than half
_STEP = 0.1  # step of ln t in the integral over frequencies; halving it changes results by 1e-6, by 3e-4 at H = 2
_BELOW_ONE = "below 1, because from 1 on the moments have no n^(-1/2) constant: use the sharp law instead"


def influence(covariance: ArrayLike, A: ArrayLike, tokens: ArrayLike) -> Array:
    """Effect h(y) (..., d) of one token on the mean output, for whitened tokens y = Σ^{-1/2} (X - mean) (verified)."""
    B = whitened(covariance, A)
    y = as_array("tokens", tokens)
    if y.ndim == 0 or y.shape[-1] != len(B):
        raise InputError(f"tokens have shape {y.shape}; expected (..., {len(B)})")
    C = B @ B.T
    rest = np.linalg.inv(np.eye(len(C)) + C)  # I - P
    pull = y @ rest
    exponent = np.sum(y * (y - pull), axis=-1) / 2 + np.linalg.slogdet(rest)[1] / 2
    return np.asarray(y @ B.T + np.exp(exponent)[..., None] * pull)


def variance_influence_1d(horizon: float, tokens: ArrayLike) -> Array:
    """Effect g(y) of one whitened token y on the variance of the attention outputs in d = 1 (verified).

    g(y) = H² (y² - 1) + 2 H²/(1+H²) Z(y) (y²/(1+H²) - 1), Z(y) = (1+H²)^{-1/2} e^{y² H²/(2(1+H²))}.
    """
    y = as_array("tokens", tokens)
    h2 = float(horizon) ** 2
    pull = np.exp(y**2 * h2 / (1 + h2) / 2) / np.sqrt(1 + h2)
    return np.asarray(h2 * (y**2 - 1) + 2 * h2 / (1 + h2) * pull * (y**2 / (1 + h2) - 1))


def mean_error_covariance(
    covariance: ArrayLike, A: ArrayLike, V: ArrayLike | None = None, mean: ArrayLike | None = None
) -> Array:
    """Limit (d_out, d_out) of n times the covariance of the mean output's error, Gaussian tokens, horizon H < 1.

    V Σ^{1/2} [C + B + Bᵀ + e^{<m,ν>} det(I-C²)^{-1/2} ((I-C²)^{-1} + ννᵀ)] Σ^{1/2} Vᵀ with B = Σ^{1/2} A Σ^{1/2},
    C = BBᵀ, m = Σ^{1/2} A E X and ν = (I-C)^{-1} m (`mean` E X, zero when absent). For centred tokens in d = 1 it is
    H² + 2 s H + (1-H⁴)^{-3/2}, s the sign of A. `statuses.CLAIMS` has the range in which it is verified.
    """
    root = square_root(covariance)
    B = whitened(covariance, A)
    check_number("the horizon", float(np.linalg.norm(B, 2)), _BELOW_ONE, below=1.0)
    C = B @ B.T
    gap = np.eye(len(C)) - C @ C
    tilt = np.zeros(len(C)) if mean is None else half_whitened(root, A) @ as_array("mean", mean, ndim=1)
    shift = np.linalg.solve(np.eye(len(C)) - C, tilt)
    weight = np.exp(min(float(tilt @ shift - np.linalg.slogdet(gap)[1] / 2), 700.0))
    core = C + B + B.T + weight * (np.linalg.inv(gap) + np.outer(shift, shift))
    outer = value_matrix(V, len(root)) @ root
    return np.asarray(outer @ core @ outer.T)


def covariance_error_variance_1d(horizon: float) -> float:
    """Limit 10 H⁴ + 4 H⁴ (2 + H⁴) (1-H⁴)^{-5/2} of n · Var(variance of the outputs), d = 1, unit tokens (verified)."""
    h4 = check_number("the horizon", abs(horizon), _BELOW_ONE, below=1.0) ** 4
    return 10.0 * h4 + 4.0 * h4 * (2.0 + h4) * float((1.0 - h4) ** -2.5)


def mean_error_1d(signed_horizon: float, sizes: ArrayLike) -> Array:
    """E|error of the mean output| over n Gaussian tokens in d = 1, in standard deviations of the tokens.

    `signed_horizon` is H with the sign of A. Verified to H = 1 (within 8%, n ≥ 1e3); 1.4 times too large at H = 2.
    """
    y, weight = _nodes(signed_horizon)
    return expected_absolute_mean(influence([[1.0]], [[float(signed_horizon)]], y[:, None])[:, 0], weight, sizes)


def variance_error_1d(horizon: float, sizes: ArrayLike) -> Array:
    """E|error of the variance of the outputs| over n Gaussian tokens, d = 1, over the tokens' variance (heuristic)."""
    y, weight = _nodes(horizon)
    return expected_absolute_mean(variance_influence_1d(horizon, y), weight, sizes)


def expected_absolute_mean(values: Array, probability: Array, sizes: ArrayLike) -> Array:
    """E|average of n independent draws| from a centred discrete law of `values` (nodes,), for each n: (sizes,).

    It is (2/(πn)) ∫ (1 - Re φ(t)^n) t^{-2} dt over t > 0, φ the characteristic function of one draw.
    """
    n = as_sizes(sizes)
    if not n.size or (n < 1).any():
        raise InputError(f"sizes are {n.tolist()}; expected numbers of tokens, each at least 1")
    scale = float(probability @ np.abs(values))
    if scale == 0.0:
        return np.zeros_like(n)
    # From frequencies at which the whole sum is a point to those that resolve the bulk of one draw.
    t = np.exp(np.arange(-np.log(n.max() * scale) - 20.0, -np.log(scale) + 4.0, _STEP))
    phase = np.outer(t, values / 2)
    sine = np.sin(phase)
    # φ = 1 - real + i imaginary; modulus and angle come from 1 - φ, which keeps its digits where φ is close to 1.
    real = 2.0 * (sine**2 @ probability)
    imaginary = 2.0 * ((sine * np.cos(phase)) @ probability)
    log_modulus = 0.5 * np.log1p(np.maximum(real**2 + imaginary**2 - 2.0 * real, -1.0 + 1e-15))
    angle = np.arctan2(imaginary, 1.0 - real)
    decay, turn = n[:, None] * log_modulus, n[:, None] * angle
    # 1 - Re e^{a+ib} = -expm1(a) + 2 e^a sin²(b/2)
    integrand = (-np.expm1(decay) + 2 * np.exp(decay) * np.sin(turn / 2) ** 2) / t
    slope = np.log(integrand[:, 1] / integrand[:, 0]) / _STEP  # below the grid the integrand is a power of t
    inside = _STEP * (integrand.sum(axis=1) - (integrand[:, 0] + integrand[:, -1]) / 2)
    return np.asarray((2.0 / np.pi) * (inside + integrand[:, 0] / slope + 1.0 / t[-1]) / n)


def _nodes(horizon: float) -> tuple[Array, Array]:
    """Quadrature nodes and weights of the standard normal law, wide enough for the influence function."""
    if not abs(horizon) <= INFLUENCE_UP_TO:
        reason = "while the influence of one token is small, so use the three-piece law or a study beyond"
        raise InputError(f"the horizon is {abs(horizon):.4g}; expected at most {INFLUENCE_UP_TO:g}, {reason}")
    edge = 9.0 * float(np.sqrt(1.0 + float(horizon) ** 2))
    y, step = np.linspace(-edge, edge, 4001, retstep=True)
    return y, np.exp(-(y**2) / 2) * (step / np.sqrt(2.0 * np.pi))
