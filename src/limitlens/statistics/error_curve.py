"""Error curves: the error of attention over n tokens relative to its infinite-token limit, at nested sizes n.

`ErrorCurve` gives the error at each size, the rate of its decay, and the number n(ε) of tokens needed for an error ε.
Intervals come from resampling whole replicates, because their sizes are nested, and clusters of queries, which all
replicates share. Errors predicted from a few tokens (`PredictedErrors`) extend a measured curve or replace it.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from limitlens.errors import Array, InputError
from limitlens.statistics.bootstrap import ENDS, TwoWayBootstrap, random_stream, resample_counts, student_factor
from limitlens.statistics.fit import Rate, fit_rate
from limitlens.statistics.tokens_for import BEYOND, LINE_SIZES, TokensFor, between, crossing, power_law, whole
from limitlens.theory.exact_bootstrap import BY_QUARTERS, PilotErrors

FLOOR_MARGIN = 10  # errors below this many numerical floors are neither fitted nor used for n(ε)
DRAWS = 200  # resamples of a prediction
DRIFT = 2.0  # multiple of log e(M tokens) − log e(M/2 tokens) that is added to a prediction beyond the pilot
WIDEST = math.log(2)  # half-width of an interval of log e from which on a prediction is not used
_TINY = np.finfo(float).tiny


@lru_cache(maxsize=8)
def _draws(clusters: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """Counts (DRAWS, clusters) of each query cluster in each resample, and Gaussian noise; cached for all heads."""
    generator = random_stream(seed, 0xF0E5)
    counts = resample_counts(generator, clusters, DRAWS)
    return counts, generator.standard_normal((DRAWS, 1 + BY_QUARTERS))


def _half_difference(halves: Array) -> Array:
    """Standard shifts (heads, splits, K) of log e, from its values in halves of few splits, (2, splits, heads, K)."""
    splits = halves.shape[1]
    return np.asarray(student_factor(splits) * (halves[0] - halves[1]) / 2 / math.sqrt(splits)).swapaxes(0, 1)


@dataclass(frozen=True, eq=False)
class PredictedErrors:
    """Relative errors at K sizes, predicted from a few tokens (the pilot): logarithms of prediction and resamples.

    The expected squared errors (`theory.exact_bootstrap`) are exact for the pilot's own tokens. They are uncertain
    because the pilot's queries and tokens are random: clusters of queries are resampled, and halves of the tokens,
    split in three ways, are compared. At n beyond the pilot's M tokens the pilot itself has not converged: twice the
    difference between M and M/2 tokens is added to log e (the bias falls like 1/√M or faster) and counted as uncertain.
    A pilot of few windows of text also lacks the variation between windows, nearly equal at every n: the halves then
    consist of whole windows, and the mean of their difference is added at every n.
    """

    sizes: Array
    logs: Array  # (1 + draws, K), the prediction first
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))  # (3, K): standard shifts of `logs` by other texts

    @classmethod
    def of(
        cls, sizes: Array, found: PilotErrors, clusters: Any, tokens: int, seed: int, windows: bool = False
    ) -> list[Self]:
        """Predicted errors of one or more heads, from the expected squared errors of their queries, head after head.

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
            apart, tokens_apart = _half_difference(by_quarters), _half_difference(by_tokens)
            least = np.maximum(np.square(apart).sum((1, 2)), _TINY)
            more = np.maximum(1 - np.square(tokens_apart).sum((1, 2)) / least, 0.0)
            logs[:, 1:] += noise[:, 1:] @ apart + noise[:, :1] * beyond[:, None]
        predicted = (logs + beyond[:, None]).astype(np.float32)
        return [cls(n, *one) for one in zip(predicted, np.sqrt(more)[:, None, None] * apart, strict=True)]

    @property
    def defined(self) -> bool:
        """Whether the predicted relative error is a finite number at every size."""
        return bool(np.isfinite(self.logs).all())

    def at(self, n: Any) -> Array:
        """Logarithm of the predicted error and of its resamples at sizes n, interpolated: (1 + draws, len(n))."""
        return between(np.log(self.sizes), self.logs.astype(float), np.log(np.asarray(n, dtype=float)))

    def text_shifts(self, n: Any) -> Array:
        """Standard shifts of log e at sizes n by other windows of text, in three directions: (3, len(n))."""
        return between(np.log(self.sizes), self.text, np.log(np.asarray(n, dtype=float)))

    def rate(self, n: Any) -> Rate:
        """Rate (exponent) of the power law through the predicted errors at sizes n; no other law is compared."""
        x = np.log(np.asarray(n, dtype=float))
        logs, centred = self.at(n), x - x.mean()
        slopes = -(logs @ centred) / (centred @ centred)
        low, high = np.quantile(slopes[1:], ENDS).tolist()
        constant = float(np.exp(logs[0].mean() + slopes[0] * x.mean()))
        stderr = float(slopes[1:].std(ddof=1))
        return Rate(float(slopes[0]), stderr, (low, high), constant, 0.0, math.nan, math.nan, tuple(map(int, n)))


