"""Exact mean square error of attention over n Gaussian tokens at one query, and errors averaged over queries.

For a tilt of whitened length τ, a standard normal z and the weight W = e^{τz}, the error along the tilt has

    E[error²] = ∫ s [n a₂ (1-q)^{n-1} + n(n-1) a₁² (1-q)^{n-2}] ds,    E[Σ w²] = ∫ s n b₂ (1-q)^{n-1} ds,
    q = E[1 - e^{-sW}],  a₁ = E[W (z-τ) e^{-sW}],  a₂ = E[W² (z-τ)² e^{-sW}],  b₂ = E[W² e^{-sW}].

A coordinate across the tilt has the mean square error E Σ w². The mean output is E Γ_n(x) = Γ(x) - E Σ w² (Γ(x) - m), m
the mean of the tokens. All of this is exact for every n (docs/theory.md).
"""

from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri, ndtr, ndtri

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.prediction import as_sizes, value_matrix
from limitlens.theory.spectrum import square_root, whitened
from limitlens.theory.token_influence import INFLUENCE_UP_TO, mean_error_1d, mean_error_covariance

VERIFIED_HORIZON = 3.0  # largest H at which simulations confirm the three-piece law
QUERY_POINTS = 1024  # quadrature points for the law of queries in d > 1
_TILTS = (1.5, 2.5, 5.0, 8.0)  # root mean square tilts of the wider Gaussians that part of the points come from
_STEP = 0.25  # trapezoid step h in log s: error e^{-π²/h}, since integrands are analytic in a strip of half-width π/2
LARGEST = 1e20  # largest n; for larger ones a₁ loses its digits to cancellation
_STEEP = 30.0  # tilt from which the grid no longer grows with the tilt; it must exceed √(2 ln n)
_WIDEST = 0.4  # largest step h over standard normal coordinates: error e^{-2π²/h²}
_Averages: TypeAlias = tuple[Array, Array | float, Array, Array, Array, Array]
_TAIL = 9.0  # standard deviations beyond which a Gaussian factor is below 1e-17


@dataclass(frozen=True)
class PointwiseError:
    """Exact mean squares of attention's error over n Gaussian tokens, by length of the tilt A x: (tilts, sizes)."""

    along: Array  # E[(error along the tilt)²]
    across: Array  # E[Σ w²] without the query's own token: mean square error of a coordinate orthogonal to the tilt
    own: Array  # E[w²] of the query's own token; zero if the query is not a token
    own_along: Array  # E[w · error along the tilt], w the weight of the query's own token


