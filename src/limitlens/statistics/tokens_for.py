"""Number of tokens n(ε) at which an error curve falls to a target error ε.

Between sizes the error e is a power law of n; outside them, up to ten times the largest, it is the power law through
the three nearest sizes. A sample of n of the C tokens of a context has the error e(n) √(1 − n/C).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import numpy as np

from limitlens.errors import Array

BEYOND = 10  # a curve is extrapolated up to this many times the largest measured size
LINE_SIZES = 3  # sizes used for the power law that extends a curve
_STEPS = 60  # largest number of steps of Newton's method, which converges in about six
ERRORS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
CONTEXTS = (2048, 8192, 32768, 131072, None)  # None: infinitely many tokens
MARKS = ("measured", "extrapolated", "beyond", "not known")  # where n(ε) comes from; a page uses the index


@dataclass(frozen=True)
class TokensFor:
    """Number n(ε) of randomly sampled tokens at which the error falls to ε, in an infinite or a finite context."""

    n: int | None  # None where it is not known; the whole context where that needs every token
    interval: tuple[int | None, int | None] = (None, None)  # 95%; None where an end is unbounded
    extrapolated: bool = True  # the number lies outside the measured sizes
    beyond: bool = False  # the number exceeds `farthest`
    farthest: int | None = None  # largest n up to which the curve is extrapolated
    why: str = ""  # reason why there is no number, where there is none

    @property
    def mark(self) -> str:
        """Origin of the number of tokens: "measured", "extrapolated", "beyond" (the range) or "not known"."""
        if self.why:
            return "not known"
        return "beyond" if self.beyond else "extrapolated" if self.extrapolated else "measured"

    def plus(self, atoms: int) -> Self:
        """Add `atoms` tokens that are always kept (such as attention sinks) to the number and to its interval."""
        n, low, high = (None if value is None else value + atoms for value in (self.n, *self.interval))
        return replace(self, n=n, interval=(low, high))

    def document(self) -> dict[str, Any] | None:
        """Number of tokens with its interval as a dictionary for JSON; None if not known or beyond the range."""
        if self.n is None or self.beyond:
            return None
        return {"n": self.n, "interval": list(self.interval), "extrapolated": self.extrapolated}

    def __str__(self) -> str:
        if self.why:
            return f"not known: {self.why}"
        if self.n is None:
            return f"more than {self.farthest:,} tokens" if self.farthest else "beyond the range of extrapolation"
        low, high = ("more" if end is None else f"{end:,}" for end in self.interval)
        note = ", the whole context" if self.beyond else ", extrapolated" if self.extrapolated else ""
        return f"{self.n:,} tokens (95%: {low} to {high}{note})"


def answers(
    curves: Sequence[Callable[[float, float], TokensFor]], errors: Sequence[float], contexts: Sequence[float | None]
) -> dict[str, Any]:
    """Tables of the number of tokens n(ε) by curve (given by its `tokens_for`), error and context (None: infinite).

    They are `n`, the ends `low` and `high` of its 95% interval, and `mark`, its origin as an index into `MARKS`.
    """
    ends = [math.inf if context is None else context for context in contexts]
    found = [tokens_for(error, end) for tokens_for, error, end in product(curves, errors, ends)]
    rows = np.array([(answer.n, *answer.interval, MARKS.index(answer.mark)) for answer in found], dtype=object)
    parts = rows.reshape(len(curves), len(errors), len(ends), 4)
    return {name: parts[..., place].tolist() for place, name in enumerate(("n", "low", "high", "mark"))}


def crossing(x: Array, y: Array, goal: float, end: float = math.inf, reach: float = BEYOND) -> Array:
    """Size n from which on each error curve is below a target, (rows,); infinite beyond `reach` times the largest size.

    `x` (J,) is log n, `y` (rows, J) log e; `goal` and `end` are the logs of the target error and of the context C.
    """
    rows = np.arange(len(y))
    above = (y + log_correction(x, end) > goal) & (x < end)
    last = np.where(above.any(1), len(x) - 1 - above[:, ::-1].argmax(1), -1)  # −1: the first size is already below
    # Each curve falls to the goal within a segment with log e linear in log n: before, between or after the sizes.
    first, after = last < 0, last == len(x) - 1
    i = np.clip(last, 0, len(x) - 2)
    slope = np.diff(y, axis=1)[rows, i] / np.diff(x)[i]
    level = y[rows, i] - slope * x[i]
    for which, part in ((first, slice(0, LINE_SIZES)), (after, slice(-LINE_SIZES, None))):
        slope[which], level[which] = power_law(x, y[which], part)
    low = np.where(first, 0.0, x[np.maximum(last, 0)])
    high = np.minimum(np.where(first, x[0], np.where(after, x[-1] + math.log(reach), x[i + 1])), end)
    never = level + slope * high + log_correction(high, end) > goal
    found = _root(level - goal, slope, low, high, end)
    # A line through three sizes may disagree with the measured size at its end; then the measured size decides.
    return np.where(never, np.where(first, np.exp(x[0]), np.inf), np.exp(found))


def _root(level: Array, slope: Array, low: Array, high: Array, end: float) -> Array:
    """Root x (rows,) in [low, high] of the concave level + slope x + log √(1 − e^{x − end}), by Newton's method."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if math.isinf(end):
            return np.asarray(np.clip(np.where(slope < 0, -level / slope, low), low, high))
        x = np.clip(np.where(slope < 0, -level / slope, high), low, high)
        top = level + np.maximum(slope * low, slope * high)
        x = np.minimum(x, np.where(top > 0, end + np.log1p(-np.exp(np.minimum(-2 * top, 0.0))), high))
        x = np.maximum(x, low)
        for _ in range(_STEPS):
            gone = np.exp(np.minimum(x - end, -1e-16))
            value = level + slope * x + 0.5 * np.log1p(-gone)
            step = value / (slope - 0.5 * gone / (1 - gone))
            step = np.where(np.isfinite(step), np.maximum(step, 0.0), 0.0)
            x = np.maximum(x - step, low)
            if not (step > 1e-13).any():
                break
    return np.asarray(x)


def between(x: Array, y: Array, at: Array) -> Array:
    """Linear interpolation at points `at` (K,) of curves y (rows, J) given at x (J,): (rows, K)."""
    place = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
    part = (at - x[place]) / (x[place + 1] - x[place])
    return np.asarray(y[:, place] * (1 - part) + y[:, place + 1] * part)


def whole(n: float, context: float = math.inf) -> int | None:
    """Number of tokens n rounded up to an integer, at most the context; None if both are infinite."""
    bounded = min(n, context)
    return math.ceil(round(bounded, 6)) if math.isfinite(bounded) else None  # 100.0000001 is 100 plus a rounding error


def log_correction(x: Array, end: float) -> Array:
    """Logarithm of the finite-population factor √(1 − n/C) at x = log n, `end` = log C; −inf from n = C on."""
    with np.errstate(divide="ignore"):
        return np.asarray(0.5 * np.log1p(-np.exp(np.minimum(x - end, 0.0))))


def power_law(x: Array, y: Array, part: slice) -> tuple[Array, Array]:
    """Slope and intercept (rows,) of lines fitted to log-log curves at the sizes in `part`; slopes are at most 0."""
    centre, mean = x[part].mean(), y[:, part].mean(1)
    offset = x[part] - centre
    slope = np.minimum((y[:, part] @ offset) / (offset @ offset), 0.0)
    return slope, mean - slope * centre
