"""CUDA kernels of certified reads (rule "int4") for one decoded token, without a host in between.

`predict` computes all scores from a packed 4-bit copy of the keys. `read`, one program for each query, samples keys,
attends to them and enlarges the sample until its estimated error passes. Queries that do not pass read everything in
`whole`. The rule is that of `limitlens.attention.certified`, with these differences: predicted scores, scales and
offsets are float16; a larger sample is the smallest of 16 sizes that should pass; quantiles are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import Lazy
from limitlens.attention import certified as rule
from limitlens.attention.kernels.split import padded
from limitlens.theory.certificates import error_quantile

programs = Lazy("limitlens.attention.kernels.read_programs")  # compiled when first used; triton may be missing

FREEDOMS, DEGREES = 32, 96  # rows and columns of a table of quantiles: effective directions, degrees of freedom
ROW_STEP, COLUMN_STEP = float(np.log(512)) / (FREEDOMS - 1), float(np.log(1e6)) / (DEGREES - 1)
PART, SCAN, KEYS, LEVELS = 8, 2048, 64, 16  # groups of a program; keys scanned and gathered at a time; sizes tried
LAUNCH = {"num_warps": 8, "num_stages": 1, "maxnreg": 128}  # of `read`: several programs on a processor
SPLIT = 2048  # keys of a program, for queries that read everything


@dataclass(frozen=True, eq=False)
class PackedKeys:
    """A 4-bit copy of keys (b, h, n, k) in groups of 64: codes (b, h, groups, 64, k/4), steps and offsets."""

    codes: Tensor  # int16, four channels in a word
    step: Tensor  # (b, h, groups, k) float16
    low: Tensor

    @classmethod
    def of(cls, key: Tensor) -> PackedKeys:
        """Round keys (b, h, n, k) to 16 levels by channel and group; k is a multiple of 64."""
        groups = rule._grouped(key.float(), rule.GROUP)
        low = groups.amin(-2, keepdim=True).half()
        step = ((groups.amax(-2, keepdim=True) - low.float()) / 15).clamp_min(1e-6).half()
        code = ((groups - low.float()) / step.float()).round_().clamp_(0, 15).to(torch.int16)
        first, second, third, fourth = code.chunk(4, -1)
        codes = first | second << 4 | third << 8 | fourth << 12
        return cls(codes, step.squeeze(-2).contiguous(), low.squeeze(-2).contiguous())


@lru_cache
def tables(delta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logarithms of the quantiles that check a sample and that plan the next, by log f and log ν."""
    f, nu = np.exp(ROW_STEP * np.arange(FREEDOMS))[:, None], np.exp(COLUMN_STEP * np.arange(DEGREES))
    found = error_quantile(1.0, 1 / f, delta / 2, nu), error_quantile(1.0, 1 / f + 0 * nu, delta)
    checked, planned = (torch.from_numpy(np.log(part)).float().to(device) for part in found)
    return checked, planned


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
    new = query.new_empty
    scores, peak, mass = new(rows, n, dtype=torch.float16), new(rows, parts).float(), new(rows, parts).float()
    output, sums = new(batch, heads, dim).float(), new(rows, splits, dim).float()
    listed, exact = new(rows, room, dtype=torch.int32), new(rows, room).float()
    count, everything = new(rows, dtype=torch.int32), new(rows, dtype=torch.int32)
    wide = padded(groups)
    programs.predict[(pairs, parts)](
        query, packed.codes, packed.step, packed.low, scores, peak, mass, scale, n, of, rule.SINKS, rule.WINDOW,
        groups, wide, dim, rule.GROUP, PART,
    )  # fmt: skip
    first = max(float(rule.FEWEST), rule.FIRST * n)
    programs.read[(rows,)](
        query, key, value, scores, peak, mass, *tables(promise[1], query.device), listed, exact, output, count,
        everything, seed, scale, promise[0], first, n, room, parts, rule.SINKS, rule.WINDOW, rule.DEFENSIVE,
        rule.STAGES, rule.UNSURE, *rule.GROWTH, much, groups, dim, padded(parts), SCAN, KEYS, LEVELS, FREEDOMS,
        DEGREES, ROW_STEP, COLUMN_STEP, **LAUNCH,
    )  # fmt: skip
    peak, mass = new(rows, splits).float(), new(rows, splits).float()
    programs.whole[(pairs, splits)](
        query, key, value, everything, sums, peak, mass, scale, n, SPLIT, groups, wide, dim, KEYS
    )
    programs.merge[(rows,)](everything, sums, peak, mass, output, splits, dim, padded(splits))
    if kept is not None:
        kept |= {"scores": scores, "list": listed, "whole": everything}
    return output, count.view(batch, heads)
