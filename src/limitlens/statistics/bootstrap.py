"""Bootstrap uncertainty of an error curve, over replicates (samples of tokens) and over clusters of queries.

A cluster is the queries from one window of text. All replicates share the queries, so the relative error e has

    Var log e = V_replicates + V_clusters − V_both,

where V_both treats each pair of replicate and cluster as independent. Both other terms contain it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from limitlens.errors import Array

BOOTSTRAP = 2000
AT_ONCE = 50  # resamples drawn at a time; a divisor of `BOOTSTRAP`
MOST_KEPT = 2000  # largest number of rows whose resampling weights are cached for the next curve: 32 MB
LEVEL = 0.95
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # quantiles at the ends of the 95% interval
LEAST = 0.25  # smallest share of a variance left after V_both is removed: the estimated rest may be negative
_TINY = np.finfo(float).tiny


def random_stream(seed: int, use: int) -> np.random.Generator:
    """Random generator for one purpose, numbered `use`, independent of other purposes with the same seed."""
    return np.random.default_rng(np.random.SeedSequence([seed, use]))


def resample_counts(generator: np.random.Generator, items: int, resamples: int) -> NDArray[np.int64]:
    """How often each item occurs in each bootstrap resample: (resamples, items)."""
    return generator.multinomial(items, np.full(items, 1 / items), size=resamples)


@dataclass(frozen=True, eq=False)
class TwoWayBootstrap:
    """Bootstrap of log e over replicates and over clusters of queries (windows of text), for errors e at several sizes.

    The error e at each size is (mean of `error_moments` / mean of `outputs`)^(1/moment).
    """

    error_moments: Array  # (clusters, replicates, sizes): means of |error|^moment over the queries of a cluster
    outputs: Array  # (clusters, sizes): means of |limit|^moment, divided by their mean over clusters
    moment: int
    seed: int
    text: Array  # (k, sizes): changes of log e by other windows of text that count, along k independent directions

    @property
    def counts(self) -> tuple[int, int]:
        """Number of replicates and number of clusters of queries."""
        return self.error_moments.shape[1], self.error_moments.shape[0]

    @cached_property
    def _influence(self) -> tuple[Array, Array, Array]:
        """Influence on log e, of mean 0, of each replicate, each cluster and each pair of both: (count, sizes) each."""
        mean = self.error_moments.mean((0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            influence = (self.error_moments / mean - self.outputs[:, None]) / self.moment
            influence = np.where(mean > 0, influence, 0.0)
        return influence.mean(0), influence.mean(1), influence.reshape(-1, len(mean))

    @cached_property
    def _covariances(self) -> tuple[Array, Array]:
        """Covariances of log e between sizes (delta method): V_replicates + V_clusters, and V_both."""
        by_replicate, by_cluster, by_cell = self._influence
        replicates, clusters = self.counts
        total = by_replicate.T @ by_replicate / max(replicates - 1, 1) / replicates
        if clusters < 2:
            return total, np.zeros_like(total)
        total = total + by_cluster.T @ by_cluster / (clusters - 1) / clusters
        return total, by_cell.T @ by_cell / len(by_cell) ** 2

    def _degrees(self, weights: Array, *, one: bool = False) -> list[Array]:
        """Degrees of freedom of the variance of log e times `weights` (sizes, ...), over replicates and over clusters.

        For r numbers of kurtosis κ they are 2r/(κ − 1), at most r − 1. With `one`, all columns share the mean κ.
        """
        found = []
        for count, rows in zip(self.counts, self._influence, strict=False):
            squares = np.square(rows @ weights)  # the rows have mean 0
            variance = squares.mean(0)
            fourth = np.square(squares).mean(0)
            kurtosis = np.divide(fourth, variance**2, out=np.zeros_like(fourth), where=variance > 0)
            kurtosis = kurtosis.mean() if one else kurtosis
            found.append(np.fmin(count - 1, 2 * count / np.fmax(kurtosis - 1, 1)))
        return found

    @cached_property
    def _shrink(self) -> Array:
        """Matrix T (sizes, sizes) that removes V_both: if deviations x have covariance V, then x T has V − V_both."""
        total, both = self._covariances
        if not both.any():
            return np.eye(len(both))
        values, vectors = np.linalg.eigh(total)
        values = np.maximum(values, 1e-9 * values.max())
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
        shares, axes = np.linalg.eigh(inverse @ both @ inverse)
        left = np.sqrt(np.maximum(1 - shares, LEAST))
        return np.asarray(inverse @ (axes * left) @ axes.T @ root)

    @cached_property
    def stderr(self) -> Array:
        """Standard errors of log e, (sizes,); with several clusters widened so that ±1.96 of them is a 95% interval."""
        stderr = np.sqrt((self._shrink * (self._covariances[0] @ self._shrink)).sum(0).clip(min=0))
        if self.counts[1] > 1:
            variances = (np.square(part).mean(0) / len(part) for part in self._influence[:2])
            stderr = stderr * student_factor(self.degrees_of_freedom(np.eye(len(stderr)), *variances))
        return np.asarray(np.sqrt(stderr**2 + np.square(self.text).sum(0)))

    def deviations(self, wide: bool = False) -> tuple[Array, Array]:
        """Deviations of log e from its estimate in resamples of replicates, and of clusters: (resamples, sizes) each.

        With `wide`, for intervals, they are multiplied by the factor of Student's law over the normal law.
        """
        log = self._log(self.error_moments.mean((0, 1)))
        over_replicates = self._log(_resampled_means(self.error_moments.mean(0), self.seed)) - log
        over_clusters = np.zeros_like(over_replicates)
        if self.counts[1] > 1:
            rows = np.concatenate((self.error_moments.mean(1), self.outputs), 1)
            errors, outputs = np.split(_resampled_means(rows, self.seed + 1), 2, axis=1)
            over_clusters = self._log(errors / np.maximum(outputs, _TINY)) - log
        factors = [math.sqrt(count / max(count - 1, 1)) for count in self.counts]
        if wide:  # by the mean kurtosis over sizes
            degrees = self._degrees(np.eye(len(log)), one=True)
            factors = [factor * student_factor(freedom) for factor, freedom in zip(factors, degrees, strict=True)]
        return factors[0] * over_replicates @ self._shrink, factors[1] * over_clusters @ self._shrink

    def draws(self, wide: bool = False) -> Array:
        """Random deviations of log e due to replicates, clusters of queries and windows of text: (resamples, sizes)."""
        over_replicates, over_clusters = self.deviations(wide)
        normal = random_stream(self.seed, 0x7E87).standard_normal((len(over_replicates), len(self.text)))
        return np.asarray(over_replicates + over_clusters + normal @ self.text)

    def _log(self, moments: Array) -> Array:
        """Logarithm of the error from means of |error|^moment; control variates can make means negative (then tiny)."""
        return np.asarray(np.log(np.maximum(np.maximum(moments, 0) ** (1 / self.moment), _TINY)))

    def degrees_of_freedom(self, weights: Array, over_replicates: ArrayLike, over_clusters: ArrayLike) -> Array:
        """Satterthwaite's degrees of freedom (...) of the variance of a linear combination of log e.

        `weights` (sizes, ...) are its coefficients. Its variance is the sum of `over_replicates` and `over_clusters`.
        """
        first, second = self._degrees(weights)
        below = np.square(over_replicates) / np.fmax(first, 1) + np.square(over_clusters) / np.fmax(second, 1)
        total = np.square(np.add(over_replicates, over_clusters))
        return np.asarray(np.divide(total, below, out=np.array(first, float), where=below > 0))


def student_factor(freedom: float | Array) -> Any:
    """Student's 97.5% quantile over the normal one, for each number of degrees of freedom; 1 if that number is 0."""
    upper = ENDS[1]
    return np.where(np.greater(freedom, 0), special.stdtrit(freedom, upper) / special.ndtri(upper), 1.0)[()]


def _resampled_means(rows: Array, seed: int) -> Array:
    """Means (resamples, columns) of rows (count, columns) in each bootstrap resample of the rows."""
    count = len(rows)
    batches = _cached_weights(count, seed) if count <= MOST_KEPT else _draw_weights(count, seed)
    return np.concatenate([weights @ rows for weights in batches])


@lru_cache(maxsize=4)  # many curves have equally many rows
def _cached_weights(count: int, seed: int) -> tuple[Array, ...]:
    return tuple(_draw_weights(count, seed))


def _draw_weights(count: int, seed: int) -> Iterator[Array]:
    """Bootstrap weights of `count` rows, in batches of resamples (AT_ONCE, count)."""
    generator = random_stream(seed, 0xB007)
    for _ in range(BOOTSTRAP // AT_ONCE):
        yield resample_counts(generator, count, AT_ONCE) / count
