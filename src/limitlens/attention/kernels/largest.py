# mypy: ignore-errors
"""Triton program of reconstruction scores: the largest attention weight of each key over many queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # queries and keys of a product
PIECES = 8  # parts of the queries, which run beside each other


@triton.jit
def program(
    QUERY, KEY, TOTAL, OUT, queries, keys, part, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest scale <q, k> − total over a part of the queries (heads · queries, D), for KEY (heads · keys, D)."""
    head, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    j, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    turned = tl.load(KEY + (head * keys + j[None, :]) * D + c[:, None], mask=j[None, :] < keys, other=0.0)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(piece * part, tl.minimum((piece + 1) * part, queries), BLOCK):
        i = first + tl.arange(0, BLOCK)
        q = tl.load(QUERY + (head * queries + i[:, None]) * D + c[None, :], mask=i[:, None] < queries, other=0.0)
        total = tl.load(TOTAL + head * queries + i, mask=i < queries, other=float("inf"))
        best = tl.maximum(best, tl.max(tl.dot(q, turned) * scale - total[:, None], 0))
    tl.store(OUT + (piece * tl.num_programs(1) + head) * keys + j, best, mask=j < keys)


def largest_weights(query: Tensor, key: Tensor, total: Tensor, scale: float) -> Tensor:
    """Largest exp(scale <q, k> − total) of keys (heads, n, k) over queries (heads, m, k) with totals (heads, m)."""
    heads, queries, width = query.shape
    keys = key.shape[1]
    out = torch.empty(PIECES, heads, keys, device=query.device)
    part = triton.cdiv(queries, PIECES * BLOCK) * BLOCK
    given = (*(one.contiguous() for one in (query, key, total)), out, queries, keys, part, scale)
    program[(triton.cdiv(keys, BLOCK), heads, PIECES)](*given, D=width, BLOCK=BLOCK, num_warps=8)
    return out.amax(0).exp()