def pointwise_error(tilts: ArrayLike, sizes: ArrayLike, own: ArrayLike | None = None) -> PointwiseError:
    """Exact mean square error of attention over n Gaussian tokens at queries of tilt length τ = |Σ^{1/2} A x|.

    If the query is one of the n tokens, `own` (tilts,) is the whitened coordinate of that token along the tilt.
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
    averages = _laplace_averages if tau < _STEEP else _steep_averages
    log_s, step, log_rest, a1, a2, b2 = averages(tau, float(n.min()), float(n.max()), own)
    others = n[:, None] - (own is not None)
    none_out = np.exp(others * log_rest)
    one_out = others * np.exp((others - 1) * log_rest)
    two_out = others * (others - 1) * np.exp((others - 2) * log_rest)
    # s times the weight of the query's own token, zero without one; squared below
    weight = np.zeros_like(log_s) if own is None else np.exp(np.minimum(log_s + tau * own, 300.0))
    pull = weight * ((own or 0.0) - tau)
    damping = step * np.exp(-weight)  # in log s, s ds = s² d(log s); the averages include the powers of s
    along = one_out @ (damping * (a2 + 2 * pull * a1)) + two_out @ (damping * a1**2) + none_out @ (damping * pull**2)
    own_along = one_out @ (damping * weight * a1) + none_out @ (damping * weight * pull)
    return along, one_out @ (damping * b2), none_out @ (damping * weight**2), own_along


def _laplace_averages(tau: float, smallest: float, largest: float, own: float | None) -> _Averages:
    """Grid of log s for n from `smallest` to `largest`, its step, and log(1-q), s a₁, s² a₂, s² b₂: (nodes,) each."""
    step = _STEP
    aligned = tau * _WIDEST >= step
    depth = np.log(largest) + 40.0  # the averaged functions of u = log s + τ z are negligible for u < -depth
    # Range of z that matters: the mass of W² is near 2τ, or 1.155 L if one token balances all; beyond L, the largest.
    low = _lowest(smallest)
    edge = np.sqrt(2 * np.log(max(largest, 2.0)))
    high = float(np.sqrt(edge**2 + _TAIL**2) if tau > edge else min(2 * tau, 1.16 * edge) + _TAIL)
    z = np.arange(max(-_TAIL, low - depth / max(tau, 1e-300)), high, step / tau if aligned else _WIDEST)
    # 1/s covers the possible values of the sum of the weights, from its lowest (`smallest` tokens) to its largest.
    extreme = np.sqrt(2 * np.log(largest))
    typical = np.log(largest) + tau**2 / 2 if tau < extreme else tau * extreme
    largest_sum = max(tau * z[-1], typical + 20.0, -np.inf if own is None else tau * own + 20.0)
    log_s = np.arange(-largest_sum, 8.0 - tau * low, step)
    density = np.exp(-(z**2) / 2) * ((z[1] - z[0]) / np.sqrt(2 * np.pi))
    gap = z - tau
    # On aligned grids u takes only len(log_s) + len(z) - 1 values, and averages are correlations.
    u = log_s[0] + tau * z[0] + step * np.arange(len(log_s) + len(z) - 1) if aligned else log_s[:, None] + tau * z
    average = np.correlate if aligned else np.matmul
    sw = np.exp(np.minimum(u, 700.0))
    once = sw * np.exp(-sw)
    q, a1 = average(-np.expm1(-sw), density), average(once, density * gap)
    a2, b2 = average(sw * once, density * gap**2), average(sw * once, density)
    return log_s, step, np.log1p(-np.minimum(q, 1.0 - 1e-16)), a1, a2, b2


def _steep_averages(tau: float, smallest: float, largest: float, own: float | None) -> _Averages:
    """Like `_laplace_averages` for a tilt τ ≥ `_STEEP`, on a grid that is no larger for a larger tilt.

    With log s = -τy and u = log s + τz, averages over z = y + u/τ are smooth in y. The step in y is 0.49/√(2 ln n), and
    1/(3τ) around the query's own token, whose weight rises from 0 to 1 there. The error is below 1e-7.
    """
    edge = float(np.sqrt(2 * np.log(max(largest, 2.0))))
    step = min(0.2, 0.49 / edge)  # error e^{-π²/(step · edge)}, as (1-q)^n is like exp(-e^{-edge (y - edge)})
    first, last = _lowest(smallest) - 8.0 / tau, float(np.hypot(edge, _TAIL))
    if own is None:
        y = np.arange(first, last, step)
        width = np.full(len(y), tau * step)
    else:
        # The node of number t is y = own + (4/τ) sinh r with t = (y - own)/step + 12r, solved by Newton's method.
        ends = np.array((first, max(last, own + 20.0 / tau))) - own
        t = np.arange(*(ends / step + 12 * np.arcsinh(ends * tau / 4)))
        share = 4 / (tau * step)
        r = np.minimum(np.abs(t) / 12, np.arcsinh(np.abs(t) / share))
        for _ in range(8):
            r -= (share * np.sinh(r) + 12 * r - np.abs(t)) / (share * np.cosh(r) + 12)
        y = own + np.sign(t) * (4 / tau) * np.sinh(r)
        width = 4 * np.cosh(r) / (share * np.cosh(r) + 12)
    u, du = np.linspace(-50.0, 5.0, 166, retstep=True)
    z = y[:, None] + u / tau
    once = du * np.exp(u - np.exp(u))
    density = np.exp(-(z**2) / 2) / (tau * np.sqrt(2 * np.pi))
    q, gap = ndtr(-z) @ once, z - tau  # q by parts: 1 - e^{-sW} is the integral of `once`
    a1, twice = (density * gap) @ once, np.exp(u) * once
    return -tau * y, width, np.log1p(-np.minimum(q, 1.0 - 1e-16)), a1, (density * gap**2) @ twice, density @ twice


def _lowest(smallest: float) -> float:
    """Lower end of the whitened tokens z that matter for n ≥ `smallest` tokens: the largest weight is above it."""
    return -float(ndtri(50 / smallest)) if smallest > 100 else -_TAIL


def three_piece(tilts: ArrayLike, n: float) -> Array:
    """Approximate E|error| of attention along the tilt A x over n Gaussian tokens, τ its whitened length (verified).

    With L = √(2 ln n): √(2/π) e^{τ²/2} √((1+τ²)/n) for τ < L/2, exp(-(L-τ)²/2) for τ < L, and τ - Φ⁻¹(1 - 1/n) above.
    """
    tau = as_array("tilts", tilts)
    if not n > 1 or (tau < 0).any():
        raise InputError(f"n is {n}; expected above 1, with tilts that are zero or positive")
    L = np.sqrt(2 * np.log(n))
    many = np.sqrt(2 / np.pi) * np.exp(np.minimum(tau, L) ** 2 / 2) * np.sqrt((1 + tau**2) / n)
    few = np.exp(-((L - tau) ** 2) / 2)
    largest = tau - ndtri(1 - 1 / n)
    return np.select([tau < L / 2, tau < L], [many, few], largest)


def averaged_error_1d(horizon: float, sizes: ArrayLike) -> Array:
    """E|error| averaged over Gaussian queries, d = 1, unit tokens: (sizes,) (verified within 25%, n ≥ 1e3, H ≤ 3)."""
    x, step = np.linspace(0.0, 12.0, 6001, retstep=True)
    weight = np.exp(-(x**2) / 2) * (step * np.sqrt(2 / np.pi))
    weight[0] /= 2
    return np.array([weight @ three_piece(abs(horizon) * x, float(n)) for n in as_sizes(sizes)])


def query_error(
    covariance: ArrayLike, A: ArrayLike, queries: ArrayLike, sizes: ArrayLike,
    *, V: ArrayLike | None = None, mean: ArrayLike | None = None, own: bool = False,
) -> Array:  # fmt: skip
    """Exact mean square error of attention over n Gaussian tokens at given queries: (queries, sizes).

    A row z of `queries` (queries, d) is the query x = mean + Σ^{1/2} z. V (d_out, d) is the identity and the mean zero
    when absent. With `own`, the query is one of the n tokens; otherwise it is independent of them.
    """
    root = square_root(covariance)
    B = whitened(covariance, A)
    dim = len(root)
    z = as_array("queries", queries, ndim=2)
    if z.shape[1] != dim:
        raise InputError(f"queries have shape {z.shape}; expected (queries, {dim})")
    center = np.zeros(dim) if mean is None else as_array("mean", mean, ndim=1)
    M = value_matrix(V, dim) @ root
    tilts = z @ B.T + center @ as_array("A", A).T @ root
    tau = np.linalg.norm(tilts, axis=1)
    along = np.where(tau[:, None] > 0, tilts, np.eye(dim)[0]) / np.where(tau > 0, tau, 1.0)[:, None]
    coordinate = np.sum(z * along, axis=1)
    error = pointwise_error(tau, sizes, coordinate if own else None)
    value_along = along @ M.T
    value_rest = (z - coordinate[:, None] * along) @ M.T
    gain = np.sum(value_along**2, axis=1)[:, None]
    square = gain * error.along + (np.sum(M**2) - gain) * error.across
    square += np.sum(value_rest**2, axis=1)[:, None] * error.own
    square += 2 * np.sum(value_rest * value_along, axis=1)[:, None] * error.own_along
    return np.asarray(square)


def output_error(
    covariance: ArrayLike, A: ArrayLike, sizes: ArrayLike,
    *, V: ArrayLike | None = None, mean: ArrayLike | None = None, mask_self: bool = False,
) -> Array:  # fmt: skip
    """Root mean square error of attention over n Gaussian tokens, over queries and samples: (sizes,) (verified).

    Exact in d = 1. In d > 1 the average over queries is within 1.4% up to n = 1e10 (3% with the query's own token in
    d = 32 at H = 0.1). `mask_self` excludes the query's own token; otherwise the query is one of the n tokens.

    >>> theory.output_error([[1.0]], [[0.5]], [100, 10_000]).round(4).tolist()
    [0.1336, 0.0146]
    """
    z, weight = _query_points(whitened(covariance, A))
    others = as_sizes(sizes) - mask_self
    return np.asarray(np.sqrt(weight @ query_error(covariance, A, z, others, V=V, mean=mean, own=not mask_self)))


def mean_error(covariance: ArrayLike, A: ArrayLike, sizes: ArrayLike, V: ArrayLike | None = None) -> Array | None:
    """E|error of the mean output| over n Gaussian tokens: (sizes,), or None if there is no formula.

    In d = 1 `mean_error_1d`, for a horizon H ≤ 2 (verified to H = 1). In d > 1 the n^{-1/2} limit, for H < 1: verified
    for ‖Σ^{1/2} A Σ^{1/2}‖_F ≤ 1 (within 10% from n = 300 on), a heuristic that is too large beyond.
    """
    counts = as_sizes(sizes)
    B = whitened(covariance, A)
    if np.linalg.norm(B, 2) > (INFLUENCE_UP_TO if len(B) == 1 else np.nextafter(1.0, 0.0)):
        return None
    if len(B) == 1:
        scale = float(np.linalg.norm(value_matrix(V, 1) @ square_root(covariance)))
        return np.asarray(scale * mean_error_1d(float(B[0, 0]), counts))
    return np.asarray(expected_norm(mean_error_covariance(covariance, A, V)) / np.sqrt(counts))


def expected_norm(covariance: ArrayLike) -> float:
    """Expected length E|N(0, C)| = (2√π)^{-1} ∫_0^∞ (1 - Π_i (1 + 2 s λ_i)^{-1/2}) s^{-3/2} ds, λ eigenvalues of C."""
    eigenvalues = np.clip(np.linalg.eigvalsh(as_array("covariance", covariance, ndim=2)), 0.0, None)
    total = float(eigenvalues.sum())
    if total == 0.0:
        return 0.0
    s = np.exp(np.arange(-80.0, 80.0, 0.1))
    loss = -np.expm1(-0.5 * np.sum(np.log1p(2 * s[:, None] * eigenvalues / total), axis=1))
    return float(np.sqrt(total) * 0.1 * np.sum(loss / np.sqrt(s)) / (2 * np.sqrt(np.pi)))


def _query_points(B: Array) -> tuple[Array, Array]:
    """Quadrature points z (m, d) and weights (m,) for averages over queries z ~ N(0, I) of functions of the tilt B z.

    In d > 1 importance sampling: points also come from N(0, (I - 2λBᵀB)^{-1}), since rare large tilts matter most.
    """
    if len(B) == 1:
        x: Array = np.linspace(-8.5, 8.5, 69)
        weight = np.exp(-(x**2) / 2)
        return x[:, None], weight / weight.sum()
    from scipy.optimize import brentq

    _, values, axes = np.linalg.svd(B)
    squares = values**2
    relative = squares / max(float(squares[0]), 1e-300)
    variances = [np.ones(len(B))]
    for tilt in _TILTS:
        if squares[0] > 1e-9 and squares.sum() < tilt**2:
            share = brentq(lambda x, goal: np.sum(squares / (1 - x * relative)) - goal, 0, 1 - 1e-12, (tilt**2,))
            variances.append(1 / (1 - share * relative))
    normal = _even_normal(len(B), QUERY_POINTS // len(variances))
    points = np.concatenate([normal * np.sqrt(variance) for variance in variances])
    # log of each law's density over that of N(0, I)
    ratio = np.stack([points**2 @ (1 - 1 / variance) / 2 - np.log(variance).sum() / 2 for variance in variances])
    weight = np.exp(-np.logaddexp.reduce(ratio))
    return points @ axes, weight / weight.sum()


def _even_normal(dim: int, count: int) -> Array:
    """Quasi-random (low-discrepancy) points (count, dim) of N(0, I), with lengths at even quantiles of the χ law."""
    # Fractional parts of multiples of square roots of primes fill the cube evenly in every projection.
    numbers = range(2, 20 + int(2 * dim * np.log(dim + 2)))
    primes = [number for number in numbers if all(number % factor for factor in range(2, isqrt(number) + 1))]
    steps = np.sqrt(primes[:dim]) % 1.0
    cube: Array = (0.5 + np.arange(1, count + 1)[:, None] * steps) % 1.0
    points = ndtri(np.clip(cube, 1e-12, 1 - 1e-12))
    squares = np.sum(points**2, axis=1)
    longer = (squares.argsort()[::-1].argsort() + 0.5) / count  # fraction of the points that are longer
    return np.asarray(points * np.sqrt(chdtri(dim, longer) / squares)[:, None])
