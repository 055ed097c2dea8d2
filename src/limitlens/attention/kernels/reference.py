"""The plain kernel: dense softmax. Every other kernel is tested against it in float64."""

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention by forming all scores. See the package docstring for shapes."""
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    return attend_scores(scores, value)


def attend_scores(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-sum-exp (..., m) and outputs (..., m, v) from scores (..., m, n) and values (..., n, v)."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    return lse, weights @ value
