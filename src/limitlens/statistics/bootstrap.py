"""How uncertain an error curve is: over replicates and over clusters of queries, each by resampling.

Let S_cr be |error|^moment of replicate r over the queries of cluster c, and O_c the same of the output that it is
relative to: e^moment = mean S / mean O. All replicates share the queries and all queries the replicates, so that

    Var log e = V_replicates + V_clusters − V_both:

V_both, which takes every S_cr for a witness of its own, is contained in either of the others, and resampling both at
once would count it once more. Resamples of the two are added, and a linear map takes V_both out of their covariance
between sizes. Neither knows of the windows of text that made the pool: what others would change is given (`text`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from limitlens.errors import Array

BOOTSTRAP = 2000
AT_ONCE = 50  # resamples drawn at a time; a divisor of their number
MOST_KEPT = 2000  # rows up to which their resamples are kept for the next curve: 32 MB
LEVEL = 0.95
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # of its interval
LEAST = 0.25  # of the two sources that is left without what they share: an estimate of little may come out negative
_TINY = np.finfo(float).tiny


@dataclass(frozen=True, eq=False)
class TwoWayBootstrap:
    """Bootstrap over replicates and over clusters of queries, for the logarithm of an error curve."""

    error_moments: Array  # (clusters, replicates, sizes)
    outputs: Array  # (clusters, sizes), of mean 1
    moment: int
    seed: int
    text: Array  # (k, sizes): how far other windows of text would move log e, in k independent ways

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of replicates and of clusters."""
        return self.error_moments.shape[1], self.error_moments.shape[0]

    @property
    def witnesses(self) -> int:
        """How many independent ones there are at least: replicates, or clusters where these are fewer but not one."""
        replicates, clusters = self.counts
        return min(replicates, clusters) if clusters > 1 else replicates

    @cached_property
    def _influence(self) -> tuple[Array, Array, Array]:
        """How much each replicate, each cluster and each single cell moves log e: (count, sizes) each, of mean 0."""
        mean = self.error_moments.mean((0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            influence = (self.error_moments / mean - self.outputs[:, None]) / self.moment
            influence = np.where(mean > 0, influence, 0.0)
        return influence.mean(0), influence.mean(1), influence.reshape(-1, len(mean))

    @cached_property
    def _parts(self) -> tuple[Array, Array]:
        """Covariances of log e between sizes by the delta method: the sum of both sources, and of single cells."""
        over, across, cells = self._influence
        replicates, clusters = self.counts
        together = over.T @ over / max(replicates - 1, 1) / replicates
        if clusters < 2:
            return together, np.zeros_like(together)
        return together + across.T @ across / (clusters - 1) / clusters, cells.T @ cells / len(cells) ** 2

    def _kurtoses(self, weights: Array) -> list[Array]:
        """Kurtoses of weights (sizes, ...) of log e over replicates and over clusters, (...) each; 0 without any."""
        found = []
        for rows in self._influence[:2]:
            squares = np.square(rows @ weights)  # the rows are of mean 0
            variance = squares.mean(0)
            fourth = np.square(squares).mean(0)
            found.append(np.divide(fourth, variance**2, out=np.zeros_like(fourth), where=variance > 0))
        return found

    def _freedoms(self, kurtoses: list[Array]) -> list[Array]:
        """Degrees of freedom of variances over replicates and over clusters, (...) each.

        The variance of r numbers of kurtosis κ is known as well as that of 2r/(κ − 1) normal ones: where rare
        replicates or clusters carry the mean, they say less of its error than their number promises.
        """
        pairs = zip(self.counts, kurtoses, strict=True)
        return [np.fmin(count - 1, 2 * count / np.fmax(kurtosis - 1, 1)) for count, kurtosis in pairs]

    @cached_property
    def _shrink(self) -> Array:
        """T such that deviations of covariance B = V_replicates + V_clusters, times T, have what is left of V_both."""
        together, both = self._parts
        if not both.any():
            return np.eye(len(both))
        values, vectors = np.linalg.eigh(together)
        values = np.maximum(values, 1e-9 * values.max())
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
        shares, axes = np.linalg.eigh(inverse @ both @ inverse)
        left = np.sqrt(np.maximum(1 - shares, LEAST))
        return np.asarray(inverse @ (axes * left) @ axes.T @ root)

    @cached_property
    def stderr(self) -> Array:
        """Standard errors of log e, (sizes,); 0 where e is.

        With few clusters of queries they are widened such that 1.96 of them are the 95% interval.
        """
        found = np.sqrt((self._shrink * (self._parts[0] @ self._shrink)).sum(0).clip(min=0))
        if self.counts[1] > 1:
            over, across = (np.square(part).mean(0) / len(part) for part in self._influence[:2])
            found = found * student(self.freedom(np.eye(len(found)), over, across))
        return np.asarray(np.sqrt(found**2 + np.square(self.text).sum(0)))

    def deviations(self, wide: bool = False) -> tuple[Array, Array]:
        """log e of resamples less log e, over replicates and over clusters: (resamples, sizes) twice.

        A bootstrap of k rows has (k − 1)/k of the variance it should have; for intervals Student's quantile widens it.
        """
        log = self._log(self.error_moments.mean((0, 1)))
        found = self._log(_resampled(self.error_moments.mean(0), self.seed)) - log
        other = np.zeros_like(found)
        if self.counts[1] > 1:
            drawn = _resampled(np.concatenate((self.error_moments.mean(1), self.outputs), 1), self.seed + 1)
            errors, outputs = np.split(drawn, 2, axis=1)
            other = self._log(errors / np.maximum(outputs, _TINY)) - log
        factors = [math.sqrt(count / max(count - 1, 1)) for count in self.counts]
        if wide:  # by the mean kurtosis over sizes
            freedoms = self._freedoms([own.mean() for own in self._kurtoses(np.eye(len(log)))])
            factors = [factor * student(freedom) for factor, freedom in zip(factors, freedoms, strict=True)]
        return factors[0] * found @ self._shrink, factors[1] * other @ self._shrink

    def draws(self, wide: bool = False) -> Array:
        """The same of both together, and of other windows of text: (resamples, sizes)."""
        over, across = self.deviations(wide)
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0x7E87]))
        return np.asarray(over + across + generator.standard_normal((len(over), len(self.text))) @ self.text)

    def _log(self, error_moments: Array) -> Array:
        """Rows with known quantities taken out (`controls`) need not be positive, nor need resamples of a few."""
        return np.asarray(np.log(np.maximum(np.maximum(error_moments, 0) ** (1 / self.moment), _TINY)))

    def freedom(self, weights: Array, over: ArrayLike, across: ArrayLike) -> Array:
        """Degrees of freedom of a variance, a sum of two, of weights (sizes, ...) of log e, by Satterthwaite's rule."""
        first, second = self._freedoms(self._kurtoses(weights))
        below = np.square(over) / np.fmax(first, 1) + np.square(across) / np.fmax(second, 1)
        whole = np.square(np.add(over, across))
        return np.asarray(np.divide(whole, below, out=np.array(first, float), where=below > 0))


def student(freedom: float | Array) -> Any:
    """How much wider Student's quantile is than the normal one, elementwise; 1 where nothing varies."""
    upper = (1 + LEVEL) / 2
    return np.where(np.greater(freedom, 0), special.stdtrit(freedom, upper) / special.ndtri(upper), 1.0)[()]


def _resampled(rows: Array, seed: int) -> Array:
    """Means of resampled rows: (count, columns) to (resamples, columns)."""
    count = len(rows)
    kept = _resamples(count, seed) if count <= MOST_KEPT else _draw_resamples(count, seed)
    return np.concatenate([weights @ rows for weights in kept])


@lru_cache(maxsize=4)
def _resamples(count: int, seed: int) -> tuple[Array, ...]:
    """The weights of rows in every resample: many curves have as many rows."""
    return tuple(_draw_resamples(count, seed))


def _draw_resamples(count: int, seed: int) -> Iterator[Array]:
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xB007]))
    even = np.full(count, 1 / count)
    for _ in range(BOOTSTRAP // AT_ONCE):
        yield generator.multinomial(count, even, size=AT_ONCE) / count
