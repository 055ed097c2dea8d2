"""Simulation of one query's softmax weights over any number of keys, by drawing only the keys nearest to it.

Rescaled gaps x = β(1 − <q, k>) are drawn in increasing order, from ordered uniform numbers (Rényi). The total weight of
all other keys is approximated by its mean plus Gaussian noise.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from limitlens.errors import Array, InputError, check_number
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.control import check_beta, check_keys
from limitlens.theory.scaling.laws import GapLaw, PowerGap, check_dim, negligible_beyond
from limitlens.theory.scaling.points import KeyPoints, Points
from limitlens.theory.statuses import CLAIMS

MOST_DRAWN = 4096  # keys drawn one by one per replicate
_MOST_NUMBERS = 2e8  # coordinates drawn by brute force; beyond, only the nearest keys are drawn
_NEGLIGIBLE_GAP = 80.0  # a weight e^{−80} below the largest is lost in rounding, even times 1e18 keys
_CHUNK = 1 << 21  # keys held in memory
check_replicates = partial(check_number, "replicates", expected="at least 2, to have a standard error", low=2)


@dataclass(frozen=True)
class Quantity:
    """A quantity with its predicted and measured values; a prediction is None, and a measurement NaN, if unknown."""

    predicted: float | None = None
    status: Status | None = None
    predicted_stderr: float | None = None  # where the prediction is a simulation of the limit
    exact: float | None = None  # exact expectation at finite n, where `predicted` is the one in the scaling limit
    asymptotic: float | None = None  # formula for large β
    averaging: float | None = None  # formula for many keys that share the weight
    measured: Estimate = UNKNOWN  # JSON: `measured`, `stderr` and `interval`


verified = partial(Quantity, status=CLAIMS["critical_weights"].status)


def sampled(values: Array, **known: Any) -> Quantity:
    """Quantity measured as the mean of independent `values`, with standard error; not measured if one is NaN."""
    if np.isnan(values).any():
        return verified(**known)
    return verified(measured=Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))), **known)


def check_count(n: float) -> int:
    """Return a number of keys such as 1e10 as an int; raise an `InputError` if it is not whole."""
    if not check_number("n", n, "a whole number of at least 1", low=1).is_integer():
        raise InputError(f"n is {n:g}; expected a whole number")
    return int(n)


@dataclass(frozen=True)
class WeightSample:
    """Statistics of one query's softmax weights and output, with one value per simulated set of keys: (replicates,)."""

    top: Array  # the largest weight w₁
    deficit: Array  # 1 − w₁, to full relative accuracy
    participation: Array  # Σ w²
    entropy: Array  # −Σ w log w
    keys90: Array  # number of nearest keys that hold 90% of the weight; NaN where it exceeds the number drawn
    gap: Array  # Σ w x = β(1 − <q, Γ>), the output along the query
    tangential: Array  # √β times an output coordinate orthogonal to q; NaN if keys are not uniform around q
    nearest: Array  # x_1, the rescaled gap of the nearest key
    remainder: Array  # standard deviation of the approximated weight over the total; 0 where every key is drawn


def measure_weights(law: GapLaw, n: int, beta: float, replicates: int, rng: Generator) -> tuple[WeightSample, str]:
    """Simulate one query's softmax weights over n keys, and name the method: "direct" (all keys) or "nearest keys"."""
    check_replicates(replicates)
    if isinstance(law, PowerGap) and law.power == 0 and float(n) * law.dim * replicates <= _MOST_NUMBERS:
        return sample_direct(law.dim, int(n), beta, replicates, rng), "direct"
    return sample_weights(KeyPoints(law, n, beta), replicates, rng, law.tangent_dim), "nearest keys"


def sample_weights(points: Points, replicates: int, rng: Generator, tangent_dim: int | None = None) -> WeightSample:
    """Simulate one query's softmax weights over n keys (`KeyPoints`) or in the limit of many keys (`PoissonPoints`).

    `tangent_dim`, the number of directions orthogonal to the query, is None if keys are not uniform over them.
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


def sample_ordered(points: Points, ranks: int, replicates: int, rng: Generator) -> Array:
    """Simulate the largest softmax weights of one query, in decreasing order: (replicates, ranks)."""
    if not 1 <= ranks <= min(points.total, MOST_DRAWN):
        raise InputError(f"ranks is {ranks}; expected between 1 and {min(points.total, MOST_DRAWN):g}")
    drawn = max(ranks, _keys_to_draw(points))
    draws = (_draw(points, count, drawn, rng) for count in _chunks(replicates, drawn))
    return np.concatenate([weight[:, :ranks] / total[:, None] for _, weight, _, total in draws])


def sample_direct(dim: int, n: int, beta: float, replicates: int, rng: Generator) -> WeightSample:
    """Simulate one query's attention over n keys, uniform on the unit sphere S^{dim−1}, by drawing every key."""
    check_dim(dim)
    check_keys(n)
    check_beta(beta)
    check_replicates(replicates)
    parts, no_rest = [], np.zeros((5, 1))
    for _ in range(replicates):
        keys = rng.standard_normal((n, dim))
        keys /= np.sqrt(np.einsum("ij,ij->i", keys, keys))[:, None]
        keys[:, 0] -= 1
        x = beta / 2 * np.einsum("ij,ij->i", keys, keys)  # β|q − k|²/2, free of the cancellation in 1 − <q, k>
        near = np.flatnonzero(x < x.min() + _NEGLIGIBLE_GAP)
        near = near[np.argsort(x[near])][None]
        x, across = x[near], math.sqrt(beta) * keys[near, 1]
        parts.append(_summary(x, np.exp(x[:, :1] - x), no_rest, across, np.zeros(1)))
    return WeightSample(*np.concatenate(parts, axis=1))


