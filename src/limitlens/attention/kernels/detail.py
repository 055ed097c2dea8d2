"""The detail of a state, from the scores of one block. It forms the scores, so blocks should be small."""

from __future__ import annotations

import torch
from torch import Tensor

from limitlens.attention.state import Detail


def detail_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: Tensor, top: int) -> Detail:
    """Everything diagnostics need from the scores of m queries over n ≥ 1 tokens; shapes as the package says."""
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    masked = torch.isneginf(scores)
    weights = torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    peaks = scores.topk(min(top, scores.shape[-1]), -1).values
    peak = peaks[..., :1]
    doubled = torch.exp(2 * (scores - peak.masked_fill(torch.isneginf(peak), 0.0)))
    mass = doubled.sum(-1, keepdim=True)
    share = doubled / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    missing = top - peaks.shape[-1]
    winners = ((scores == peak) & ~masked).to(scores.dtype)
    ties = winners.sum(-1)
    parts = {
        "score": (weights * scores.masked_fill(masked, 0.0)).sum(-1),
        "lse2": (2 * peak + mass.log())[..., 0],
        "mean2": share @ value,
        "square2": share @ value**2,
        "top_scores": torch.nn.functional.pad(peaks, (0, missing), value=float("-inf")),
        "top_value": winners @ value / ties.clamp_min(1)[..., None],
        "ties": ties,
    }
    return Detail(**{name: tensor.double() for name, tensor in parts.items()})
