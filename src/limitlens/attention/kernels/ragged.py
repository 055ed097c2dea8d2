"""CUDA attention over rows of different lengths in one buffer: two Triton launches, and one to append new tokens.

Each program reads one part of the keys of one row, for all query heads that share them; a list of parts gives all
programs equal work. A second launch merges the parts of a row by their log-sum-exps. Products are in the number format
of the cache, sums in float32. Tests compare the programs with float64, without a GPU in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import split
from limitlens.attention.kernels.split import padded, programs

# Of the configurations that were tried on one H200, these were the fastest, or within 3% of it.
KEYS = 64  # keys that a program reads at a time
STAGES = 3  # blocks of keys in flight; 2 for wide heads
WARPS = 4  # of a program
QUERIES = 64  # queries of a program, at most
PROGRAMS = 1024  # programs of a launch, about: several for each processor of a large GPU
PART = 256  # keys of a program, at least
MERGED = 16  # parts that are merged at a time
WIDEST = 512  # bytes of a key or value, at most: blocks of larger ones do not fit into a GPU's shared memory


class Parts(NamedTuple):
    """Parts of rows that programs read: the row of each and its first key, and the first part of each row."""

    size: int  # keys of a part
    row: Tensor  # (P,)
    begin: Tensor  # (P,)
    first: Tensor  # (R + 1,)


def able(query: Tensor, value: Tensor) -> bool:
    """Whether the Triton programs can process tensors like this query and value: on CUDA, with triton installed."""
    widest = max(query.shape[-1], value.shape[-1]) * value.element_size()
    return query.device.type == "cuda" and widest <= WIDEST and split.unable(query, value) is None


def part_size(entries: int, queries: int) -> int:
    """Keys of a part, for rows with `entries` keys together, each read by `queries` queries."""
    blocks = -(-queries // QUERIES)
    return max(PART, padded(entries * blocks // PROGRAMS + 1) // 2)


def cut(capacities: Sequence[int], size: int, device: torch.device) -> Parts:
    """Cut rows of `capacities` keys into parts of `size` keys; a row without keys has one empty part."""
    counts = np.maximum(-(-np.asarray(capacities) // size), 1)
    first = np.concatenate([[0], counts.cumsum()])
    row = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(row)) - first[row]) * size
    made = torch.tensor(np.concatenate([row, begin, first]), dtype=torch.int32).to(device, non_blocking=True)
    return Parts(size, made[: len(row)], made[len(row) : -len(first)], made[-len(first) :])


def attend(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, start: Tensor, kept: Tensor, new: int,
    parts: Parts, *, scale: float, softcap: float | None, sinks: Tensor | None, seen: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention outputs (B, Hq, L, v) of queries (B, Hq, L, k); row h·B + b serves the queries of key/value head h.

    Row r has the `kept[r]` + `new` keys of `key` (E, k), and values (E, v), from `start[r]` on. The last L keys are
    those of the queries' own tokens, of which a query sees no later one. `seen` (B, L, new) says which of the new keys
    a query sees.
    """
    batch, heads, length, width = query.shape
    rows, wide = len(start), value.shape[-1]
    groups = heads * batch // rows
    queries, count = groups * length, len(parts.row)
    query = query if query.stride(-1) == 1 else query.contiguous()
    apart = query.new_empty(count, queries, wide, dtype=torch.float32)
    lse = query.new_empty(count, queries, dtype=torch.float32)
    output = query.new_empty(batch, length, heads, wide)
    size = min(padded(queries), QUERIES)
    widen = key.dtype == torch.bfloat16 and key.device.type == "cpu"  # the interpreter has no products in bfloat16
    mask = None if seen is None else seen if seen.stride(-1) == 1 else seen.contiguous()
    programs.ragged[(count, -(-queries // size))](
        query, key, value, key if log_weight is None else log_weight, key if mask is None else mask, start, kept,
        parts.row, parts.begin, apart, lse, scale, softcap or 1.0, new, batch, queries, parts.size,
        *query.stride()[:3], *((0, 0) if mask is None else mask.stride()[:2]), length, groups, width, wide,
        padded(width), padded(wide), size, KEYS, log_weight is not None, mask is not None, softcap is not None, widen,
        num_stages=STAGES if 2 * max(width, wide) * key.element_size() <= WIDEST else 2, num_warps=WARPS,
    )  # fmt: skip
    programs.merge[(rows, queries)](
        apart, lse, parts.first, lse if sinks is None else sinks, output, batch, queries, output.stride(0),
        output.stride(2), output.stride(1), length, groups, wide, padded(wide), MERGED, sinks is not None, num_warps=4,
    )  # fmt: skip
    return output.transpose(1, 2)


def append(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, start: Tensor, kept: Tensor, new: int
) -> None:
    """Write keys (B, H, L, k) and values (B, H, L, v) of L tokens behind the `kept[r]` + `new` entries of each row."""
    batch, _, length, width = new_key.shape
    wide = value.shape[-1]
    new_key, new_value = (part if part.stride(-1) == 1 else part.contiguous() for part in (new_key, new_value))
    programs.append[(len(start), length)](
        new_key, new_value, key, value, start, kept, new, batch, *new_key.stride()[:3], *new_value.stride()[:3],
        width, wide, padded(width), padded(wide), num_warps=1,
    )  # fmt: skip
