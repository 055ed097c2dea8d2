"""Heads that keep their whole cache beside heads that keep first and recent tokens (DuoAttention, Xiao et al. 2024)."""

import numpy as np
from numpy.typing import NDArray

from limitlens.attention.policies.streaming import SINKS
from limitlens.errors import Array

WINDOW = 1 / 16  # share of the context that the other heads keep of the most recent tokens


def whole_heads(gain: Array, context: int, total: int) -> NDArray[np.intp]:
    """Numbers of keys (layers, heads): the whole context where `gain` is largest, `SINKS` and a window elsewhere.

    As many heads are whole as `total` keys allow; the rest lengthens the windows. DuoAttention learns which heads are
    whole by optimising gates; here `gain` is what a plan measures to be lost by the window.
    """
    short = min(SINKS + round(WINDOW * context), total // gain.size)
    keys = np.full(gain.shape, short, dtype=np.intp)
    whole = (total - keys.sum()) // (context - short) if context > short else gain.size
    keys.flat[np.argsort(-gain, axis=None, kind="stable")[: int(whole)]] = context
    others = keys < context
    if others.any():
        keys[others] = min(context, short + int(total - keys.sum()) // int(others.sum()))
    return keys
