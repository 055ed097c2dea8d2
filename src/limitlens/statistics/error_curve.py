"""Error curves: the error of attention over n tokens relative to its infinite-token limit, at nested sizes n.

`ErrorCurve` gives errors with intervals, their rate of decay, and the number n(ε) of tokens for an error ε.
`PredictedErrors` are computed from few tokens, and extend a measured curve or replace it.
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

FLOOR_MARGIN = 10  # errors below this multiple of the numerical error are neither fitted nor used for n(ε)
DRAWS = 200  # resamples of a prediction
DRIFT = 2.0  # multiple of log e(M tokens) − log e(M/2 tokens) added to a prediction from M tokens at n ≥ M
WIDEST = math.log(2)  # half-width of an interval of log e from which on a prediction is not used
_TINY = np.finfo(float).tiny


@lru_cache(maxsize=8)
def _draws(clusters: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """Bootstrap counts (DRAWS, clusters) of query clusters, and Gaussian noise; cached, since all heads share them."""
    generator = random_stream(seed, 0xF0E5)
    counts = resample_counts(generator, clusters, DRAWS)
    return counts, generator.standard_normal((DRAWS, 1 + BY_QUARTERS))


def _half_difference(halves: Array) -> Array:
    """Standard deviations (heads, splits, K) of log e, from its values in two halves (2, splits, heads, K)."""
    splits = halves.shape[1]
    return np.asarray(student_factor(splits) * (halves[0] - halves[1]) / 2 / math.sqrt(splits)).swapaxes(0, 1)


@dataclass(frozen=True, eq=False)
class PredictedErrors:
    """Relative errors of attention at K sizes n, predicted from M tokens (the pilot), with resamples for intervals.

    The prediction is exact if the pilot is the whole distribution (`theory.exact_bootstrap`). Its uncertainty comes
    from resampling the queries by window of text, and from comparing halves of the pilot. At n ≥ M, twice the change of
    log e from M/2 to M tokens is added, and counted as uncertain (heuristic). If the pilot has few windows of text,
    halves are whole windows, and their mean change of log e at small n is added at every n.
    """

    sizes: Array
    logs: Array  # (1 + draws, K), the prediction first
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))  # (3, K): standard shifts of `logs` by other texts

    @classmethod
    def of(
        cls, sizes: Array, found: PilotErrors, clusters: Any, tokens: int, seed: int, windows: bool = False
    ) -> list[Self]:
        """Predict the errors of one or more heads from the expected squared errors `found` of their queries.

        The queries come head after head; `clusters` (m,) says which window of text each query of a head is from.
        The prediction is made from `tokens` tokens; `windows` says that these are a few whole windows of text.
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
        """Logarithms of the predicted error and of its resamples, interpolated at sizes n: (1 + draws, len(n))."""
        return between(np.log(self.sizes), self.logs.astype(float), np.log(np.asarray(n, dtype=float)))

    def text_shifts(self, n: Any) -> Array:
        """Standard deviations of log e at sizes n due to the choice of text, in three directions: (3, len(n))."""
        return between(np.log(self.sizes), self.text, np.log(np.asarray(n, dtype=float)))

    def rate(self, n: Any) -> Rate:
        """Rate β of the power law c n^{−β} through the predicted errors at sizes n; no other law is compared."""
        x = np.log(np.asarray(n, dtype=float))
        logs, centred = self.at(n), x - x.mean()
        slopes = -(logs @ centred) / (centred @ centred)
        low, high = np.quantile(slopes[1:], ENDS).tolist()
        constant = float(np.exp(logs[0].mean() + slopes[0] * x.mean()))
        stderr = float(slopes[1:].std(ddof=1))
        return Rate(float(slopes[0]), stderr, (low, high), constant, 0.0, math.nan, math.nan, tuple(map(int, n)))


