"""CUDA attention kernel with float32 accuracy from half-precision products, over many ranges of tokens in one launch.

Every input is scaled and written as hi + lo, two float16 numbers with 22 bits together. A product is computed as
hi·hi + hi·lo + lo·hi, with a relative error of 2⁻²². Tensor cores truncate while they accumulate (measured on one
H200), so each block of keys has its own accumulator. Long ranges are computed in pieces and merged in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from limitlens.arrays import Lazy
from limitlens.attention.state import Batch

programs = Lazy("limitlens.attention.kernels.programs")  # compiled when first used; triton may be missing

Precision = Literal["fast", "accurate"]
WIDEST = 256  # the largest head size that fits the chip's shared memory
PART = 65_536  # keys that one float32 accumulator sums, at most
SHORT = 1024  # below this number of keys, smaller blocks are faster
SHIFT = 12  # weights are held as 2¹² w: their lower halves stay above float16's smallest normal number longer
CHUNK = 1024  # rows whose products `chunk_sums` adds up in float32
PRODUCT_ROWS = 32  # rows that the program for products reads at a time
NARROW = 64  # width up to which the program for products is faster than a library's batched product
PUT_ROWS = 128  # rows that the program for copies writes at a time
LARGEST = 14  # inputs are scaled to at most 2¹⁴ in size
LOG2E = math.log2(math.e)  # factor of the queries, because the kernel computes scores in units of log 2


def missing() -> str | None:
    """Reason why this machine cannot run the Triton kernel; None if it can."""
    try:
        _ = programs.forward
    except ImportError:
        return "triton is not installed: pip install triton for the fast one"
    return None


def unable(query: Tensor, value: Tensor) -> str | None:
    """Reason why the Triton kernel cannot process tensors like this query and value; None if it can."""
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"heads are wider than {WIDEST} numbers"
    return "numbers are float64" if query.dtype == torch.float64 else missing()


def padded(size: int) -> int:
    """Round `size` up to a size that Triton programs accept: a power of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Halves(Batch):
    """Vectors (B, n, d) as sums of two float16 vectors, (hi + lo) · unit, padded with zeros to (B, n, width)."""

    hi: Tensor
    lo: Tensor  # hi itself, and not read, for bfloat16 vectors, whose bits all fit in hi
    unit: Tensor  # (B,): power of two that scales the halves back


@dataclass(frozen=True)
class Found:
    """Attention results of the Triton kernel, one row per job (queries over a range of keys)."""

    lse: Tensor  # (jobs, m) float64
    output: Tensor  # (jobs, m, v) float64
    peak: Tensor | None = None  # (jobs, m): the largest score; −inf over no keys
    where: Tensor | None = None  # (jobs, m): index of that key, the first among equals; −1 over no keys


