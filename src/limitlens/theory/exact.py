"""Exact finite-n error of attention over Gaussian tokens at one tilt, for any n, without sampling.

For positive weights W_i with sum Z and any numerator N, N²/Z² = ∫ s N² e^{-sZ} ds over s > 0. Taking expectations over
n iid tokens turns every second moment of a softmax output into one integral over s of three Laplace averages,

    q(s) = E[1 - e^{-sW}],    a₁(s) = E[W (z-τ) e^{-sW}],    a₂(s) = E[W² (z-τ)² e^{-sW}],    b₂(s) = E[W² e^{-sW}],

where z is the standard normal coordinate of a whitened token along the tilt, W = e^{τz} and τ the limit along it:

    E[(error along the tilt)²] = ∫ s [n a₂ (1-q)^{n-1} + n(n-1) a₁² (1-q)^{n-2}] ds,
    E[Σ w²]                    = ∫ s n b₂ (1-q)^{n-1} ds.

Across the tilt the whitened coordinates are independent of the weights, so each has mean square error E Σ w². By
Stein's identity the mean output is shrunk by the same number, E Γ_n(x) = (1 - E Σ w²) Γ(x), exactly and for every n.
The averages do not depend on n. On logarithmic scales both integrals converge geometrically in the trapezoid step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array

# Trapezoid steps: the integrands are analytic in a strip of half-width π/2 around log s, so a step h costs e^{-π²/h}.
_STEP = 0.25
LARGEST = 1e20  # beyond, a₁ loses its digits to cancellation
_WIDEST = 0.4  # step over standard normal coordinates: costs e^{-2π²/h²}
_TAIL = 9.0  # standard deviations beyond which a Gaussian factor is below 1e-17


@dataclass(frozen=True)
class PointwiseError:
    """Exact second moments of attention at whitened tilts over n Gaussian tokens; arrays of shape (tilts, sizes).

    Attributes
    ----------
    along : Array
        E[(error along the tilt)²].
    across : Array
        E[Σ w²] over the tokens other than the query's own: the mean square error of each coordinate across the tilt.
        Without an own token, also the share by which the mean output is shorter than the limit.
    own : Array
        E[w²] of the query's own token; zero where it has none.
    own_along : Array
        E[w · error along the tilt] for the same token.
    """

    along: Array
    across: Array
    own: Array
    own_along: Array

    def mean_square(self, dim: int) -> Array:
        """E|error|² in whitened space of dimension `dim`, for queries without an own token: (tilts, sizes)."""
        return np.asarray(self.along + (dim - 1) * self.across)


def pointwise_error(tilts: ArrayLike, sizes: ArrayLike, own: ArrayLike | None = None) -> PointwiseError:
    """Exact error of attention at whitened tilts τ = |Σ^{1/2} A x| over n Gaussian tokens.

    Parameters
    ----------
    tilts : array of shape (tilts,)
        Values of τ, zero or positive.
    sizes : array of shape (sizes,)
        Numbers of tokens n, at least 1.
    own : array of shape (tilts,), optional
        Where the query is one of the n tokens, the coordinate of that token along the query's tilt. Queries are
        independent of the tokens when absent.
    """
    taus = np.atleast_1d(as_array("tilts", tilts, ndim=(0, 1)))
    counts = np.atleast_1d(as_array("sizes", sizes, ndim=(0, 1)))
    if (taus < 0).any():
        raise InputError(f"a tilt is {taus.min():.4g}; expected lengths that are zero or positive")
    if not counts.size or (counts < 1).any() or (counts > LARGEST).any():
        raise InputError(f"sizes are {counts.tolist()}; expected numbers of tokens between 1 and {LARGEST:.0e}")
    if own is None:
        rows = [_moments(float(tau), counts, None) for tau in taus]
    else:
        own_coordinates = np.broadcast_to(as_array("own", own, ndim=(0, 1)), taus.shape)
        rows = [_moments(float(tau), counts, float(z)) for tau, z in zip(taus, own_coordinates, strict=True)]
    return PointwiseError(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def _moments(tau: float, n: Array, own: float | None) -> tuple[Array, Array, Array, Array]:
    """The four fields of `PointwiseError` at one tilt: each (sizes,)."""
    log_s, log_rest, a1, a2, b2 = _laplace_averages(tau, float(n.min()), float(n.max()), own)
    others = n[:, None] - (own is not None)
    none_out = np.exp(others * log_rest)
    one_out = others * np.exp((others - 1) * log_rest)
    two_out = others * (others - 1) * np.exp((others - 2) * log_rest)
    # With log s as the variable, s ds = s² d(log s): the averages already carry the powers of s.
    if own is None:
        along, across = one_out @ a2 + two_out @ a1**2, one_out @ b2
        return _STEP * along, _STEP * across, np.zeros_like(n), np.zeros_like(n)
    weight = np.exp(np.minimum(log_s + tau * own, 300.0))  # s times the weight of the own token; its square is needed
    damping = np.exp(-weight)
    pull = weight * (own - tau)
    along = one_out @ (damping * a2) + two_out @ (damping * a1**2)
    along += one_out @ (2 * damping * pull * a1) + none_out @ (damping * pull**2)
    own_along = one_out @ (damping * weight * a1) + none_out @ (damping * weight * pull)
    own_square = none_out @ (damping * weight**2)
    return _STEP * along, _STEP * (one_out @ (damping * b2)), _STEP * own_square, _STEP * own_along


def _laplace_averages(
    tau: float, smallest: float, largest: float, own: float | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Nodes log s in steps of _STEP, and log(1-q), s a₁, s² a₂, s² b₂ there; wide enough for n in [smallest, largest].

    All are averages over z of functions of u = log s + τ z: correlations where the grids of log s and τ z align, which
    they do unless τ is so small that z needs the finer step.
    """
    aligned = tau * _WIDEST >= _STEP
    step = _STEP / tau if aligned else _WIDEST
    extreme = np.sqrt(2 * np.log(max(largest, 2.0)))
    # Tokens matter up to 2τ, where W² is collected, or 1.155 L, where one token balances all others, and a tail beyond.
    z = np.arange(-_TAIL, min(2 * tau, 1.16 * extreme) + _TAIL, step)
    # 1/s runs over the sizes the sum of the weights may take: from its lowest (with `smallest` tokens) to its largest.
    largest_sum = tau * z[-1] if tau > extreme else max(np.log(largest) + tau**2 / 2 + 20.0, tau * z[-1])
    if own is not None:
        largest_sum = max(largest_sum, tau * own + 20.0)
    lowest = np.sqrt(2 * np.log(smallest / 4000.0)) - 2.0 if smallest > 4000.0 else -_TAIL
    log_s = np.arange(-largest_sum, 8.0 - tau * lowest, _STEP)
    line = log_s[0] + tau * z[0] + _STEP * np.arange(len(log_s) + len(z) - 1)
    u = line if aligned else log_s[:, None] + tau * z

    sw = np.exp(np.minimum(u, 700.0))  # s W
    once = sw * np.exp(-sw)
    twice = sw * once
    density = np.exp(-(z**2) / 2) * (step / np.sqrt(2 * np.pi))
    gap = z - tau

    def average(function: Array, weight: Array) -> Array:
        return np.asarray(np.correlate(function, weight, "valid") if aligned else function @ weight)

    q = np.minimum(average(-np.expm1(-sw), density), 1.0 - 1e-16)
    return (
        log_s,
        np.log1p(-q),
        average(once, density * gap),
        average(twice, density * gap**2),
        average(twice, density),
    )