@dataclass(frozen=True, eq=False, repr=False)
class ErrorCurve:
    """Error of attention over n tokens at nested sizes n₁ < n₂ < …, from replicates and clusters of queries.

    `error_moments` are |error|^moment as measured, averaged over the queries of each cluster (a window of text; a
    study has one cluster) such that the mean over clusters is the mean over queries; control variates may make entries
    negative. `outputs` are |output|^moment of the limit averaged in the same way and divided by their mean over
    clusters: the choice of queries moves both.
    """

    sizes: tuple[int, ...]
    error_moments: Array  # (clusters, replicates, sizes)
    outputs: Array = field(default_factory=lambda: np.ones((1, 1)))  # (clusters, sizes)
    moment: int = 2  # 1 for E|error|, 2 for the root mean square error; their exponents can differ
    # measured error over true error, (sizes,): √(1 − n/N) where the reference is attention over N tokens
    finite_population_correction: Array = field(default_factory=lambda: np.ones(1))
    floor: Array = field(default_factory=lambda: np.zeros(1))  # numerical error, (sizes,); 0 for float64
    min_snr: float = 0.0  # an error below this many standard errors counts as noise: not fitted, not used for n(ε)
    seed: int = 0
    # (k, sizes): changes of log e if other windows of text had been read, in k independent directions
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))
    prediction: PredictedErrors | None = None  # errors outside the sizes measured; without it, a power law

    @classmethod
    def of(cls, sizes: Any, rows: Array, **known: Any) -> Self:
        """Error curve with one cluster of queries, from |error|^moment of each replicate (replicates, sizes)."""
        return cls(tuple(int(size) for size in sizes), np.asarray(rows, dtype=float)[None], **known)

    @classmethod
    def predicted(cls, sizes: Any, prediction: PredictedErrors, seed: int = 0) -> Self:
        """Error curve at the sizes from a prediction alone, without measured replicates."""
        return cls(tuple(int(n) for n in sizes), np.empty((1, 0, len(sizes))), prediction=prediction, seed=seed)

    @property
    def measured(self) -> bool:
        """Whether the errors were measured on replicates, not predicted."""
        return self._prediction_alone is None

    @property
    def _prediction_alone(self) -> PredictedErrors | None:
        return None if self.replicates else self.prediction

    def scaled(self, scale: float) -> Self:
        """This curve with all errors divided by `scale`; NaN everywhere if `scale` is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = 1 / np.float64(scale) if scale else np.nan
        if (alone := self._prediction_alone) is not None:
            return replace(self, prediction=replace(alone, logs=alone.logs + np.log(factor)))
        return replace(self, error_moments=self.error_moments * factor**self.moment, floor=self.floor * factor)

    @cached_property
    def rows(self) -> Array:
        """Mean |error|^moment of each replicate (replicates, sizes), corrected for a finite reference sample."""
        return np.asarray(self.error_moments.mean(0) / self.finite_population_correction**self.moment)

    @property
    def replicates(self) -> int:
        """Number of replicates (independent samples) in the measured errors; 0 for a predicted curve."""
        return int(self.error_moments.shape[1])

    @cached_property
    def _bootstrap(self) -> TwoWayBootstrap:
        error_moments = np.asarray(self.error_moments / self.finite_population_correction**self.moment)
        outputs = np.broadcast_to(self.outputs, (len(error_moments), len(self.sizes)))
        text = np.broadcast_to(self.text, (len(self.text), len(self.sizes)))
        return TwoWayBootstrap(error_moments, outputs, self.moment, self.seed, text)

    @cached_property
    def error(self) -> Array:
        """Error of attention over n tokens at each size n, (sizes,)."""
        if not self.measured:
            return np.asarray(np.exp(self._line[1][0]))
        return np.asarray(np.maximum(self.rows.mean(0), 0) ** (1 / self.moment))

    @cached_property
    def stderr(self) -> Array:
        """Standard error of the error at each size, over replicates, clusters of queries and windows of text."""
        if not self.measured:
            return np.asarray(self.error * self._line[1][1:].std(0, ddof=1))
        return np.asarray(self.error * self._bootstrap.stderr)

    @cached_property
    def interval(self) -> Array:
        """Lower and upper ends of the 95% interval of the error at each size, (2, sizes)."""
        if not self.measured:
            return np.asarray(np.exp(np.quantile(self._line[1][1:], ENDS, axis=0)))
        # An end at zero has no place on a logarithmic axis: it stays above 5% of the error.
        half = 1.96 * self.stderr
        return np.stack((np.maximum(self.error - half, 0.05 * self.error), self.error + half))

    @property
    def defined(self) -> bool:
        """Whether the error is a finite number at every size; a relative error is not where the limit is 0."""
        alone = self._prediction_alone
        return bool(np.isfinite(self.rows).all()) if alone is None else alone.defined

    @cached_property
    def usable(self) -> Any:
        """Whether the error at each size is far enough above numerical error and noise to be fitted: (sizes,) bool."""
        far = self.error > FLOOR_MARGIN * np.broadcast_to(self.floor, len(self.sizes))
        return far & (self.error > self.min_snr * self.stderr) if self.min_snr else far

    @property
    def _fits_line(self) -> bool:
        """Whether enough sizes have usable errors to interpolate and extrapolate the curve."""
        return self.defined and (not self.measured or bool(self.usable.sum() >= LINE_SIZES))

    @cached_property
    def rate(self) -> Rate | None:
        """Fitted rate of decay of the error with n; None with fewer than three usable sizes."""
        if not self.defined:
            return None
        if self._prediction_alone is not None:
            return self._prediction_alone.rate(self.sizes) if len(self.sizes) > 1 else None
        return fit_rate(np.asarray(self.sizes), self._bootstrap, self.usable)

    @cached_property
    def local_slopes(self) -> tuple[Array, Array]:
        """Slopes −Δ ln e/Δ ln n between neighbouring sizes, and their standard errors: (sizes − 1,) each."""
        step = np.diff(np.log(self.sizes))
        logs = np.log(np.maximum(self.rows.mean(0), _TINY)) / self.moment
        return -np.diff(logs) / step, np.std(np.diff(self._bootstrap.draws(), axis=1), axis=0) / step

    @cached_property
    def pool_share(self) -> float:
        """Error of the reference, all N tokens, over the error at the largest n: (n/N)^β if both follow a power law.

        Errors m are measured against the reference: m² = e(n)² − e(N)². β is the exponent for which m falls over the
        last sizes like the measured errors. For β = 1/2, m²/e² is the factor 1 − n/N of any average, for which the
        curve is corrected. A reference with a larger error makes the measured errors too small.
        """
        if not self.measured:
            return 0.0
        correction = np.broadcast_to(self.finite_population_correction, self.rows.shape).mean(0)
        inside = 1 - correction[self.usable][-LINE_SIZES:] ** 2
        if not self._fits_line or inside[-1] <= 0:
            return 0.0
        x, y = self._line[0][-LINE_SIZES:], self._line[1][0, -LINE_SIZES:] + 0.5 * np.log(1 - inside)
        centred = x - x.mean()

        def steeper(beta: float) -> float:
            """Slope of an error curve with exponent `beta` minus the slope of the measured curve, up to a factor."""
            return float(centred @ (y + beta * x - 0.5 * np.log1p(-(inside ** (2 * beta)))))

        ends = (1e-3, 2.0)
        beta = ends[0] if steeper(ends[0]) > 0 else ends[1] if steeper(ends[1]) < 0 else brentq(steeper, *ends)
        return float(inside[-1] ** beta)

    @cached_property
    def _line(self) -> tuple[Array, Array]:
        """Logarithms of n (J,), and of the errors of the curve and its resamples (1 + resamples, J), at usable sizes.

        Resamples are reflected about the curve (basic bootstrap), because their bias has the opposite sign.
        """
        if self._prediction_alone is not None:
            return np.log(np.asarray(self.sizes, float)), self._prediction_alone.at(self.sizes)
        kept = self.usable
        x = np.log(np.asarray(self.sizes, float)[kept])
        y = np.log(np.maximum(self.error[kept], _TINY))
        if self.replicates < 2:
            return x, y[None]
        return x, np.vstack((y, y - self._bootstrap.draws(wide=True)[:, kept]))

    @cached_property
    def _extended(self) -> tuple[Array, Array]:
        """Logarithms of n and of the errors as in `_line`, extended beyond measured sizes by a precise prediction."""
        x, y = self._line
        if self.prediction is None or not self.prediction.defined:
            return x, y
        if not self.measured:
            return np.log(self.prediction.sizes), self.prediction.logs.astype(float)
        draws = np.append(0, 1 + np.arange(len(y) - 1) % DRAWS)
        known, parts = np.log(self.prediction.sizes), {0: (x, y)}
        for side, edge in ((-1, 0), (1, len(x) - 1)):
            far = known[(known - x[edge]) * side > 1e-9][::side]  # from the nearest on
            steps = self.prediction.at(np.exp(far)) - self.prediction.at([math.exp(x[edge])])
            told = int((1.96 * steps[1:].std(0) < WIDEST).cumprod().sum())
            parts[side] = far[:told][::side], (y[:, edge, None] + steps[draws][:, :told])[:, ::side]
        xs, ys = zip(*(parts[side] for side in (-1, 0, 1)), strict=True)
        return np.concatenate(xs), np.concatenate(ys, axis=1)

    @property
    def farthest(self) -> int:
        """Largest n to which the curve is extrapolated: end of the prediction, or ten times the largest size."""
        end = math.exp(self._extended[0][-1]) if self._fits_line else 0.0
        return round(end) if end > 1.001 * self.sizes[-1] else BEYOND * self.sizes[-1]

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Number of tokens n(ε) from which on the error e(n) √(1 − n/C) over n of C = `context` tokens is ≤ `error`."""
        if not 0 < error < math.inf:
            raise InputError(f"the error is {error:g}; expected a positive number, such as 0.05")
        if not context >= 1:
            raise InputError(f"the context is {context:g} tokens; expected at least 1, such as 32768")
        if not self.defined:
            return TokensFor(None, why="the limit is 0, so there is no relative error")
        if not self._fits_line:
            few = "sizes or more" if len(self.sizes) < LINE_SIZES else "sizes with errors above the numerical floor"
            return TokensFor(None, why=f"{LINE_SIZES} {few} are needed")
        x, y = self._extended
        reach = max(self.farthest / math.exp(x[-1]), 1.0)
        needed = crossing(x, y, math.log(error), math.log(context), reach)
        found = float(needed[0])
        measured = np.asarray(self.sizes)[self.usable]
        resampled = needed[1:] if len(needed) > 1 else needed
        low, high = np.quantile(resampled, ENDS, method="nearest")
        return TokensFor(
            n=whole(found, context),
            interval=(whole(float(low), context), whole(float(high), context)),
            extrapolated=not measured[0] * (1 - 1e-9) <= found <= measured[-1] * (1 + 1e-9),
            beyond=not math.isfinite(found),
            farthest=self.farthest,
        )

    def predict(self, n: float) -> tuple[float, float, float]:
        """Error over n tokens with the ends of its 95% interval, inter- or extrapolated; NaN beyond `farthest`."""
        if not self._fits_line or n > 1.000001 * self.farthest:
            return math.nan, math.nan, math.nan
        x, y = self._extended
        at = math.log(n)
        if x[0] <= at <= x[-1]:
            found = between(x, y, np.array([at]))[:, 0]
        else:
            slope, level = power_law(x, y, slice(-LINE_SIZES, None) if at > x[-1] else slice(0, LINE_SIZES))
            found = level + slope * at
        low, high = np.quantile(found[1:] if len(found) > 1 else found, ENDS)
        return math.exp(found[0]), math.exp(low), math.exp(high)

    def __repr__(self) -> str:
        rate = "no rate" if self.rate is None else f"rate {self.rate.slope:.3f} ± {self.rate.stderr:.3f}"
        ends = f"{self.error[0]:.3g} at n = {self.sizes[0]:,} to {self.error[-1]:.3g} at n = {self.sizes[-1]:,}"
        return f"<ErrorCurve: {ends}, {rate}, {self.replicates} replicates>"
