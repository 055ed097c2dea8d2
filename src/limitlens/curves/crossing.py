"""Where an error curve comes down to a wanted error.

Between measured sizes e is a power law; outside them it is the power law of the three nearest, up to ten times the
largest size. Keeping n of the C tokens of a finite context has the error e(n) √(1 − n/C).
"""

from __future__ import annotations

import math

import numpy as np

from limitlens.errors import Array

BEYOND = 10  # no number is given past this many times the largest size measured
LINE_SIZES = 3  # sizes behind the power law that extends a curve
_HALVINGS = 50


def crossing(x: Array, y: Array, goal: float, end: float = math.inf) -> Array:
    """Where each curve last comes down to the goal: n (rows,), infinite beyond ten times the largest size.

    Parameters
    ----------
    x : (J,) log n
    y : (rows, J) log e
    goal, end : log of the wanted error and of the context C, endless by default
    """
    rows = np.arange(len(y))
    inside = x < end
    above = (y + _unseen(x, end) > goal) & inside
    last = np.where(above.any(1), len(x) - 1 - above[:, ::-1].argmax(1), -1)  # −1: the first size already does
    # Each curve comes down within one stretch, on which log e is a straight line: before the first size, between two
    # of them, or after the last.
    first, after = last < 0, last == len(x) - 1
    i = np.clip(last, 0, len(x) - 2)
    slope = np.diff(y, axis=1)[rows, i] / np.diff(x)[i]
    level = y[rows, i] - slope * x[i]
    for which, part in ((first, slice(0, LINE_SIZES)), (after, slice(-LINE_SIZES, None))):
        slope[which], level[which] = power_law(x, y[which], part)
    low = np.where(first, 0.0, x[np.maximum(last, 0)])
    high = np.minimum(np.where(first, x[0], np.where(after, x[-1] + math.log(BEYOND), x[i + 1])), end)
    never = level + slope * high + _unseen(high, end) > goal
    if math.isinf(end):  # nothing but the line itself: no need to search
        with np.errstate(divide="ignore", invalid="ignore"):
            high = np.clip(np.where(slope < 0, (goal - level) / slope, low), low, high)
    else:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            short = level + slope * middle + _unseen(middle, end) > goal
            low, high = np.where(short, middle, low), np.where(short, high, middle)
    # A line through three sizes may disagree with the size at its end; the measured size decides then.
    return np.where(never, np.where(first, np.exp(x[0]), np.inf), np.exp(high))


def _unseen(x: Array, end: float) -> Array:
    """log √(1 − n/C) at x = log n; −inf from the context on."""
    with np.errstate(divide="ignore"):
        return np.asarray(0.5 * np.log1p(-np.exp(np.minimum(x - end, 0.0))))


def power_law(x: Array, y: Array, part: slice) -> tuple[Array, Array]:
    """Slope and level (rows,) of the power laws through a part of the curves, flat where a curve rises there."""
    centre, mean = x[part].mean(), y[:, part].mean(1)
    offset = x[part] - centre
    slope = np.minimum((y[:, part] @ offset) / (offset @ offset), 0.0)
    return slope, mean - slope * centre
