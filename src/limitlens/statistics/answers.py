"""Tables of n(ε) over errors and context lengths, for the sliders of a page."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from limitlens.statistics.error_curve import TokensFor

ERRORS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
CONTEXTS = (2048, 8192, 32768, 131072, None)  # None: infinitely many tokens
MARKS = ("measured", "extrapolated", "beyond", "not known")  # a page refers to them by index


def answers(
    curves: Sequence[Callable[[float, float], TokensFor]],
    errors: Sequence[float] = ERRORS,
    contexts: Sequence[float | None] = CONTEXTS,
) -> dict[str, Any]:
    """n(ε) of each curve (its `tokens_for`) for every error and context; an infinite context is passed as infinity.

    `n`, `low`, `high` and `mark` are lists by curve, error and context: the number, the ends of its 95% interval (None
    where there is none), and its origin as an index into `MARKS`.
    """
    ends = [math.inf if context is None else context for context in contexts]
    found = [tokens_for(error, end) for tokens_for, error, end in product(curves, errors, ends)]
    rows = np.array([(answer.n, *answer.interval, MARKS.index(answer.mark)) for answer in found], dtype=object)
    parts = rows.reshape(len(curves), len(errors), len(ends), 4)
    return {name: parts[..., place].tolist() for place, name in enumerate(("n", "low", "high", "mark"))}
