"""The error of attention over n tokens against its limit, for nested sizes n: the one curve of this program.

A study, a probe and a plan all read off it the error at each size, the rate at which it falls and by which law, and
n(ε), how many tokens an error takes. Intervals come from resampling whole replicates, because their sizes are nested,
and clusters of queries, which all replicates share (`TwoWayBootstrap`).
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy.optimize import brentq

from limitlens.errors import Array, InputError
from limitlens.statistics.bootstrap import ENDS, TwoWayBootstrap
from limitlens.statistics.crossing import BEYOND, LINE_SIZES, between, crossing, power_law, whole
from limitlens.statistics.fit import Rate, fit_rate, local_slopes
from limitlens.statistics.predicted_curve import DRAWS, WIDEST, Foresight

FLOOR_MARGIN = 10  # an error closer to the numerical floor than this is neither fitted nor crossed
_TINY = np.finfo(float).tiny


@dataclass(frozen=True)
class TokensFor:
    """How many random tokens bring the error down to a wanted one, n(ε), of endlessly many or of a context."""

    n: int | None  # None where it is not known; all of a finite context that needs every token
    interval: tuple[int | None, int | None] = (None, None)  # 95%; None at an end that nothing bounds
    extrapolated: bool = True  # the number lies outside the sizes measured
    beyond: bool = False  # it lies further out than these sizes can tell
    farthest: int | None = None  # how far that is
    why: str = ""  # there is no number at all, where that is so

    @property
    def mark(self) -> str:
        """Where the number comes from: "measured", "extrapolated", "beyond" or "not known"."""
        if self.why:
            return "not known"
        return "beyond" if self.beyond else "extrapolated" if self.extrapolated else "measured"

    def plus(self, atoms: int) -> Self:
        """The same with tokens that are always there."""
        n, low, high = (None if value is None else value + atoms for value in (self.n, *self.interval))
        return replace(self, n=n, interval=(low, high))

    def document(self) -> dict[str, Any] | None:
        """The answer as JSON; null where there is no number."""
        if self.n is None or self.beyond:
            return None
        return {"n": self.n, "interval": list(self.interval), "extrapolated": self.extrapolated}

    def __str__(self) -> str:
        if self.why:
            return f"not known: {self.why}"
        if self.n is None:
            return f"beyond {self.farthest:,} tokens" if self.farthest else "beyond what these sizes can tell"
        low, high = ("more" if end is None else f"{end:,}" for end in self.interval)
        note = ", every one" if self.beyond else ", extrapolated" if self.extrapolated else ""
        return f"{self.n:,} tokens (95%: {low} to {high}{note})"


@dataclass(frozen=True, eq=False, repr=False)
class ErrorCurve:
    """Errors at nested sizes n₁ < n₂ < ....

    `error_moments` are |error|^moment as measured, averaged over the queries of each cluster (a window of text; a
    study has one cluster) such that the mean over clusters is the mean over queries; control variates may make entries
    negative. `outputs` are |output|^moment of the limit averaged in the same way and divided by their mean over
    clusters: the choice of queries moves both.
    """

    sizes: tuple[int, ...]
    error_moments: Array  # (clusters, replicates, sizes)
    outputs: Array = field(default_factory=lambda: np.ones((1, 1)))  # (clusters, sizes): what errors are relative to
    moment: int = 2  # which error is meant: 1 for E|error|, 2 for the root mean square; their exponents can differ
    # measured error over true error, (sizes,): √(1 − n/N) where the reference is a pool of N tokens
    finite_population_correction: Array = field(default_factory=lambda: np.ones(1))
    floor: Array = field(default_factory=lambda: np.zeros(1))  # numerical, (sizes,); 0 for float64
    min_snr: float = 0.0  # standard errors that an error must exceed, or it is taken for noise: not fitted, not crossed
    seed: int = 0
    # (k, sizes): how far other windows of text for the pool would move log e, in k independent ways (`Foresight.text`)
    text: Array = field(default_factory=lambda: np.zeros((0, 1)))
    foresight: Foresight | None = None  # what a pilot foretells outside the sizes measured; without it, a power law

    @classmethod
    def of(cls, sizes: Any, rows: Array, **known: Any) -> Self:
        """The curve of one cluster, from rows (replicates, sizes)."""
        return cls(tuple(int(size) for size in sizes), np.asarray(rows, dtype=float)[None], **known)

    def scaled(self, scale: float) -> Self:
        """The curve of errors divided by a number; undefined everywhere where that is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = 1 / np.float64(scale) if scale else np.nan
        return replace(self, error_moments=self.error_moments * factor**self.moment, floor=self.floor * factor)

    @cached_property
    def rows(self) -> Array:
        """|error|^moment of each replicate, true to the limit: (replicates, sizes)."""
        return np.asarray(self.error_moments.mean(0) / self.finite_population_correction**self.moment)

    @property
    def replicates(self) -> int:
        """Number of replicates behind every point."""
        return int(self.error_moments.shape[1])

    @cached_property
    def _scatter(self) -> TwoWayBootstrap:
        error_moments = np.asarray(self.error_moments / self.finite_population_correction**self.moment)
        counts = (len(error_moments), len(self.sizes)), (len(self.text), len(self.sizes))
        outputs, text = (np.broadcast_to(*pair) for pair in zip((self.outputs, self.text), counts, strict=True))
        return TwoWayBootstrap(error_moments, outputs, self.moment, self.seed, text)

    @cached_property
    def error(self) -> Array:
        """The error at each size, (sizes,)."""
        return np.asarray(np.maximum(self.rows.mean(0), 0) ** (1 / self.moment))

    @cached_property
    def stderr(self) -> Array:
        """Its standard error by the delta method, over replicates, clusters of queries and windows of text."""
        return np.asarray(self.error * self._scatter.stderr)

    @property
    def defined(self) -> bool:
        """Whether there is an error at every size: relative errors of a limit that is 0 are none."""
        return bool(np.isfinite(self.rows).all())

    @cached_property
    def usable(self) -> Any:
        """Sizes whose error is far enough above the numerical floor and its own noise: (sizes,) bool."""
        far = self.error > FLOOR_MARGIN * np.broadcast_to(self.floor, len(self.sizes))
        return far & (self.error > self.min_snr * self.stderr) if self.min_snr else far

    @property
    def _tells(self) -> bool:
        """Whether there are errors at enough sizes to go between them and beyond."""
        return self.defined and bool(self.usable.sum() >= LINE_SIZES)

    @cached_property
    def rate(self) -> Rate | None:
        """The fitted rate; None where fewer than three sizes can be fitted."""
        if not self.defined:
            return None
        return fit_rate(np.asarray(self.sizes), self._scatter, self.usable)

    @cached_property
    def local_slopes(self) -> tuple[Array, Array]:
        """Slopes between neighbouring sizes and their standard errors: (sizes − 1,) twice."""
        return local_slopes(np.asarray(self.sizes), self._scatter)

    @cached_property
    def pool_share(self) -> float:
        """The error of the pool itself over that at the largest n, (n/N)^β, should both follow one power law.

        Errors are measured against the pool: m² = e(n)² − e(N)² where its own is a part of theirs. β is the exponent
        whose m falls over the last sizes as the measured ones do. With β = 1/2 that is the 1 − n/N of any average, and
        the curve has it out; a pool that has not converged has missed more, and errors are too small (or, with values
        unlike the scores, too large) by what it missed.
        """
        correction = np.broadcast_to(self.finite_population_correction, self.rows.shape).mean(0)
        inside = 1 - correction[self.usable][-LINE_SIZES:] ** 2
        if not self._tells or inside[-1] <= 0:
            return 0.0
        x, y = self._line[0][-LINE_SIZES:], self._line[1][0, -LINE_SIZES:] + 0.5 * np.log(1 - inside)
        centred = x - x.mean()

        def steeper(beta: float) -> float:
            """How much faster than the measured one the curve of this exponent falls."""
            return float(centred @ (y + beta * x - 0.5 * np.log1p(-(inside ** (2 * beta)))))

        ends = (1e-3, 2.0)
        beta = ends[0] if steeper(ends[0]) > 0 else ends[1] if steeper(ends[1]) < 0 else brentq(steeper, *ends)
        return float(inside[-1] ** beta)

    @cached_property
    def _line(self) -> tuple[Array, Array]:
        """log n (J,) and log e of the curve and of its resamples (1 + resamples, J), at the usable sizes.

        Resamples are reflected in the curve, since the logarithm of a mean of few skewed squares errs to the other side
        than its resamples do.
        """
        kept = self.usable
        x, here = np.log(np.asarray(self.sizes, float)[kept]), np.log(np.maximum(self.error[kept], _TINY))
        if self.replicates < 2:
            return x, here[None]
        return x, np.vstack((here, here - self._scatter.draws(wide=True)[:, kept]))

    @cached_property
    def _extended(self) -> tuple[Array, Array]:
        """The same with what the pilot foretells on either side, relative to the nearest size, while that says much."""
        x, y = self._line
        if self.foresight is None or not self.foresight.defined:
            return x, y
        draws = np.append(0, 1 + np.arange(len(y) - 1) % DRAWS)
        known, parts = np.log(self.foresight.sizes), {0: (x, y)}
        for side, edge in ((-1, 0), (1, len(x) - 1)):
            far = known[(known - x[edge]) * side > 1e-9][::side]  # from the nearest on
            steps = self.foresight.at(np.exp(far)) - self.foresight.at([math.exp(x[edge])])
            told = int((1.96 * steps[1:].std(0) < WIDEST).cumprod().sum())
            parts[side] = far[:told][::side], (y[:, edge, None] + steps[draws][:, :told])[:, ::side]
        xs, ys = zip(*(parts[side] for side in (-1, 0, 1)), strict=True)
        return np.concatenate(xs), np.concatenate(ys, axis=1)

    @property
    def farthest(self) -> int:
        """The size up to which a number is given: as far as the pilot tells, or ten times the largest measured."""
        end = math.exp(self._extended[0][-1]) if self._tells else 0.0
        return round(end) if end > 1.001 * self.sizes[-1] else BEYOND * self.sizes[-1]

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """The smallest n from which on the error of n of `context` tokens, e(n) √(1 − n/C), stays at most `error`."""
        if not 0 < error < math.inf:
            raise InputError(f"the error is {error:g}; expected a positive number, such as 0.05")
        if not context >= 1:
            raise InputError(f"the context is {context:g} tokens; expected at least 1, such as 32768")
        if not self.defined:
            return TokensFor(None, why="the limit is 0, so there is no relative error")
        if not self._tells:
            few = "sizes or more are needed" if len(self.sizes) < LINE_SIZES else "sizes must lie above the floor"
            return TokensFor(None, why=f"{LINE_SIZES} {few} to tell")
        x, y = self._extended
        reach = max(self.farthest / math.exp(x[-1]), 1.0)
        needed = crossing(x, y, math.log(error), math.log(context), reach)
        found, measured = float(needed[0]), np.asarray(self.sizes)[self.usable]
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
        """The error of n tokens with the ends of its 95% interval, n within the sizes or outside; NaN too far out."""
        if not self._tells or n > 1.000001 * self.farthest:
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
