"""What a pilot foretells of an error curve, at sizes of its own, with resamples of its queries and of its tokens.

The law behind it (`pilot_errors`) is exact for the pilot's own tokens. What is uncertain is which queries and which
tokens those were: clusters of queries are resampled, and the tokens' part is read off the halves of the pilot, in three
ways to halve its text. At n beyond the pilot it has not converged itself; M tokens against M/2 say by how much, and
twice their difference is added (the bias falls like 1/√M or faster) and counted as uncertain. A pilot of few windows of
text lacks what differs between windows, much the same at any n: there halves are of windows, and the mean of their
difference is added at every n.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array
from limitlens.statistics.bootstrap import ENDS, random_stream, resample_counts, student_factor
from limitlens.statistics.crossing import between, crossing
from limitlens.theory.exact_bootstrap import BY_QUARTERS, PilotErrors

DRAWS = 200
DRIFT = 2.0  # times the logarithm of M tokens over M/2
WIDEST = math.log(2)  # half-width of an interval of log e, beyond which it says nothing
_TINY = np.finfo(float).tiny


@lru_cache(maxsize=8)
def _draws(clusters: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """How often each cluster is drawn, and how far the tokens go in each of their ways: the same for all heads."""
    generator = random_stream(seed, 0xF0E5)
    counts = resample_counts(generator, clusters, DRAWS)
    return counts, generator.standard_normal((DRAWS, 1 + BY_QUARTERS))


@dataclass(frozen=True, eq=False)
class Foresight:
    """Relative errors foretold at sizes (K,): their logarithms (1 + draws, K), the prediction first."""

    sizes: Array
    logs: Array
    # (3, K): how far each halving by quarters of the pilot, whole windows of its text, moves the logarithms beyond what
    # its tokens do, such that 1.96 root sums of their squares are the 95% interval
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))

    @classmethod
    def of(
        cls, sizes: Array, found: PilotErrors, clusters: Any, tokens: int, seed: int, windows: bool = False
    ) -> list[Self]:
        """For one head or more, from the expected squares of their queries, head after head, in clusters (m,) of each.

        The pilot has so many tokens; `windows` says that it is of few windows of text, and its quarters are of whole
        ones.
        """
        labels, inverse = np.unique(clusters, return_inverse=True)
        counts, noise = _draws(len(labels), seed)
        few = math.sqrt(len(labels) / max(len(labels) - 1, 1))
        n = np.asarray(sizes, dtype=float)
        share = np.vstack((np.ones(len(inverse)), counts[:, inverse]))
        error, output, all_drawn, halves, half_outputs = (
            part.reshape(*part.shape[:-2], -1, len(inverse), len(n))
            for part in (found.error, found.output, found.whole, found.halves, found.half_outputs)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = 0.5 * np.log(np.maximum(share @ error, _TINY) / (share @ output))  # (heads, 1 + draws, K)
            half = 0.5 * np.log(np.maximum(halves.mean(-2), _TINY) / half_outputs.mean(-2))  # (2, 6, heads, K)
            whole = 0.5 * np.log(np.maximum(all_drawn.mean(-2), _TINY) / output.mean(-2))  # (heads, K)
            by_quarters, by_tokens = np.split(half, [BY_QUARTERS], 1)
            drift = whole - (by_quarters if windows else by_tokens).mean((0, 1))
            logs[:, 1:] = logs[:, :1] + few * (logs[:, 1:] - logs[:, :1])
            level, times = np.zeros((len(drift), 1)), DRIFT
            if windows:  # at larger n a half repeats its own tokens, which is another matter
                level, times = drift[:, n <= max(tokens / 6, n[0])].mean(1, keepdims=True), 1.0
            beyond = level + np.where(n >= tokens, times * np.maximum(drift - level, 0.0), 0.0)
            # The differences of the halvings are independent, and few.
            apart, tokens_apart = (
                np.moveaxis(student_factor(way.shape[1]) * (way[0] - way[1]) / 2 / math.sqrt(way.shape[1]), 1, 0)
                for way in (by_quarters, by_tokens)
            )
            least = np.maximum(np.square(apart).sum((1, 2)), _TINY)
            more = np.maximum(1 - np.square(tokens_apart).sum((1, 2)) / least, 0.0)
            logs[:, 1:] += noise[:, 1:] @ apart + noise[:, :1] * beyond[:, None]
        told = (logs + beyond[:, None]).astype(np.float32)
        return [cls(n, *one) for one in zip(told, np.sqrt(more)[:, None, None] * apart, strict=True)]

    @property
    def defined(self) -> bool:
        """Whether there is an error at every size."""
        return bool(np.isfinite(self.logs).all())

    def at(self, n: Any) -> Array:
        """log e at sizes n within the foretold ones, a power law between them: (1 + draws, len(n))."""
        return between(np.log(self.sizes), self.logs.astype(float), np.log(np.asarray(n, dtype=float)))

    def moved(self, n: Any) -> Array:
        """How far other windows of text would move log e at sizes n, (3, len(n))."""
        return between(np.log(self.sizes), self.text, np.log(np.asarray(n, dtype=float)))

    def error(self, n: Any) -> Array:
        """The error at sizes n with the ends of its 95% interval: (3, len(n))."""
        logs = self.at(n)
        return np.asarray(np.exp(np.vstack((logs[0], *np.quantile(logs[1:], ENDS, axis=0)))))

    def slope(self, n: Any) -> tuple[float, float, float]:
        """The rate through the errors at sizes n, by least squares, with the ends of its 95% interval."""
        x = np.log(np.asarray(n, dtype=float))
        x = x - x.mean()
        slopes = -(self.at(n) @ x) / (x @ x)
        low, high = np.quantile(slopes[1:], ENDS)
        return float(slopes[0]), float(low), float(high)

    def crossed(self, error: float, context: float = math.inf) -> Array:
        """n(ε) of the prediction and of its resamples: (1 + draws,), infinite where no foretold size is enough."""
        return crossing(np.log(self.sizes), self.logs.astype(float), math.log(error), math.log(context), reach=1.0)
