"""The sink of a head: a token that every context contains exactly once, and the number of tokens that outweigh it.

With s the score of the sink and m = E e^{score} over the law of the other tokens, n other tokens leave the sink the
share

    share(n) = e^s / (e^s + n m).

This replaces the sum over tokens by its expectation, which is accurate where many of them share the mass. m is
estimated from a pool of N tokens as e^{lse}/N, and everything is computed from logarithms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit
from torch import Tensor

from limitlens.arrays import to_numpy
from limitlens.errors import Array
from limitlens.probing.pilot import Layer
from limitlens.probing.record import Sink
from limitlens.record import to_json

_HALVINGS = 60  # of a bracket of the logarithm: enough for every digit


def layer_sinks(layer: Layer, lse: Tensor, pool: float, sizes: Array, window: int) -> list[Sink] | None:
    """The sink of every head of a layer; None where contexts contain none.

    `lse` (Hkv, G · m) is the log-sum-exp of each query's scores over a pool of so many tokens; shares are taken at
    `sizes` (J,) and in a window.
    """
    if layer.atom is None:
        return None
    m = layer.query.shape[2]
    score, rest = (part.reshape(-1, m) for part in to_numpy(layer.atom.lse, lse))
    kinds = {"first token": layer.first, "learned sink": layer.traits.sinks is not None}
    kind = " and ".join(name for name, present in kinds.items() if present)
    shares = sink_share(sizes[:, None], score[:, None], rest[:, None], pool).mean(-1)
    in_window = sink_share(window - 1, score, rest, pool).mean(-1).tolist()
    lengths = to_json(dilution_length(score, rest, pool))
    return [Sink(kind, *head) for head in zip(shares, in_window, lengths, strict=True)]


def sink_share(n: ArrayLike, sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """Share of the attention mass that the sink has among n other tokens, n (...) broadcast against the queries.

    Per query (...): the score of the sink, and the log-sum-exp of the scores of a pool of `rest_count` other tokens.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(expit(_log_length(sink_score, rest_lse, rest_count) - np.log(np.asarray(n, dtype=float))))


def dilution_length(sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """The n (...) at which the sink's share (`sink_share`), averaged over the queries (..., m), falls to one half.

    For one query it is e^s/m. Below 1 the sink never holds half of the mass.
    """
    lengths = _log_length(sink_score, rest_lse, rest_count)
    low, high = lengths.min(-1), lengths.max(-1)  # at the smallest length every share is at least one half
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        above = expit(lengths - middle[..., None]).mean(-1) > 0.5
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(low + (high - low) / 2))


def _log_length(sink_score: Array, rest_lse: Array, rest_count: float) -> Array:
    """log(e^s / m) per query."""
    return np.asarray(np.asarray(sink_score) - np.asarray(rest_lse) + np.log(rest_count), dtype=float)
