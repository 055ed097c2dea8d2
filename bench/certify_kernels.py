"""CUDA kernels of certified reads (rule "int4") for one decoded token, without a host in between.

They are slower than full attention (see docs/certify.md), so they are beside the benchmark and not in the library.
`predict` computes all scores from a packed 4-bit copy of the keys, `draw` and `check` take the first sample, and
`read`, one program for each query that did not pass, enlarges it. Queries that never pass read everything in `whole`.
The rule is that of `limitlens.attention.certified`, with these differences: predicted scores, scales and
offsets are float16; a larger sample is the smallest of 16 sizes that should pass; quantiles are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from limitlens.arrays import Lazy
from limitlens.attention import certified as rule
from limitlens.attention.kernels.split import padded

programs = Lazy("bench.certify_programs")  # compiled when first used; triton may be missing

PART = 16  # groups of a program of `predict`
SCAN, KEYS, LEVELS = 2048, 32, 16  # keys scanned at a time, and gathered at a time; sizes tried for the next sample
SPLITS, DRAWN = 4, 640  # programs that draw the first sample of a query, and most keys of each
DRAW, READ = {"num_warps": 4}, {"num_warps": 8, "num_stages": 1, "maxnreg": 128}  # launches of `draw` and `read`
SPLIT = 2048  # keys of a program, for queries that read everything


@dataclass(frozen=True, eq=False)
class PackedKeys:
    """A 4-bit copy of keys (b, h, n, k) in groups of 64: codes (b, h, groups, 64, k/4), steps and offsets."""

    codes: Tensor  # int16, four channels in a word
    step: Tensor  # (b, h, groups, k) float16
    low: Tensor  # a number is low + step · (16 + code)

    @classmethod
    def of(cls, key: Tensor) -> PackedKeys:
        """Round keys (b, h, n, k) to 16 levels by channel and group; k is a multiple of 64."""
        groups = rule._grouped(key.float(), rule.GROUP)
        lowest = groups.amin(-2, keepdim=True)
        step = ((groups.amax(-2, keepdim=True) - lowest) / 15).clamp_min(1e-6).half()
        low = (lowest - 16 * step.float()).half()
        code = ((groups - low.float()) / step.float() - 16).round_().clamp_(0, 15).to(torch.int16)
        first, second, third, fourth = code.chunk(4, -1)
        codes = first | second << 4 | third << 8 | fourth << 12
        return cls(codes, step.squeeze(-2).contiguous(), low.squeeze(-2).contiguous())


def attend(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedKeys, promise: tuple[float, float],
    *, scale: float, seed: int = 0, much: float = rule.MUCH, kept: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs (b, H, v) in float32 of queries (b, H, k) to keys and values (b, h, n, k), and numbers of keys read.

    A query whose sample would hold more than the share `much` of its keys reads all. `kept` gets intermediate tensors.
    """
    (batch, heads, dim), (kv_heads, n) = query.shape, key.shape[1:3]
    rows, pairs, groups, of = batch * heads, batch * kv_heads, heads // kv_heads, packed.codes.shape[2]
    parts, splits = -(-of // PART), -(-n // SPLIT)
    room = int(min(1.0, much + 0.05) * n) + rule.SINKS + rule.WINDOW + 1024
    real, whole = partial(query.new_empty, dtype=torch.float32), partial(query.new_empty, dtype=torch.int32)
    scores = query.new_empty(rows, n, dtype=torch.float16)
    peak, mass, output, sums = real(rows, parts), real(rows, parts), real(batch, heads, dim), real(rows, splits, dim)
    count, everything = whole(rows), whole(rows)
    wide, narrow = padded(groups), 1 << (groups - 1).bit_length()
    shape: dict[str, float] = {"SINKS": rule.SINKS, "WINDOW": rule.WINDOW, "G": groups, "D": dim}
    programs.predict[(pairs, parts)](
        query, packed.codes, packed.step, packed.low, real(pairs, of, max(8, narrow)), scores, peak, mass, scale, n, of,
        GP=max(8, narrow), GS=narrow, GROUP=rule.GROUP, PART=PART, FAST=query.is_cuda, **shape,
    )  # fmt: skip
    planned, checked = rule.quantiles(promise[1], query.device)
    first = max(float(rule.FEWEST), rule.FIRST * n)
    shape |= {"DEFENSIVE": rule.DEFENSIVE, "PARTS": padded(parts), "BN": KEYS}
    steps = {"ROWS": rule.DIRECTIONS, "COLUMNS": rule.DEGREES, "ROW_STEP": rule.FREEDOM, "COLUMN_STEP": rule.DEGREE}
    drawn = (whole(rows, SPLITS, DRAWN), real(rows, SPLITS, DRAWN), real(rows, SPLITS), real(rows, SPLITS),
             real(rows, SPLITS, dim), whole(rows, SPLITS), whole(rows, SPLITS))  # fmt: skip
    programs.draw[(rows, SPLITS)](
        query, key, value, scores, peak, mass, *drawn, seed, scale, first, n, parts, -(-n // SPLITS), SCAN=SCAN,
        ROOM=DRAWN, **shape, **DRAW,
    )  # fmt: skip
    programs.check[(rows,)](
        value, scores, peak, mass, checked, *drawn, output, count, everything, promise[0], first, n, parts,
        UNSURE=rule.UNSURE, SPLITS=SPLITS, ROOM=DRAWN, **shape, **steps,
    )  # fmt: skip
    least, most = rule.GROWTH
    programs.read[(rows,)](
        query, key, value, scores, peak, mass, checked, planned, whole(rows, room), real(rows, room), output, count,
        everything, seed, scale, promise[0], first, n, room, parts, STAGES=rule.STAGES, UNSURE=rule.UNSURE,
        LEAST=least, MOST=most, MUCH=much, SCAN=SCAN, LEVELS=LEVELS, **shape, **steps, **READ,
    )  # fmt: skip
    peak, mass = real(rows, splits), real(rows, splits)
    programs.whole[(pairs, splits)](
        query, key, value, everything, sums, peak, mass, scale, n, SPLIT, groups, wide, dim, 64
    )
    programs.merge[(rows,)](everything, sums, peak, mass, output, splits, dim, padded(splits))
    if kept is not None:
        kept |= {"scores": scores, "whole": everything}
    return output, count.view(batch, heads)
