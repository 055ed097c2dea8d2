"""Simulation of attention from one query: exact at any number of keys, because only the nearest ones need drawing.

The rescaled gaps x_1 < x_2 < … of n keys are Λ^{−1} of ordered uniform numbers (times n), and ordered uniform numbers
are normalised partial sums of exponential ones (Rényi), which can be drawn from the smallest on without drawing the
others. The limit is the same with Λ^{−1} of the partial sums themselves. Beyond the keys that are drawn, the others are
independent of them given the last one; their total weight is replaced by its conditional mean plus a Gaussian
fluctuation of the right covariance. `WeightSample.remainder` says how large that fluctuation is.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from limitlens.errors import Array, InputError, check_number
from limitlens.theory.scaling.control import check_beta, check_keys
from limitlens.theory.scaling.laws import check_dim, negligible_beyond
from limitlens.theory.scaling.points import Points

MOST_DRAWN = 4096  # keys drawn one by one per replicate
_UNFELT = 80.0  # a weight e^{−80} below the largest is lost in rounding, even times 1e18 keys
_CHUNK = 1 << 21  # keys held at a time
check_replicates = partial(check_number, "replicates", expected="at least 2, to have a standard error", low=2)


def check_count(n: float) -> int:
    """The number of keys `n`, which may be given as 1e10, as an integer."""
    if not float(n).is_integer():
        raise InputError(f"n is {n:g}; expected a whole number of keys")
    return int(n)


@dataclass(frozen=True)
class WeightSample:
    """What attention did in each of several independent replicates; every array has shape (replicates,)."""

    top: Array  # the largest weight w₁
    participation: Array  # Σ w²
    entropy: Array  # −Σ w log w
    keys90: Array  # how many nearest keys hold 90% of the mass; NaN where more keys than were drawn are needed
    gap: Array  # Σ w x = β(1 − <q, Γ>), the output along the query
    tangential: Array  # √β times one coordinate of the output across it; NaN where keys are not uniform around it
    nearest: Array  # x_1, the rescaled gap of the nearest key
    remainder: Array  # standard deviation of the mass replaced by a Gaussian, over the total; 0 with every key drawn


def sample_weights(
    points: Points, replicates: int, rng: np.random.Generator, tangent_dim: int | None = None
) -> WeightSample:
    """Draw attention over the keys of a point process: n keys of any law (`KeyPoints`) or the limit (`PoissonPoints`).

    `tangent_dim` is the dimension of the directions around the query, for laws that are uniform over them.
    """
    drawn, parts = _keys_to_draw(points), []
    for count in _chunks(replicates, drawn):
        x, weight, rest, _ = _draw(points, count, drawn, rng)
        across, noise = np.full((count, 1), np.nan), np.zeros(count)
        if tangent_dim is not None:
            across = np.sqrt(points.tangent_square(x)) * _coordinate(x.shape, tangent_dim, rng)
            noise = np.sqrt(rest[3] / tangent_dim) * rng.standard_normal(count)
        parts.append(_summary(x, weight, rest, across, noise))
    return WeightSample(*np.concatenate(parts, axis=1))


def sample_ordered(points: Points, ranks: int, replicates: int, rng: np.random.Generator) -> Array:
    """Draw the `ranks` largest weights w₁ ≥ w₂ ≥ …, of shape (replicates, ranks)."""
    if not 1 <= ranks <= min(points.total, MOST_DRAWN):
        raise InputError(f"ranks is {ranks}; expected between 1 and {min(points.total, MOST_DRAWN):g}")
    drawn = max(ranks, _keys_to_draw(points))
    draws = (_draw(points, count, drawn, rng) for count in _chunks(replicates, drawn))
    return np.concatenate([weight[:, :ranks] / total[:, None] for _, weight, _, total in draws])


def sample_direct(dim: int, n: int, beta: float, replicates: int, rng: np.random.Generator) -> WeightSample:
    """The same by brute force for keys uniform on S^{d−1}: every key is a vector, attention is softmax(β K q)ᵀ K."""
    check_dim(dim)
    check_keys(n)
    check_beta(beta)
    check_replicates(replicates)
    parts, nothing = [], np.zeros((5, 1))
    for _ in range(replicates):
        keys = rng.standard_normal((n, dim))
        keys /= np.sqrt(np.einsum("ij,ij->i", keys, keys))[:, None]
        keys[:, 0] -= 1
        x = beta / 2 * np.einsum("ij,ij->i", keys, keys)  # β|q − k|²/2, free of the cancellation in 1 − <q, k>
        felt = np.flatnonzero(x < x.min() + _UNFELT)
        felt = felt[np.argsort(x[felt])][None]
        x, across = x[felt], math.sqrt(beta) * keys[felt, 1]
        parts.append(_summary(x, np.exp(x[:, :1] - x), nothing, across, np.zeros(1)))
    return WeightSample(*np.concatenate(parts, axis=1))


def _chunks(replicates: int, drawn: int) -> list[int]:
    """Numbers of replicates to draw at a time, bounded in memory."""
    check_replicates(replicates)
    step = max(1, _CHUNK // drawn)
    return [min(step, replicates - start) for start in range(0, replicates, step)]


def _keys_to_draw(points: Points) -> int:
    """All keys if they are few, else those whose mass could matter, at most `MOST_DRAWN`."""
    if points.total <= MOST_DRAWN:
        return int(points.total)
    farthest = float(points.reach(20.0)) + negligible_beyond(points.a) / 2
    within = float(points.cumulative(np.array([min(farthest, points.edge)]))[0])
    return int(min(points.total, MOST_DRAWN, 1.1 * within + 50))


def _draw(points: Points, replicates: int, drawn: int, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Gaps x (replicates, drawn), increasing; their weights e^{x_1 − x}; what is left; and 1/w₁, the sum of both."""
    count = np.cumsum(rng.standard_exponential((replicates, drawn)), axis=1)
    if math.isfinite(points.total):
        beyond = rng.standard_gamma(points.total + 1 - drawn, replicates)
        count *= (points.total / (count[:, -1] + beyond))[:, None]
    x = points.reach(count)
    weight = np.exp(x[:, :1] - x)
    rest = _rest(points, drawn, x[:, -1], x[:, 0], rng)
    return x, weight, rest, weight.sum(axis=1) + rest[0]


