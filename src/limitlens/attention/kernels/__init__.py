"""Kernels: attention of a batch of queries over one block of tokens.

A kernel is a function

    kernel(query (..., m, k), key (..., n, k), value (..., n, v), bias (..., 1 or m, n) or None) -> (lse (..., m), output (..., m, v))

that computes scores <query, key> + bias (the scale is already in the query) in the tensors' own precision. Another device
is another such function; `state_of` turns what it returns into a float64 state. A query none of whose scores is finite gets lse = −inf
and output 0. On a CUDA device there are three of them by name: "accurate" (`split`, float32 to a few 1e-6, the default), "fast" (the same with
one half-precision product for three, to 1e-3) and "exact" (the plain one, float32 throughout).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from limitlens.attention.kernels import cpu, reference, split
from limitlens.attention.kernels.detail import detail_of
from limitlens.attention.state import State

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Precision: TypeAlias = Literal["fast", "accurate", "exact"]


def kernel_for(query: Tensor, value: Tensor, precision: Precision = "accurate") -> Kernel:
    """The best kernel for tensors like these; the plain one where there is no better, or where it is asked for."""
    if precision == "exact" or (query.device.type != "cpu" and split.unable(query, value)):
        return reference.attend
    return cpu.attend if query.device.type == "cpu" else partial(split.attend, precision=precision)


def state_of(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, top: int = 0, kernel: Kernel | None = None
) -> State:
    """The state of a block of n ≥ 0 tokens: shapes as in a kernel, where a bias of −inf masks a token.

    With `top` > 0 it carries its `Detail`, with that many top scores. Default kernel: the best for the device.
    """
    n = key.shape[-2]
    if n == 0:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
        return State.empty(batch, query.shape[-2], value.shape[-1], top=top, device=query.device)
    lse, output = (kernel or kernel_for(query, value))(query, key, value, bias)
    detail = None
    if top:
        scores = query @ key.transpose(-1, -2)
        detail = detail_of(scores if bias is None else scores + bias, value, lse, top)
    count = torch.full(lse.shape[:-1], n, dtype=torch.int64, device=query.device)
    return State(count, lse.double(), output.double(), detail)


def state_of_scores(scores: Tensor, value: Tensor, *, top: int = 0) -> State:
    """The state of one block whose scores (..., m, n ≥ 1) were formed, over values (..., n, v)."""
    lse, output = reference.attend_scores(scores, value)
    detail = detail_of(scores, value, lse, top) if top else None
    count = torch.full(lse.shape[:-1], scores.shape[-1], dtype=torch.int64, device=scores.device)
    return State(count, lse.double(), output.double(), detail)
