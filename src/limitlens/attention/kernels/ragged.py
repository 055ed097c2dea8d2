"""CUDA attention over rows of different lengths in one buffer, in one Triton launch; not measured on a GPU so far.

Each program reads one part of the keys of one row, for all query heads that share them. The parts of a row are merged
by their log-sum-exps. Products are in the number format of the cache, sums in float32. Tests compare the program with
plain attention in Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from limitlens.attention.kernels import split
from limitlens.attention.kernels.split import padded, programs

KEYS = 64  # keys that a program reads at a time
QUERIES = 64  # queries of a program, at most
PROGRAMS = 1024  # programs of a launch, about: several for each processor of a large GPU
PART = 256  # keys of a program, at least
WIDEST = 512  # bytes of a key or value, at most: blocks of larger ones do not fit into a GPU's shared memory


def able(query: Tensor, value: Tensor) -> bool:
    """Whether the Triton program can process tensors like this query and value: on CUDA, with triton installed."""
    widest = max(query.shape[-1], value.shape[-1]) * value.element_size()
    return query.device.type == "cuda" and widest <= WIDEST and split.unable(query, value) is None


def attend(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, start: Tensor, end: Tensor,
    *, scale: float, softcap: float | None, length: int, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of queries (R, G·L, k), row by row: log-sum-exps (R, G·L) and outputs (R, G·L, v) in float32.

    Row r has the keys `start[r]` to `end[r]` of `key` (E, k), and values (E, v), at most `longest` of them. The last
    L = `length` keys are those of the queries' own tokens, of which a query sees no later one.
    """
    rows, queries, width = query.shape
    wide = value.shape[-1]
    part = max(PART, padded(-(-longest * rows // PROGRAMS)))
    parts = -(-longest // part)
    output = query.new_empty(rows, parts, queries, wide, dtype=torch.float32)
    lse = query.new_empty(rows, parts, queries, dtype=torch.float32)
    size = min(padded(queries), QUERIES)
    widen = key.dtype == torch.bfloat16 and key.device.type == "cpu"  # the interpreter has no products in bfloat16
    programs.ragged[(rows, parts, -(-queries // size))](
        query.contiguous(), key, value, key if log_weight is None else log_weight, start, end, output, lse,
        scale, softcap or 1.0, length, queries, width, wide, part, padded(width), padded(wide), size, KEYS,
        log_weight is not None, softcap is not None, widen,
    )  # fmt: skip
    if parts == 1:
        return lse[:, 0], output[:, 0]
    total = lse.logsumexp(1)
    return total, (torch.exp(lse - total[:, None])[..., None] * output).sum(1)
