"""Errors predicted from a pilot sample at any size n, with resamples of the pilot's queries and tokens.

The expected squared errors (`theory.exact_bootstrap`) are exact for the pilot's own tokens. What is uncertain is which
queries and which tokens the pilot holds. Clusters of queries are resampled. The part of the tokens is estimated from
halves of the pilot, split in three ways. At n beyond the pilot's M tokens the pilot itself has not converged: twice the
difference between M and M/2 tokens is added (the bias falls like 1/√M or faster) and counted as uncertain. A pilot of
few windows of text also lacks the variation between windows, which is much the same at every n: there the halves are
made of whole windows, and the mean of their difference is added at every n.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array
from limitlens.statistics.bootstrap import ENDS, random_stream, resample_counts, student_factor
from limitlens.statistics.crossing import between
from limitlens.statistics.fit import Rate
from limitlens.theory.exact_bootstrap import BY_QUARTERS, PilotErrors

DRAWS = 200  # resamples
DRIFT = 2.0  # multiple of log e(M tokens) − log e(M/2 tokens) that is added beyond the pilot
WIDEST = math.log(2)  # half-width of an interval of log e from which on the prediction is not used
_TINY = np.finfo(float).tiny


@lru_cache(maxsize=8)
def _draws(clusters: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """How often each resample holds each cluster, and Gaussian noise for the tokens: the same for all heads."""
    generator = random_stream(seed, 0xF0E5)
    counts = resample_counts(generator, clusters, DRAWS)
    return counts, generator.standard_normal((DRAWS, 1 + BY_QUARTERS))


@dataclass(frozen=True, eq=False)
class PredictedErrors:
    """Relative errors predicted at sizes (K,): their logarithms (1 + draws, K), the prediction first."""

    sizes: Array
    logs: Array
    # (3, K): shifts of the logarithms by each split of the pilot's text into halves, beyond those of its tokens; 1.96
    # times the root of the sum of their squares is the half-width of the 95% interval
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))

    @classmethod
    def of(
        cls, sizes: Array, found: PilotErrors, clusters: Any, tokens: int, seed: int, windows: bool = False
    ) -> list[Self]:
        """Predictions of one or more heads from the expected squares of their queries, head after head.

        `clusters` (m,) groups the queries of each head, `tokens` is the size of the pilot; `windows` says that the
        pilot has few windows of text, and that its quarters are made of whole ones.
        """
        labels, inverse = np.unique(clusters, return_inverse=True)
        counts, noise = _draws(len(labels), seed)
        widening = math.sqrt(len(labels) / max(len(labels) - 1, 1))
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
            logs[:, 1:] = logs[:, :1] + widening * (logs[:, 1:] - logs[:, :1])
            level, times = np.zeros((len(drift), 1)), DRIFT
            if windows:  # at larger n a half repeats its own tokens, so only small n show the variation of windows
                level, times = drift[:, n <= max(tokens / 6, n[0])].mean(1, keepdims=True), 1.0
            beyond = level + np.where(n >= tokens, times * np.maximum(drift - level, 0.0), 0.0)
            # The differences of the splits are independent and few, hence Student's factor.
            apart, tokens_apart = (
                np.moveaxis(
                    student_factor(split.shape[1]) * (split[0] - split[1]) / 2 / math.sqrt(split.shape[1]), 1, 0
                )
                for split in (by_quarters, by_tokens)
            )
            least = np.maximum(np.square(apart).sum((1, 2)), _TINY)
            more = np.maximum(1 - np.square(tokens_apart).sum((1, 2)) / least, 0.0)
            logs[:, 1:] += noise[:, 1:] @ apart + noise[:, :1] * beyond[:, None]
        predicted = (logs + beyond[:, None]).astype(np.float32)
        return [cls(n, *one) for one in zip(predicted, np.sqrt(more)[:, None, None] * apart, strict=True)]

    @property
    def defined(self) -> bool:
        """Whether there is an error at every size."""
        return bool(np.isfinite(self.logs).all())

    def at(self, n: Any) -> Array:
        """log e at sizes n within the predicted ones, a power law between them: (1 + draws, len(n))."""
        return between(np.log(self.sizes), self.logs.astype(float), np.log(np.asarray(n, dtype=float)))

    def text_shifts(self, n: Any) -> Array:
        """Shifts of log e at sizes n if the windows of text were others, (3, len(n))."""
        return between(np.log(self.sizes), self.text, np.log(np.asarray(n, dtype=float)))

    def error(self, n: Any) -> Array:
        """The error at sizes n and the ends of its 95% interval: (3, len(n))."""
        logs = self.at(n)
        return np.asarray(np.exp(np.vstack((logs[0], *np.quantile(logs[1:], ENDS, axis=0)))))

    def rate(self, n: Any) -> Rate:
        """The rate through the predicted errors at sizes n, by least squares; no law is judged."""
        x = np.log(np.asarray(n, dtype=float))
        logs, centred = self.at(n), x - x.mean()
        slopes = -(logs @ centred) / (centred @ centred)
        low, high = np.quantile(slopes[1:], ENDS).tolist()
        constant = float(np.exp(logs[0].mean() + slopes[0] * x.mean()))
        stderr = float(slopes[1:].std(ddof=1))
        return Rate(float(slopes[0]), stderr, (low, high), constant, 0.0, math.nan, math.nan, tuple(map(int, n)))
