"""Exact finite-n error of attention over Gaussian tokens at one tilt, by quadrature.

For positive weights W_i with sum Z and any numerator N, N²/Z² = ∫ s N² e^{-sZ} ds over s > 0. Taking expectations over
n iid tokens turns every second moment of a softmax output into one integral over s of three Laplace averages,

    q(s) = E[1 - e^{-sW}],    a₁(s) = E[W (z-τ) e^{-sW}],    a₂(s) = E[W² (z-τ)² e^{-sW}],    b₂(s) = E[W² e^{-sW}],

where z is the standard normal coordinate of a whitened token along the tilt, W = e^{τz}, and τ the limit along it:

    E[(error along the tilt)²] = ∫ s [n a₂ (1-q)^{n-1} + n(n-1) a₁² (1-q)^{n-2}] ds,
    E[Σ w²]                    = ∫ s n b₂ (1-q)^{n-1} ds.

Across the tilt the whitened coordinates are independent of the weights, so each has mean square error E Σ w². By
Stein's identity the mean output is shrunk towards the mean m by the same factor, E Γ_n(x) = Γ(x) - E Σ w² (Γ(x) - m),
exactly for every n. In log s and τz the trapezoid rule converges geometrically for all of these integrals.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.prediction import as_sizes

# Trapezoid steps: the integrands are analytic in a strip of half-width π/2 around log s, so a step h costs e^{-π²/h}.
_STEP = 0.25
LARGEST = 1e20  # largest n; for larger ones a₁ loses its digits to cancellation
_STEEP = 30.0  # tilt from which the step is doubled, at an error of 5e-7
_WIDEST = 0.4  # largest step h over standard normal coordinates: error e^{-2π²/h²}
_TAIL = 9.0  # standard deviations beyond which a Gaussian factor is below 1e-17


@dataclass(frozen=True)
class PointwiseError:
    """Exact second moments of attention at whitened tilts over n Gaussian tokens; arrays of shape (tilts, sizes)."""

    along: Array  # E[(error along the tilt)²]
    across: Array  # E[Σ w²] without the query's own token: mean square error of each coordinate across the tilt
    own: Array  # E[w²] of the query's own token; zero if the query is not a token
    own_along: Array  # E[w · error along the tilt] of the same token


def pointwise_error(tilts: ArrayLike, sizes: ArrayLike, own: ArrayLike | None = None) -> PointwiseError:
    """Exact error of attention at whitened tilts τ = |Σ^{1/2} A x| (tilts,) over n Gaussian tokens (sizes,).

    If the query is one of the n tokens, `own` (tilts,) is the coordinate of that token along the query's tilt; when
    absent, queries are independent of the tokens.

    >>> error = theory.pointwise_error([1.0], [100, 1000])
    >>> error.along.round(5).tolist(), error.across.round(5).tolist()
    ([[0.04659, 0.00533]], [[0.02554, 0.0027]])
    """
    taus = np.atleast_1d(as_array("tilts", tilts, ndim=(0, 1)))
    counts = as_sizes(sizes)
    if (taus < 0).any():
        raise InputError(f"a tilt is {taus.min():.4g}; expected lengths that are zero or positive")
    if not counts.size or (counts < 1).any() or (counts > LARGEST).any():
        raise InputError(f"sizes are {counts.tolist()}; expected numbers of tokens between 1 and {LARGEST:.0e}")
    known = [None] * len(taus) if own is None else np.broadcast_to(as_array("own", own, ndim=(0, 1)), taus.shape)
    rows = [_moments(float(tau), counts, None if z is None else float(z)) for tau, z in zip(taus, known, strict=True)]
    return PointwiseError(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def _moments(tau: float, n: Array, own: float | None) -> tuple[Array, Array, Array, Array]:
    """The four fields of `PointwiseError` at one tilt: each (sizes,)."""
    step = _STEP if tau < _STEEP else 2 * _STEP
    log_s, log_rest, a1, a2, b2 = _laplace_averages(tau, step, float(n.min()), float(n.max()), own)
    others = n[:, None] - (own is not None)
    none_out = np.exp(others * log_rest)
    one_out = others * np.exp((others - 1) * log_rest)
    two_out = others * (others - 1) * np.exp((others - 2) * log_rest)
    # In the variable log s, s ds = s² d(log s); the averages below include the powers of s.
    if own is None:
        along, across = one_out @ a2 + two_out @ a1**2, one_out @ b2
        return step * along, step * across, np.zeros_like(n), np.zeros_like(n)
    weight = np.exp(np.minimum(log_s + tau * own, 300.0))  # s times the own token's weight, which is squared below
    damping = np.exp(-weight)
    pull = weight * (own - tau)
    along = one_out @ (damping * a2) + two_out @ (damping * a1**2)
    along += one_out @ (2 * damping * pull * a1) + none_out @ (damping * pull**2)
    own_along = one_out @ (damping * weight * a1) + none_out @ (damping * weight * pull)
    own_square = none_out @ (damping * weight**2)
    return step * along, step * (one_out @ (damping * b2)), step * own_square, step * own_along


def _laplace_averages(
    tau: float, step: float, smallest: float, largest: float, own: float | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Nodes log s in steps of `step`, and log(1-q), s a₁, s² a₂, s² b₂ there; wide enough for n in [smallest, largest].

    All are averages over z of functions of u = log s + τ z that are negligible for u < -`depth`. They are correlations
    if the grids of log s and τ z align, which they do unless τ is so small that z needs a finer step.
    """
    aligned = tau * _WIDEST >= step
    depth = np.log(largest) + 40.0
    low, high = _token_range(tau, smallest, largest)
    z = np.arange(max(-_TAIL, low - depth / max(tau, 1e-300)), high, step / tau if aligned else _WIDEST)
    # 1/s covers the possible values of the sum of the weights, from its lowest (`smallest` tokens) to its largest.
    extreme = np.sqrt(2 * np.log(largest))
    typical = np.log(largest) + tau**2 / 2 if tau < extreme else tau * extreme
    largest_sum = max(tau * z[-1], typical + 20.0, -np.inf if own is None else tau * own + 20.0)
    log_s = np.arange(-largest_sum, 8.0 - tau * low, step)
    density = np.exp(-(z**2) / 2) * ((z[1] - z[0]) / np.sqrt(2 * np.pi))
    gap = z - tau
    weights = np.stack((density, density * gap, density * gap**2, density))
    if aligned:  # u takes only len(log_s) + len(z) - 1 values
        sw = np.exp(np.minimum(log_s[0] + tau * z[0] + step * np.arange(len(log_s) + len(z) - 1), 700.0))
        once = sw * np.exp(-sw)
        kernels = (-np.expm1(-sw), once, sw * once, sw * once)
        q, a1, a2, b2 = (np.correlate(kernel, row, "valid") for kernel, row in zip(kernels, weights, strict=True))
    else:
        sw = np.exp(np.minimum(log_s[:, None] + tau * z, 700.0))
        once = sw * np.exp(-sw)
        q, a1 = -np.expm1(-sw) @ weights[0], once @ weights[1]
        a2, b2 = (sw * once) @ weights[2], (sw * once) @ weights[3]
    return log_s, np.log1p(-np.minimum(q, 1.0 - 1e-16)), a1, a2, b2


def _token_range(tau: float, smallest: float, largest: float) -> tuple[float, float]:
    """Range of the coordinate z of tokens that matter: a larger one is certain below it, none is seen above it."""
    low = -float(ndtri(50 / smallest)) if smallest > 100 else -_TAIL
    extreme = np.sqrt(2 * np.log(max(largest, 2.0)))
    if tau > extreme:  # only the largest tokens have weight
        return low, float(np.sqrt(extreme**2 + _TAIL**2))
    # The mass of W² lies around 2τ, or around 1.155 L where one token balances all others, with Gaussian tails.
    return low, float(min(2 * tau, 1.16 * extreme)) + _TAIL