@dataclass(frozen=True, eq=False, repr=False)
class ErrorCurve:
    """Error of attention over n tokens against its infinite-token limit, at nested sizes n, with its rate and n(ε).

    Errors come from replicates (independent samples of tokens) and clusters of queries (those of one window of text).
    The error is (mean of `error_moments`)^(1/moment).
    """

    sizes: tuple[int, ...]
    error_moments: Array  # (clusters, replicates, sizes): |error|^moment; their mean over clusters is that over queries
    outputs: Array = field(default_factory=lambda: np.ones((1, 1)))  # (clusters, sizes): |limit|^moment, of mean 1
    moment: int = 2  # 1 for E|error|, 2 for the root mean square error; their exponents can differ
    # measured error over true error, (sizes,): √(1 − n/N) where the reference is attention over N tokens
    finite_population_correction: Array = field(default_factory=lambda: np.ones(1))
    floor: Array = field(default_factory=lambda: np.zeros(1))  # numerical error, (sizes,); 0 for float64
    min_snr: float = 0.0  # an error below this many standard errors counts as noise: not fitted, not used for n(ε)
    seed: int = 0
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))  # (k, sizes): shifts of log e by the choice of text
    # share of the variance by `text` that other seeds on the same text show, because they sample other windows of it
    text_share: float = 0.0
    prediction: PredictedErrors | None = None  # errors outside the sizes measured; without it, a power law

    @classmethod
    def of(cls, sizes: Any, rows: Array, **known: Any) -> Self:
        """Make a curve from |error|^moment of each replicate (replicates, sizes), with all queries in one cluster."""
        return cls(tuple(int(size) for size in sizes), np.asarray(rows, dtype=float)[None], **known)

    @classmethod
    def predicted(cls, sizes: Any, prediction: PredictedErrors, seed: int = 0) -> Self:
        """Make a curve at the sizes from predicted errors alone, without measured replicates."""
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
        text = math.sqrt(self.text_share) * np.broadcast_to(self.text, (len(self.text), len(self.sizes)))
        return TwoWayBootstrap(error_moments, outputs, self.moment, self.seed, text)

    @cached_property
    def error(self) -> Array:
        """Error of attention over n tokens at each size n, (sizes,)."""
        if not self.measured:
            return np.asarray(np.exp(self._line[1][0]))
        return np.asarray(np.maximum(self.rows.mean(0), 0) ** (1 / self.moment))

    @cached_property
    def stderr(self) -> Array:
        """Standard error of the error at each size, (sizes,): how far runs on the same text with other seeds differ."""
        if not self.measured:
            return np.asarray(self.error * self._line[1][1:].std(0, ddof=1))
        return np.asarray(self.error * self._bootstrap.stderr)

    @property
    def for_other_text(self) -> Self:
        """This curve with a `stderr`, `interval` and `rate` that also count the choice of the text's windows."""
        return replace(self, text_share=1.0)

    @property
    def text_stderr(self) -> Array:
        """Part of the standard error due to the choice of text, (sizes,), which `stderr` lacks; 0 if predicted."""
        left = (1 - self.text_share) * np.square(self.text).sum(0)
        return np.asarray(self.error * np.sqrt(np.broadcast_to(left, len(self.sizes))))

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
        """Fitted exponent with which the error decays with n; None with fewer than three usable sizes."""
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
        """Error of the reference (attention over N tokens) over the error at the largest n; large values are a warning.

        Measured errors m are against the reference, m² = e(n)² − e(N)², so they are too small. The share is (n/N)^β,
        with the exponent β that gives the measured decay of m over the last sizes.
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
            """How much steeper m decays with exponent `beta` than the measured errors, up to a factor."""
            return float(centred @ (y + beta * x - 0.5 * np.log1p(-(inside ** (2 * beta)))))

        ends = (1e-3, 2.0)
        beta = ends[0] if steeper(ends[0]) > 0 else ends[1] if steeper(ends[1]) < 0 else brentq(steeper, *ends)
        return float(inside[-1] ** beta)

    @cached_property
    def _line(self) -> tuple[Array, Array]:
        """Logarithms of usable sizes n (J,), and of the errors with basic bootstrap resamples (1 + resamples, J)."""
        if self._prediction_alone is not None:
            return np.log(np.asarray(self.sizes, float)), self._prediction_alone.at(self.sizes)
        kept = self.usable
        x = np.log(np.asarray(self.sizes, float)[kept])
        y = np.log(np.maximum(self.error[kept], _TINY))
        if self.replicates < 2:
            return x, y[None]
        draws = self.for_other_text._bootstrap.draws(wide=True)  # n(ε) and extrapolations are for other text too
        return x, np.vstack((y, y - draws[:, kept]))

    @cached_property
    def _extended(self) -> tuple[Array, Array]:
        """Logarithms of n and of errors as in `_line`, extended beyond the measured sizes by a precise prediction."""
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
        """Largest n to which the curve is extrapolated: the end of a prediction, or ten times the largest size."""
        end = math.exp(self._extended[0][-1]) if self._fits_line else 0.0
        return round(end) if end > 1.001 * self.sizes[-1] else BEYOND * self.sizes[-1]

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Number n of tokens from which on the error e(n) √(1 − n/C) is at most `error`, for a context of C tokens."""
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
        """Error over n tokens and the ends of its 95% interval, by inter- or extrapolation; NaN beyond `farthest`."""
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
