"""The first tokens and the nearest: the usual rule of sinks and a sliding window."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import PolicyInput
from limitlens.attention.policies.recent import Recent

SINKS = 4  # first tokens that are kept before all others


class SinksRecent(Recent):
    """The first tokens and those nearest to the query."""

    name = "sinks"
    words = "first tokens and the nearest"

    def priority(self, sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Minus the distance to the query; the first tokens before all others, the very first before these."""
        nearness = super().priority(sight, draws, generator)
        first = min(SINKS, nearness.shape[-1])
        nearness[..., :first] = torch.arange(first, 0, -1, device=nearness.device)
        return nearness