def halves(rows: Tensor, factor: float = 1.0, whole: bool = False, size: Tensor | None = None) -> Halves:
    """Write vectors `rows` (B, n, d) times a factor as sums of two float16 vectors.

    `whole` says that one float16 vector is enough (bfloat16). `size` (B,) is max |rows| of each batch, if known.
    """
    batch, n, d = rows.shape
    width = padded(d)
    hi = torch.empty(batch, n, width, dtype=torch.float16, device=rows.device)
    lo = hi if whole else torch.empty_like(hi)
    unit = torch.ones(batch, dtype=torch.float32, device=rows.device)
    if n:
        block = max(1, 4096 // width)
        grid = (-(-n // block), batch)
        if size is None:
            size = torch.zeros_like(unit)
            programs.largest[grid](rows, size, n, *rows.stride(), d, width, block)
        programs.split[grid](rows, hi, lo, size, unit, factor, n, *rows.stride(), d, width, block, LARGEST, whole)
    return Halves(hi, lo, unit)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, precision: Precision = "accurate"
) -> tuple[Tensor, Tensor]:
    """Attention on CUDA by half-precision products: log-sum-exps (..., m) and outputs (..., m, v)."""
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    m, n, v = query.shape[-2], key.shape[-2], value.shape[-1]
    # For each entry of the broadcast batch, its index in the batch of the queries, and in that of the keys.
    batches = (query.shape[:-2], key.shape[:-2])
    places = (torch.arange(math.prod(own), device=query.device).reshape(own) for own in batches)
    which = [place.expand(batch).flatten() for place in places]
    ends = torch.zeros_like(which[0]), torch.full_like(which[0], n)
    if value.shape[:-2] != key.shape[:-2]:
        value = value.expand(*key.shape[:-2], n, v)
    if bias is not None:
        bias = bias.expand(*batch, *bias.shape[-2:]).flatten(0, -3) if batch else bias.reshape(1, *bias.shape[-2:])
    jobs = torch.stack([*which, *ends], 1)
    query, key, value = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
    found = attend_jobs(query, key, value, jobs, longest=n, bias=bias, precision=precision)
    return found.lse.reshape(*batch, m), found.output.reshape(*batch, m, v)


def attend_jobs(
    query: Tensor | Halves, key: Tensor, value: Tensor, jobs: Tensor, *, longest: int, bias: Tensor | None = None,
    peaks: bool = False, precision: Precision = "accurate", sizes: Tensor | None = None,
) -> Found:  # fmt: skip
    """Attention of queries (Bq, m, k) over many ranges of keys (Bk, n, k) and values (Bk, n, v), in one launch.

    Each of the jobs (J, 4) is (index in Bq, index in Bk, start, stop), a range of at most `longest` keys. A bias
    (J, 1 or m, n) is added to the scores. `peaks` asks for the largest scores too. Queries may be given as
    `halves(query, LOG2E)`. `sizes` (2, Bk) are the largest absolute entries of keys and of values, if known.
    """
    v, size = value.shape[-1], (None, None) if sizes is None else sizes
    queries = query if isinstance(query, Halves) else halves(query, LOG2E)
    few = key.dtype == value.dtype == torch.bfloat16
    keys, values = (halves(rows, 1.0, few, own) for rows, own in zip((key, value), size, strict=True))
    # Half-precision products per product: 1 (higher halves), 2 (also lower halves of queries and weights), 3 (all).
    wide = 1 if precision == "fast" else 2 if few else 3
    parts = max(1, -(-longest // PART))
    work = jobs.long()
    if parts > 1:
        begin = torch.arange(parts, device=jobs.device) * PART
        start = work[:, 2, None] + begin
        stop = torch.minimum(start + PART, work[:, 3, None])
        pairs = work[:, None, :2].expand(-1, parts, -1)
        work = torch.cat((pairs, start[..., None], stop[..., None]), -1).flatten(0, 1)
    found = _launch(queries, keys, values, work.contiguous(), v, bias, parts, peaks, wide, longest < SHORT)
    if parts == 1:
        return Found(*found)
    lse, outputs, *others = (part.reshape(len(jobs), parts, *part.shape[1:]).transpose(0, 1) for part in found)
    whole = torch.logsumexp(lse, 0)
    share = torch.exp(lse - whole.masked_fill(torch.isneginf(whole), 0.0))  # lse is −inf over no keys
    output = torch.zeros_like(outputs[0])
    for own, part in zip(share, outputs, strict=True):  # one by one, to save memory
        output.addcmul_(own[..., None], part)
    if not peaks:
        return Found(whole, output)
    peak, best = others[0].max(0)
    return Found(whole, output, peak, others[1].gather(0, best[None])[0])


def _launch(
    query: Halves, key: Halves, value: Halves, work: Tensor, v: int, bias: Tensor | None, parts: int, peaks: bool,
    wide: int, short: bool,
) -> list[Tensor]:  # fmt: skip
    """Run the Triton kernel over `work` (W, 4), jobs or pieces of jobs, and return the fields of `Found` for each."""
    count, dk, dv, device = len(work), key.hi.shape[-1], value.hi.shape[-1], key.hi.device
    m = query.hi.shape[1]
    output = torch.empty(count, m, dv, dtype=torch.float64, device=device)
    rows = torch.empty(1 + peaks, count, m, dtype=torch.float32, device=device)
    where = torch.empty(count, m, dtype=torch.int64, device=device)
    strides = (0, 0)
    if bias is not None:
        bias = bias.contiguous() if bias.stride(2) != 1 else bias
        strides = (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0)
    bm, bn, options = _shape(max(dk, dv), m, short, peaks, wide)
    grid = (-(-m // bm) * count,)
    programs.forward[grid](
        query.hi, query.lo, key.hi, key.lo, value.hi, value.lo, query.unit, key.unit, value.unit, bias, work,
        output, rows, where, m, key.hi.shape[1], count, *strides, parts, dk, dv, bm, bn, wide, bias is not None, peaks,
        SHIFT, **options,
    )  # fmt: skip
    natural = rows.double() / LOG2E
    return [natural[0], output[..., :v], *((natural[1], where) if peaks else ())]


def _shape(width: int, m: int, short: bool, peaks: bool, wide: int) -> tuple[int, int, dict[str, int]]:
    """Numbers of queries and keys per block, and compiler options, that are fast for heads of size `width`."""
    registers = None
    if width > 128:
        bm, bn, warps, stages = 64, 32, 4, 2
    elif width == 64 and wide == 3 and m > 64:
        # 128 registers allow two blocks at a time: one multiplies while the other computes exponentials.
        bm, bn, warps, stages, registers = 128, 64, 8, 2, 128
    elif peaks and (width <= 32 or (short and width == 64)):
        bm, bn, warps, stages = 64, 64, 4, 3
    elif width <= 32 and not short and m > 64:
        bm, bn, warps, stages, registers = 128, 128, 8, 2, 128
    else:
        bm, bn, warps, stages = 128, 64 if short or width == 128 else 128, 8, 2 if width == 128 else 3
    if m <= 64:  # no more rows than there are queries
        bm, warps = min(bm, padded(m)), 4
    options = {"num_warps": warps, "num_stages": stages}
    return bm, bn, options if registers is None else options | {"maxnreg": registers}


def put_rows(store: Tensor, tokens: Tensor, rows: Tensor, special: Tensor, first: int, largest: Tensor | None) -> None:
    """Copy tokens (n, H, d) to `rows` (n,) of a store (·, H, d), and those at `special` again to rows from `first` on.

    With `largest` (H,), one Triton launch also raises it to the largest absolute entry of each head.
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
    """Sums of x and of x xᵀ over chunks of the vectors x = rows (n, H, d) − shift (H, d), in float32.

    Returns pairs (chunks, H, d) and (chunks, H, d, d). `fused` runs the Triton program (default: where it is faster).
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
            rows, shift.contiguous(), first, second, n, heads, d, *rows.stride()[:2], CHUNK, padded(d), PRODUCT_ROWS,
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
