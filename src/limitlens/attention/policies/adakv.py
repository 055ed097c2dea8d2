"""SnapKV scores compared across the heads of a layer, with a floor for each head (AdaKV, Feng et al. 2024)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from limitlens.attention.policies.base import keep
from limitlens.attention.policies.shared import SharedPolicy
from limitlens.attention.policies.snapkv import WINDOW

FLOOR = 0.2  # share of its equal budget that every head keeps, as in kvpress's `AdaKVPress`


class AdaKV(SharedPolicy):
    """Keep in each layer the keys of largest SnapKV score of all its heads, and the last `WINDOW` keys in all heads."""

    name = "adakv"
    label = "adakv: SnapKV scores shared in the layer"
    policy = "snapkv"

    def masks(self, priorities: Sequence[Tensor], total: int) -> list[Tensor]:
        """Masks with the same number of keys in each layer; a head keeps at least `FLOOR` of an equal division."""
        each = total // len(priorities)
        found = []
        for scores in priorities:
            heads, length = scores.shape
            recent = torch.arange(length, device=scores.device) >= length - WINDOW
            scores = scores.float().masked_fill(recent, float("inf"))
            scores = scores.masked_fill(keep(scores, int(FLOOR * each / heads)), float("inf"))
            found.append(keep(scores.flatten(), each).view_as(scores))
        return found
