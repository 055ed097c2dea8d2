"""Token sample complexity: how many tokens for an error."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from limitlens.convergence.fit import bootstrap, typical
from limitlens.errors import Array, InputError

FEWEST_SIZES = 3  # for a power law beyond those measured
BEYOND = 10  # no number is given past this many times the largest size measured


@dataclass(frozen=True)
class TokensFor:
    """The smallest n with error at most the wanted one.

    Attributes
    ----------
    n : int
    interval : (int, int or None)
        95% interval over replicates; None at the upper end where some resamples never get there.
    extrapolated : bool
        Whether n lies outside the sizes measured, by the power law of the last three sizes (or of the first three).
    """

    n: int
    interval: tuple[int, int | None]
    extrapolated: bool

    def document(self) -> dict[str, Any]:
        """The answer as JSON."""
        return asdict(self)


def tokens_for(sizes: Array, powers: Array, wanted: float, *, moment: int = 2, seed: int = 0) -> TokensFor | None:
    """n(ε) from relative errors to the power `moment`, (replicates, sizes ≥ 3).

    None beyond ten times the largest size measured.
    """
    if not wanted > 0:
        raise InputError(f"the error is {wanted}; expected a positive number, such as 0.05")
    if len(sizes) < FEWEST_SIZES:
        return None
    found = _crossing(sizes, typical(powers, moment)[None], wanted)[0]
    if not np.isfinite(found):
        return None
    resampled = _crossing(sizes, bootstrap(powers, seed, moment), wanted)
    low, high = np.quantile(resampled, (0.025, 0.975), method="nearest")
    return TokensFor(
        n=int(np.ceil(found)),
        interval=(int(np.ceil(low)), int(np.ceil(high)) if np.isfinite(high) else None),
        extrapolated=bool(found > sizes[-1] or found < sizes[0]),
    )


def _crossing(sizes: Array, curves: Array, wanted: float) -> Array:
    """Where each curve (rows) last comes down to `wanted`, log-linear between sizes: (rows,), inf where never."""
    x, y = np.log(sizes), np.log(np.maximum(curves, np.finfo(float).tiny))
    goal = np.log(wanted)
    result = np.full(len(y), np.inf)
    for row, line in enumerate(y):
        above = np.flatnonzero(line > goal)
        if len(above) and above[-1] + 1 < len(x):
            i = above[-1]
            share = (line[i] - goal) / (line[i] - line[i + 1])
            result[row] = np.exp(x[i] + share * (x[i + 1] - x[i]))
            continue
        part = slice(-3, None) if len(above) else slice(0, 3)
        slope, intercept = np.polyfit(x[part], line[part], 1)
        if slope < 0:
            guess = np.exp((goal - intercept) / slope)
            outside = max(guess, sizes[-1]) if len(above) else max(min(guess, sizes[0]), 1.0)
            result[row] = outside if outside <= BEYOND * sizes[-1] else np.inf
    return result
