"""How many keys a head needs: the budget for an error, in an endless context or in one of C tokens.

A budget is stated for keys drawn at random, because that is what an error curve measures: e(n) is the relative output
error of n random tokens against endlessly many. Keeping n of the C tokens of a finite context is drawing without
replacement, and against attention over all C the error is

    e(n; C) = e(n) √(1 − n/C),

so a budget never exceeds the context. Between measured sizes e is a power law; outside them it is the power law of the
three nearest, up to ten times the largest size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.curves.crossing import LINE_SIZES, crossing, power_law
from limitlens.errors import Array, InputError

DRAWS = 400  # of the curve within its standard errors, for the interval
_TINY = np.finfo(float).tiny


@dataclass(frozen=True)
class Budget:
    """The keys a head needs for an error.

    Attributes
    ----------
    tokens : int or None
        The number of keys; None when it is beyond ten times the largest size measured and no context bounds it.
    interval : (int or None, int or None)
        95% interval, from curves redrawn within their standard errors, independently at each size; None as above.
    extrapolated : bool
        The number lies outside the sizes measured.
    beyond : bool
        It lies beyond ten times the largest of them, so it is not known: in a finite context every key is kept.
    """

    tokens: int | None
    interval: tuple[int | None, int | None]
    extrapolated: bool
    beyond: bool

    def document(self) -> dict[str, Any]:
        """The budget as JSON."""
        return {
            "tokens": self.tokens,
            "interval": list(self.interval),
            "extrapolated": self.extrapolated,
            "beyond": self.beyond,
        }


def budget_for(
    sizes: Array, errors: Array, stderr: Array, wanted: float, context: float = math.inf, *, seed: int = 0
) -> Budget:
    """The smallest n from which on e(n; C) stays at most `wanted`.

    Parameters
    ----------
    sizes, errors, stderr : (J,) with J ≥ 3
        The error curve: increasing n, relative output errors and their standard errors.
    wanted : relative error
    context : C, endless by default
    """
    if not 0 < wanted < math.inf:
        raise InputError(f"the error is {wanted:g}; expected a positive number, such as 0.05")
    if not context >= 1:
        raise InputError(f"the context is {context:g} tokens; expected at least 1, such as 32768")
    n, curve, spread = (np.asarray(column, dtype=float) for column in (sizes, errors, stderr))
    if not (n.shape == curve.shape == spread.shape and n.ndim == 1 and n.size >= LINE_SIZES):
        raise InputError(f"an error curve of {n.size} sizes was given; expected at least {LINE_SIZES}, so probe more")
    noise = np.random.default_rng(np.random.SeedSequence([seed, 0xB0D6])).standard_normal((DRAWS, n.size))
    curves = np.vstack((curve, curve + spread * noise))
    x, y, end = np.log(n), np.log(np.maximum(curves, _TINY)), math.log(context)
    needed = crossing(x, y, math.log(wanted), end)
    found = float(needed[0])
    low, high = np.quantile(needed[1:], (0.025, 0.975), method="nearest")
    return Budget(
        tokens=_whole(found, context),
        interval=(_whole(low, context), _whole(high, context)),
        extrapolated=not n[0] <= found <= n[-1],
        beyond=not math.isfinite(found),
    )


def error_at(n: float, sizes: Array, errors: Array, context: float = math.inf) -> float:
    """The error e(n; C) that a curve predicts for n of C keys, n within the sizes or outside them."""
    x, y = np.log(np.asarray(sizes, dtype=float)), np.log(np.maximum(np.asarray(errors, dtype=float), _TINY))
    at = math.log(n)
    if x[0] <= at <= x[-1]:
        value = float(np.interp(at, x, y))
    else:
        slope, level = power_law(x, y[None], slice(-LINE_SIZES, None) if at > x[-1] else slice(0, LINE_SIZES))
        value = float(level[0] + slope[0] * at)
    return math.exp(value) * math.sqrt(max(1 - n / context, 0.0))


def _whole(n: float, context: float) -> int | None:
    """n as a number of tokens, at most the context; None where neither is finite."""
    bounded = min(n, context)
    return math.ceil(round(bounded, 6)) if math.isfinite(bounded) else None  # 100.0000001 is 100 and a rounding error
