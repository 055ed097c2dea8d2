"""Bootstrap: resampling weights, and the uncertainty of an error curve over replicates and clusters of queries.

Let S_cr be |error|^moment of replicate r over the queries of cluster c, and O_c the same moment of the output that the
error is relative to, so that e^moment = mean S / mean O. All replicates share the queries and all queries share the
replicates, so that

    Var log e = V_replicates + V_clusters − V_both.

V_both treats every S_cr as independent. Each of the other two contains it, and resampling both at once would count it
twice. So resamples of replicates and of clusters are added, and a linear map removes V_both from their covariance
between sizes. Neither accounts for the windows of text behind the pool: their contribution is an input (`text`).
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
AT_ONCE = 50  # resamples drawn at a time; a divisor of their number
MOST_KEPT = 2000  # rows up to which their weights are cached for the next curve: 32 MB
LEVEL = 0.95
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # quantiles at the ends of the 95% interval
LEAST = 0.25  # share of a variance that stays at least after V_both is removed: the estimated rest may be negative
_TINY = np.finfo(float).tiny


def random_stream(seed: int, use: int) -> np.random.Generator:
    """Random generator of a seed for one `use`: each use of a seed has a stream of its own."""
    return np.random.default_rng(np.random.SeedSequence([seed, use]))


def resample_counts(generator: np.random.Generator, items: int, resamples: int) -> NDArray[np.int64]:
    """How often each item occurs in each bootstrap resample, (resamples, items): multinomial with equal chances."""
    return generator.multinomial(items, np.full(items, 1 / items), size=resamples)


def two_way_weights(
    generator: np.random.Generator, replicates: int, clusters: int, resamples: int
) -> tuple[Array, Array]:
    """Weights of cells, (resamples, replicates · clusters), and of clusters, (resamples, clusters), resampled at once.

    The weight of a cell is the product of the weights of its replicate and of its cluster; each row sums to 1.
    """
    rows, columns = (resample_counts(generator, count, resamples) / count for count in (replicates, clusters))
    return (rows[:, :, None] * columns[:, None]).reshape(resamples, -1), columns


@dataclass(frozen=True, eq=False)
class TwoWayBootstrap:
    """Bootstrap over replicates and over clusters of queries, for the logarithm of an error curve."""

    error_moments: Array  # (clusters, replicates, sizes)
    outputs: Array  # (clusters, sizes), of mean 1
    moment: int
    seed: int
    text: Array  # (k, sizes): changes of log e by other windows of text, along k independent directions

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of replicates and of clusters."""
        return self.error_moments.shape[1], self.error_moments.shape[0]

    @property
    def independent(self) -> int:
        """Smallest number of independent samples: of replicates, or of clusters where these are fewer but not one."""
        replicates, clusters = self.counts
        return min(replicates, clusters) if clusters > 1 else replicates

    @cached_property
    def _influence(self) -> tuple[Array, Array, Array]:
        """Influence of each replicate, each cluster and each cell on log e: (count, sizes) each, of mean 0."""
        mean = self.error_moments.mean((0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            influence = (self.error_moments / mean - self.outputs[:, None]) / self.moment
            influence = np.where(mean > 0, influence, 0.0)
        return influence.mean(0), influence.mean(1), influence.reshape(-1, len(mean))

    @cached_property
    def _covariances(self) -> tuple[Array, Array]:
        """Covariances of log e between sizes by the delta method: V_replicates + V_clusters, and V_both."""
        by_replicate, by_cluster, by_cell = self._influence
        replicates, clusters = self.counts
        total = by_replicate.T @ by_replicate / max(replicates - 1, 1) / replicates
        if clusters < 2:
            return total, np.zeros_like(total)
        total = total + by_cluster.T @ by_cluster / (clusters - 1) / clusters
        return total, by_cell.T @ by_cell / len(by_cell) ** 2

    def _kurtoses(self, weights: Array) -> list[Array]:
        """Kurtoses over replicates and over clusters of weights (sizes, ...) of log e, (...) each; 0 if none varies."""
        found = []
        for rows in self._influence[:2]:
            squares = np.square(rows @ weights)  # the rows have mean 0
            variance = squares.mean(0)
            fourth = np.square(squares).mean(0)
            found.append(np.divide(fourth, variance**2, out=np.zeros_like(fourth), where=variance > 0))
        return found

    def _degrees(self, kurtoses: list[Array]) -> list[Array]:
        """Degrees of freedom of variances over replicates and over clusters, (...) each.

        The variance of r numbers of kurtosis κ is known as well as that of 2r/(κ − 1) normal ones: where rare
        replicates or clusters carry the mean, the effective number is smaller than their count.
        """
        pairs = zip(self.counts, kurtoses, strict=True)
        return [np.fmin(count - 1, 2 * count / np.fmax(kurtosis - 1, 1)) for count, kurtosis in pairs]

    @cached_property
    def _shrink(self) -> Array:
        """Matrix T such that deviations with covariance V_replicates + V_clusters, times T, have V_both removed."""
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
        """Standard errors of log e, (sizes,); 0 where e is 0.

        With few clusters of queries they are widened such that ±1.96 of them is the 95% interval.
        """
        stderr = np.sqrt((self._shrink * (self._covariances[0] @ self._shrink)).sum(0).clip(min=0))
        if self.counts[1] > 1:
            variances = (np.square(part).mean(0) / len(part) for part in self._influence[:2])
            stderr = stderr * student_factor(self.degrees_of_freedom(np.eye(len(stderr)), *variances))
        return np.asarray(np.sqrt(stderr**2 + np.square(self.text).sum(0)))

    def deviations(self, wide: bool = False) -> tuple[Array, Array]:
        """Deviations of log e in resamples of replicates and in resamples of clusters: (resamples, sizes) twice.

        A bootstrap of k rows has (k − 1)/k of the variance it should have, which is corrected here. For intervals
        (`wide`) Student's quantile widens the deviations.
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
            degrees = self._degrees([kurtosis.mean() for kurtosis in self._kurtoses(np.eye(len(log)))])
            factors = [factor * student_factor(freedom) for factor, freedom in zip(factors, degrees, strict=True)]
        return factors[0] * over_replicates @ self._shrink, factors[1] * over_clusters @ self._shrink

    def draws(self, wide: bool = False) -> Array:
        """Deviations of log e from all sources (replicates, clusters, windows of text) together: (resamples, sizes)."""
        over_replicates, over_clusters = self.deviations(wide)
        normal = random_stream(self.seed, 0x7E87).standard_normal((len(over_replicates), len(self.text)))
        return np.asarray(over_replicates + over_clusters + normal @ self.text)

    def _log(self, moments: Array) -> Array:
        """log e of mean moments, which need not be positive after control variates or in resamples of a few rows."""
        return np.asarray(np.log(np.maximum(np.maximum(moments, 0) ** (1 / self.moment), _TINY)))

    def degrees_of_freedom(self, weights: Array, over_replicates: ArrayLike, over_clusters: ArrayLike) -> Array:
        """Degrees of freedom (Satterthwaite) of the variance of weights (sizes, ...) of log e, a sum of two parts."""
        first, second = self._degrees(self._kurtoses(weights))
        below = np.square(over_replicates) / np.fmax(first, 1) + np.square(over_clusters) / np.fmax(second, 1)
        total = np.square(np.add(over_replicates, over_clusters))
        return np.asarray(np.divide(total, below, out=np.array(first, float), where=below > 0))


def student_factor(freedom: float | Array) -> Any:
    """Student's 97.5% quantile over the normal one, elementwise; 1 without any degree of freedom."""
    upper = ENDS[1]
    return np.where(np.greater(freedom, 0), special.stdtrit(freedom, upper) / special.ndtri(upper), 1.0)[()]


def _resampled_means(rows: Array, seed: int) -> Array:
    """Means of resampled rows: (count, columns) to (resamples, columns)."""
    count = len(rows)
    batches = _cached_weights(count, seed) if count <= MOST_KEPT else _draw_weights(count, seed)
    return np.concatenate([weights @ rows for weights in batches])


@lru_cache(maxsize=4)
def _cached_weights(count: int, seed: int) -> tuple[Array, ...]:
    """Weights of all resamples, cached because many curves have the same number of rows."""
    return tuple(_draw_weights(count, seed))


def _draw_weights(count: int, seed: int) -> Iterator[Array]:
    """Weights of the rows in batches of resamples, (AT_ONCE, count) each."""
    generator = random_stream(seed, 0xB007)
    for _ in range(BOOTSTRAP // AT_ONCE):
        yield resample_counts(generator, count, AT_ONCE) / count
