"""The sink: a token that is in every context exactly once, and how many others it takes to outweigh it.

With s the score of the sink and m = E e^{score} over the law of the other tokens, n of them leave it the share

    share(n) = e^s / (e^s + n m),

the law of large numbers put in place of the sum: good where the effective number of the others is large. m is read off
a pool of N tokens as e^{lse}/N, and everything is computed from logarithms.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from limitlens.errors import Array

_HALVINGS = 60  # of a bracket of the logarithm: far below its last digit


def sink_share(n: ArrayLike, sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """Share of the attention mass that the sink keeps among n other tokens, n (...) broadcast against the queries.

    Per query (...): the score of the sink, and the log-sum-exp of the scores of a pool of `rest_count` other tokens.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(expit(_log_length(sink_score, rest_lse, rest_count) - np.log(np.asarray(n, dtype=float))))


def dilution_length(sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """The n (...) at which the sink's share (`sink_share`), averaged over the queries (..., m), falls to one half.

    For one query it is e^s/m. Below 1 the sink never holds half of the mass.
    """
    lengths = _log_length(sink_score, rest_lse, rest_count)
    low, high = lengths.min(-1), lengths.max(-1)  # at the least of them every share is at least one half
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        above = expit(lengths - middle[..., None]).mean(-1) > 0.5
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(low + (high - low) / 2))


def _log_length(sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """log(e^s / m) per query."""
    return np.asarray(np.asarray(sink_score) - np.asarray(rest_lse) + np.log(rest_count), dtype=float)
