"""Numbers of tokens for many errors and contexts at once: what the sliders of a page step through."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from limitlens.statistics.error_curve import TokensFor

ERRORS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
CONTEXTS = (2048, 8192, 32768, 131072, None)  # None: endlessly many tokens
MARKS = ("measured", "extrapolated", "beyond", "not known")  # in the order in which a page counts them


def answers(
    ask: Sequence[Callable[[float, float], TokensFor]],
    errors: Sequence[float] = ERRORS,
    contexts: Sequence[float | None] = CONTEXTS,
) -> dict[str, Any]:
    """What each of `ask` says for every error and context; an endless context is passed as infinity.

    `n`, `low`, `high` and `mark` are lists by curve, error and context: the number and the ends of its 95% interval,
    None where there is none, and where it comes from, counted in `MARKS`.
    """
    ends = [math.inf if context is None else context for context in contexts]
    found = [one(error, end) for one, error, end in product(ask, errors, ends)]
    told = np.array([(answer.n, *answer.interval, MARKS.index(answer.mark)) for answer in found], dtype=object)
    parts = told.reshape(len(ask), len(errors), len(ends), 4)
    return {name: parts[..., place].tolist() for place, name in enumerate(("n", "low", "high", "mark"))}