def _summary(x: Array, weight: Array, rest: Array, across: Array, noise: Array) -> Array:
    """The fields of `WeightSample` (8, replicates), of keys drawn (replicates, drawn) and what is left of others."""
    mass, moment, square, _, deviation = rest
    total = weight.sum(axis=1) + mass
    keys90 = 1.0 + np.sum(np.cumsum(weight, axis=1) < 0.9 * total[:, None], axis=1)
    keys90[keys90 > x.shape[1]] = np.nan
    gap = (np.einsum("ij,ij->i", weight, x) + moment) / total
    participation = (np.einsum("ij,ij->i", weight, weight) + square) / np.square(total)
    tangential, nearest = ((weight * across).sum(axis=1) + noise) / total, x[:, 0]
    entropy = np.log(total) + gap - nearest
    return np.stack((1 / total, participation, entropy, keys90, gap, tangential, nearest, deviation / total))


def _rest(points: Points, drawn: int, last: Array, nearest: Array, rng: np.random.Generator) -> Array:
    """Sums of e, ex, e² and e²ρ² over the keys not drawn, e = e^{x_1 − x}, and the deviation of the first: 5 rows."""
    left = points.total - drawn
    if left <= 0:
        return np.zeros((5, last.size))
    end = np.minimum(last + negligible_beyond(points.a), points.edge)
    x, mass = points.between(last, end)
    # given the last key drawn, the others follow the same law beyond it; for the Poisson process the factor is one
    if math.isfinite(left):
        mass *= (left / (points.total - points.cumulative(last)))[:, None]
    weight = np.exp(nearest[:, None] - x)
    first = mass * weight
    second = first * weight
    mean, moment = first.sum(axis=1), np.einsum("ij,ij->i", first, x)
    square = second.sum(axis=1)
    # covariance of (Σe, Σex) over independent keys: second moments minus the product of means per key
    variance = square - mean * mean / left
    covariance = np.einsum("ij,ij->i", second, x) - mean * moment / left
    moment_variance = np.einsum("ij,ij,ij->i", second, x, x) - moment * moment / left
    deviation = np.sqrt(np.maximum(variance, 0))
    slope = np.divide(covariance, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    own = np.sqrt(np.maximum(moment_variance - slope * slope, 0))
    shared, apart = rng.standard_normal((2, last.size))
    across = np.einsum("ij,ij->i", second, points.tangent_square(x))
    return np.stack((mean + deviation * shared, moment + slope * shared + own * apart, square, across, deviation))


def _coordinate(shape: tuple[int, ...], tangent_dim: int, rng: np.random.Generator) -> Array:
    """One coordinate of uniform unit vectors in R^{tangent_dim}."""
    if tangent_dim == 1:
        return np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    half = (tangent_dim - 1) / 2
    return 2 * rng.beta(half, half, shape) - 1
