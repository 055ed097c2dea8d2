"""Key policy that keeps keys to which the last queries attended (SnapKV, Li et al. 2024)."""

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool1d

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.attention.subset import scores_of

WINDOW = 64  # last queries whose attention is averaged
SMOOTH = 7  # width of the moving average over keys: neighbours of an attended key are often needed too


class SnapKV(KeyPolicy):
    """Keep the keys with the largest mean attention weight over the last queries, smoothed over neighbours."""

    name = "snapkv"
    label = "attention of the last queries"
    needs_past = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key: mean softmax weight over query heads and last queries that see it, smoothed over keys."""
        query = inputs.last_queries(WINDOW, self.name)
        length = inputs.key.shape[-2]
        place = torch.arange(length, device=query.device)
        seen = place <= place[length - query.shape[-2] :, None]
        scores = scores_of(query.flatten(-3, -2), inputs.key, inputs.softcap)
        scores = scores.view(*query.shape[:-1], length)  # (..., g, p, n)
        weight = scores.masked_fill(~seen, float("-inf")).softmax(-1).mean(-3).sum(-2) / seen.sum(-2)
        smooth = avg_pool1d(weight.flatten(0, -2)[:, None], SMOOTH, 1, SMOOTH // 2, count_include_pad=False)
        return smooth.view_as(weight)[None, ..., None, :]
