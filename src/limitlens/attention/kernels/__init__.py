"""Kernels: attention of a batch of queries over one block of tokens.

A kernel is a function

    kernel(query (..., m, k), key (..., n, k), value (..., n, v), bias (..., 1 or m, n) or None) -> (lse (..., m), output (..., m, v))

that computes scores <query, key> + bias (the scale is already in the query) in the tensors' own precision. Another device
is another such function; `state_of` turns what it returns into a float64 state. A query none of whose scores is finite gets lse = −inf
and output 0. On a CUDA device there are three of them by name: "accurate" (`split`, float32 to a few 1e-6, the default), "fast" (the same with
one half-precision product for three, to 1e-3) and "exact" (the plain one, float32 throughout).
"""  # noqa: E501

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from limitlens.attention.kernels import cpu, reference, split
from limitlens.attention.state import State
from limitlens.errors import InputError

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Precision: TypeAlias = Literal["fast", "accurate", "exact"]


WORDS: dict[Precision, str] = {
    "fast": "half-precision products, to about 1e-3",
    "accurate": "float32 accuracy from half-precision products, to about 1e-6",
    "exact": "plain float32",
}


def as_precision(name: str) -> Precision:
    """The precision of this name."""
    if name not in WORDS:
        raise InputError(f"the precision is {name!r}; expected {', '.join(WORDS)}, of which accurate is the usual one")
    return name


def kernel_for(query: Tensor, value: Tensor, precision: Precision = "accurate") -> Kernel:
    """The kernel for tensors like these; the plain one on a GPU where there is no better, or where it is asked for."""
    if query.device.type == "cpu":
        return cpu.attend
    if precision == "exact" or split.unable(query, value) is not None:
        return reference.attend
    return partial(split.attend, precision=precision)


def kernel_words(like: Tensor, precision: Precision) -> str:
    """Which kernel that is, for queries and values like these, and why where it is not the one asked for."""
    if like.device.type == "cpu":
        return "float32"
    instead = None if precision == "exact" else split.unable(like, like)
    return f"{precision}: {WORDS[precision]}" if instead is None else f"exact: {WORDS['exact']}, since {instead}"


def state_of(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, kernel: Kernel | Precision = "accurate"
) -> State:
    """The state of a block of n ≥ 0 tokens: shapes as in a kernel, which may be given by its precision.

    A bias of −inf masks a token.
    """
    n = key.shape[-2]
    if n == 0:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
        return State.empty(batch, query.shape[-2], value.shape[-1], device=query.device)
    lse, output = (kernel if callable(kernel) else kernel_for(query, value, kernel))(query, key, value, bias)
    count = torch.full(lse.shape[:-1], n, dtype=torch.int64, device=query.device)
    return State(count, lse.double(), output.double())
