"""The detail of a state, from the scores of one block. It forms the scores, so blocks should be small."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from limitlens.attention.state import Detail


def detail_of(scores: Tensor, value: Tensor, lse: Tensor, top: int) -> Detail:
    """Everything diagnostics need from the scores (..., m, n ≥ 1) of values (..., n, v) and their log-sum-exp."""
    level = lse.masked_fill(torch.isneginf(lse), 0.0)
    below = scores - level[..., None]
    weights = torch.exp(below)
    # The mean score relative to the block's own lse, in which nothing cancels when the entropy is taken.
    score = level.double() + torch.linalg.vecdot(weights, below.masked_fill(torch.isneginf(scores), 0.0)).double()
    # Of the block's own lse, so the largest weight is at least 1/n and its square cannot vanish.
    squares = weights.square_()
    mass = squares.sum(-1)
    both = squares @ torch.cat((value, value.square()), -1) / mass.clamp_min(torch.finfo(mass.dtype).tiny)[..., None]
    mean2, square2 = both.chunk(2, -1)
    peaks, order = scores.topk(min(max(top, 2), scores.shape[-1]), -1)
    best, ties = _best(scores, value, peaks, order)
    parts = {
        "score": score,
        "lse2": 2 * level + mass.log(),
        "mean2": mean2,
        "square2": square2,
        "top_scores": pad(peaks[..., :top], (0, max(top - peaks.shape[-1], 0)), value=float("-inf")),
        "top_value": best,
        "ties": ties,
    }
    return Detail(**{name: tensor.double() for name, tensor in parts.items()})


def _best(scores: Tensor, value: Tensor, peaks: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Mean value over the tokens with the largest score, and their number; ties are rare and cost a second look."""
    peak = peaks[..., :1]
    masked = torch.isneginf(peak)
    if peaks.shape[-1] > 1 and bool((peaks[..., 1:2] == peak).any()):
        winners = ((scores == peak) & ~masked).to(scores.dtype)
        ties = winners.sum(-1)
        return winners @ value / ties.clamp_min(1)[..., None], ties
    values = value.expand(*scores.shape[:-2], *value.shape[-2:])
    first = order[..., :1].expand(*order.shape[:-1], value.shape[-1])
    return values.gather(-2, first).masked_fill(masked, 0.0), (~masked[..., 0]).to(scores.dtype)
