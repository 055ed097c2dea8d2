"""Errors and rates measured like the code released with "Token Sample Complexity of Attention".

That code is github.com/leabbt/token-sample-complexity, commit 01ba856 (src/tsc/attention.py and fit.py). Every token is
a query, and errors are those of the mean and covariance of all outputs.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from limitlens.errors import Array
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.statistics.error_curve import ErrorCurve

MOMENTS = ("mean", "covariance")
CHUNK = 512  # keys between two roundings of the running sums in the released code
Moments: TypeAlias = tuple[Tensor, Tensor]
Projected: TypeAlias = tuple[Tensor, ...]  # scaled queries, keys and values, each (heads, n, k)


def moments(parts: Projected, half: bool = False) -> Moments:
    """Mean (v,) and covariance (v, v) of the attention outputs of all queries, outputs of the heads concatenated."""
    rows = output(parts, half).double().transpose(0, 1).flatten(1)
    return rows.mean(0), torch.cov(rows.T, correction=0)


def error_rows(
    draw: Callable[[int], Projected], limit: Moments, sizes: Sequence[int], replicates: int, half: bool = False
) -> Array:
    """Errors (2, replicates, sizes) of the outputs' mean and covariance over samples `draw(n)`, against `limit`."""
    errors = np.empty((2, replicates, len(sizes)))
    for place in np.ndindex(errors.shape[1:]):
        sampled = moments(draw(sizes[place[1]]), half)
        errors[:, *place] = [float((one - exact).norm()) for one, exact in zip(sampled, limit, strict=True)]
    return errors


def slopes(sizes: Sequence[int], rows: Array) -> tuple[Estimate, Estimate]:
    """Rates fitted to errors `rows` (replicates, sizes): by our method, and by the released code's least squares."""
    rate = ErrorCurve.of(tuple(sizes), rows, moment=1).rate
    weight = rows.mean(0) / np.maximum(rows.std(0), 1e-12) * len(rows) ** 0.5
    fit, covariance = np.polyfit(np.log(sizes), np.log(rows.mean(0)), 1, w=weight, cov=True)
    ours = UNKNOWN if rate is None else Estimate(rate.slope, rate.stderr)
    return ours, Estimate(-float(fit[0]), float(np.sqrt(covariance[0, 0])))


def output(parts: Projected, half: bool = False) -> Tensor:
    """Attention outputs (heads, queries, v); `half` rounds to float16 at each step, as the released code does."""
    query, key, value = parts
    if not half:
        return scaled_dot_product_attention(query, key, value, scale=1.0)

    def low(numbers: Tensor) -> Tensor:
        return numbers.half().float()

    query, key, value = map(low, parts)
    top = torch.full((*query.shape[:2], 1), -torch.inf)
    total, sums = torch.zeros_like(top), query.new_zeros(*query.shape[:2], value.shape[-1])
    for start in range(0, key.shape[1], CHUNK):
        scores = low(query @ key[:, start : start + CHUNK].mT)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        kept, weight = low(torch.exp(top - new)), low(torch.exp(scores - new))
        total = low(low(total * kept) + low(weight.sum(-1, keepdim=True)))
        sums = low(low(sums * kept) + low(weight @ value[:, start : start + CHUNK]))
        top = new
    return low(sums / total)