def _chunks(replicates: int, drawn: int) -> list[int]:
    """Split `replicates` into groups that fit in memory, with `drawn` keys per replicate."""
    check_replicates(replicates)
    step = max(1, _CHUNK // drawn)
    return [min(step, replicates - start) for start in range(0, replicates, step)]


def _keys_to_draw(points: Points) -> int:
    """Number of nearest keys to draw one by one: all if there are few, else those whose softmax weight matters."""
    if points.total <= MOST_DRAWN:
        return int(points.total)
    farthest = float(points.reach(20.0)) + negligible_beyond(points.a) / 2
    within = float(points.cumulative(np.array([min(farthest, points.edge)]))[0])
    return int(min(points.total, MOST_DRAWN, 1.1 * within + 50))


def _draw(points: Points, replicates: int, drawn: int, rng: Generator) -> tuple[Array, Array, Array, Array]:
    """Draw the nearest keys: gaps x and weights e^{x_1 − x} (replicates, drawn), `_rest` of other keys, and 1/w₁."""
    count = np.cumsum(rng.standard_exponential((replicates, drawn)), axis=1)
    if math.isfinite(points.total):
        beyond = rng.standard_gamma(points.total + 1 - drawn, replicates)
        count *= (points.total / (count[:, -1] + beyond))[:, None]
    x = points.reach(count)
    weight = np.exp(x[:, :1] - x)
    rest = _rest(points, drawn, x[:, -1], x[:, 0], rng)
    return x, weight, rest, weight.sum(axis=1) + rest[0]


def _summary(x: Array, weight: Array, rest: Array, across: Array, noise: Array) -> Array:
    """Compute the fields of `WeightSample`, (9, replicates), from the drawn keys and sums over the others.

    A drawn key has a rescaled gap x, a weight e^{x_1 − x}, and a coordinate `across` orthogonal to the query. The
    others enter by `rest` (5, replicates), see `_rest`, and by `noise`, their part of the weighted sum of `across`.
    """
    mass, moment, square, _, deviation = rest
    others = weight[:, 1:].sum(axis=1) + mass
    total = 1 + others
    keys90 = 1.0 + np.sum(np.cumsum(weight, axis=1) < 0.9 * total[:, None], axis=1)
    keys90[keys90 > x.shape[1]] = np.nan
    gap = (np.einsum("ij,ij->i", weight, x) + moment) / total
    participation = (np.einsum("ij,ij->i", weight, weight) + square) / np.square(total)
    tangential, nearest = ((weight * across).sum(axis=1) + noise) / total, x[:, 0]
    entropy = np.log(total) + gap - nearest
    fields = (1 / total, others / total, participation, entropy, keys90, gap, tangential, nearest, deviation / total)
    return np.stack(fields)


def _rest(points: Points, drawn: int, last: Array, nearest: Array, rng: Generator) -> Array:
    """Approximate sums over the keys not drawn, whose rescaled gaps x exceed `last`: (5, replicates).

    With e = e^{x_1 − x} they are Σe, Σex, Σe², Σe²ρ² (ρ: rescaled distance from the query's axis), and deviation of Σe.
    """
    left = points.total - drawn
    if left <= 0:
        return np.zeros((5, last.size))
    end = np.minimum(last + negligible_beyond(points.a), points.edge)
    x, mass = points.between(last, end)
    # Given the last drawn key, the other keys follow the law beyond it; for the Poisson process the factor is 1.
    if math.isfinite(left):
        mass *= (left / (points.total - points.cumulative(last)))[:, None]
    weight = np.exp(nearest[:, None] - x)
    first = mass * weight
    second = first * weight
    mean, moment = first.sum(axis=1), np.einsum("ij,ij->i", first, x)
    square = second.sum(axis=1)
    # Covariance of (Σe, Σex) over independent keys: second moments minus the product of means per key.
    variance = square - mean * mean / left
    covariance = np.einsum("ij,ij->i", second, x) - mean * moment / left
    moment_variance = np.einsum("ij,ij,ij->i", second, x, x) - moment * moment / left
    deviation = np.sqrt(np.maximum(variance, 0))
    slope = np.divide(covariance, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    residual = np.sqrt(np.maximum(moment_variance - slope * slope, 0))
    shared, independent = rng.standard_normal((2, last.size))
    across = np.einsum("ij,ij->i", second, points.tangent_square(x))
    moment += slope * shared + residual * independent
    return np.stack((mean + deviation * shared, moment, square, across, deviation))


def _coordinate(shape: tuple[int, ...], tangent_dim: int, rng: Generator) -> Array:
    """Random numbers of the given shape, each one coordinate of a uniform unit vector in R^{tangent_dim}."""
    if tangent_dim == 1:
        return np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    half = (tangent_dim - 1) / 2
    return 2 * rng.beta(half, half, shape) - 1
