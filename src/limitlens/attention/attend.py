"""Softmax attention of a head over n tokens, computed block by block (`head.limit` is over infinitely many tokens)."""

from typing import Any

import numpy as np
import torch

from limitlens.attention.head import Head, as_head
from limitlens.attention.kernels import state_of
from limitlens.attention.state import State
from limitlens.errors import Array, InputError

BLOCK = 8192  # tokens per block: enough to use all cores, few enough to stay in the cache


def attend(tokens: Any, head: Head, x: Any, *, precise: bool = True, block: int = BLOCK) -> Array:
    """Attention output Γ_n(x) (m, v) over tokens (n, d) for query tokens x (m, d); `precise` computes in float64.

    >>> tokens = np.array([[0.0], [1.0]])
    >>> ll.attend(tokens, ll.Head(1.0), [[0.0], [5.0]]).round(4).tolist()
    [[0.5], [0.9933]]
    """
    return attend_state(tokens, head, x, precise=precise, block=block).output.numpy()


def attend_state(
    tokens: Any, head: Head, x: Any, *, times: float = 1.0, precise: bool = True, block: int = BLOCK
) -> State:
    """Attention of query tokens x (m, d) over tokens (n, d), as a mergeable `State`; `times` multiplies the scores."""
    head = as_head(head)
    dtype = torch.float64 if precise else torch.float32
    if getattr(tokens, "ndim", 2) != 2 or not hasattr(tokens, "__len__") or len(tokens) == 0:
        raise InputError(f"tokens have shape {np.shape(tokens)}; expected (n, {head.dim}) with at least one row")
    points = head.check_tokens("x", x)
    if points.ndim != 2:
        raise InputError(f"x has shape {points.shape}; expected (queries, {head.dim})")
    query = times * head.queries(torch.as_tensor(points, dtype=dtype))
    state = State.empty((), len(points), head.value_dim)
    for start in range(0, len(tokens), block):
        part = torch.as_tensor(head.check_tokens("tokens", tokens[start : start + block]), dtype=dtype)
        state = state.merge(state_of(query, head.keys(part), head.values(part)))
    return state
