"""Token sample complexity: how many tokens for an error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from limitlens.curves.crossing import LINE_SIZES, crossing
from limitlens.curves.fit import bootstrap, typical
from limitlens.errors import Array, InputError


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
    if len(sizes) < LINE_SIZES:
        return None
    x, goal = np.log(sizes), math.log(wanted)

    def needed(curves: Array) -> Array:
        return crossing(x, np.log(np.maximum(curves, np.finfo(float).tiny)), goal)

    found = needed(typical(powers, moment)[None])[0]
    if not np.isfinite(found):
        return None
    low, high = np.quantile(needed(bootstrap(powers, seed, moment)), (0.025, 0.975), method="nearest")
    return TokensFor(
        n=int(np.ceil(found)),
        interval=(int(np.ceil(low)), int(np.ceil(high)) if np.isfinite(high) else None),
        extrapolated=bool(found > sizes[-1] or found < sizes[0]),
    )
