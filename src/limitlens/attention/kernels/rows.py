"""Moving and summing rows of tokens: plain torch on a CPU, one Triton program each on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from limitlens.attention.kernels.split import missing, padded, programs

CHUNK = 1024  # rows whose products are summed in float32
BLOCK = 32  # rows that the program for products reads at a time
NARROW = 64  # width up to which our program is faster than a library's batched product
PUT_ROWS = 128  # rows that the program for copies writes at a time


def put_rows(store: Tensor, tokens: Tensor, rows: Tensor, special: Tensor, first: int, largest: Tensor | None) -> None:
    """Copy tokens (n, H, d) to `rows` (n,) of a store (·, H, d), and the `special` ones (s,) to rows from `first` on.

    With `largest` (H,), which grows to the largest |number| of each head, a Triton program does it in one launch.
    """
    n, heads, d = tokens.shape
    if largest is not None:
        tokens = tokens if tokens.stride()[1:] == (d, 1) else tokens.contiguous()
        programs.put[(-(-(n + len(special)) // PUT_ROWS), heads)](
            tokens, store, largest, rows, special, n, len(special), first, heads, d, tokens.stride(0),
            padded(d), PUT_ROWS,
        )  # fmt: skip
        return
    target, source = store.flatten(1), tokens.flatten(1)
    # Copied as 8-byte numbers where alignment allows, which is faster.
    ends = (part.element_size() * size for part in (target, source) for size in (part.shape[1], part.storage_offset()))
    if target.is_contiguous() and source.is_contiguous() and not any(end % 8 for end in ends):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.index_copy_(0, rows, source)
    if len(special):
        target[first : first + len(special)] = source.index_select(0, special)


def chunk_sums(rows: Tensor, shift: Tensor, fused: bool | None = None) -> list[tuple[Tensor, Tensor]]:
    """Sums of x and of x xᵀ for x = rows (n, H, d) − shift (H, d), in float32 over chunks of rows.

    Returns pairs (chunks, H, d) and (chunks, H, d, d). `fused` runs the Triton program; by default where it is faster.
    """
    n, heads, d = rows.shape
    if fused is None:
        fused = rows.device.type != "cpu" and d <= NARROW and missing() is None
    if fused:
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        chunks = -(-n // CHUNK)
        first = shift.new_empty(chunks, heads, d, dtype=torch.float32)
        second = shift.new_empty(chunks, heads, d, d, dtype=torch.float32)
        programs.products[(chunks, heads)](
            rows, shift.contiguous(), first, second, n, heads, d, *rows.stride()[:2], CHUNK, padded(d), BLOCK,
            num_warps=2, num_stages=3,
        )  # fmt: skip
        return [(first, second)]
    chunk = max(CHUNK, 4 * d)
    whole = n - n % chunk
    sums = []
    for part in (rows[:whole].reshape(-1, chunk, heads, d), rows[None, whole:]):
        if part.numel():
            # Heads before rows, so that every product reads contiguous memory.
            centred = shift.new_empty(len(part), heads, part.shape[1], d)
            torch.sub(part.transpose(1, 2), shift[:, None], out=centred)
            sums.append((centred.sum(2), centred.mT @ centred))
    return sums
