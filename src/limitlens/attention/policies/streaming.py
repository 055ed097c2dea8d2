"""Key policy that keeps the first tokens and the most recent ones (StreamingLLM, Xiao et al. 2024)."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import PolicyInput
from limitlens.attention.policies.recent import Recent

SINKS = 4  # first tokens that are kept before all others


class Streaming(Recent):
    """Keep the keys of the first tokens (attention sinks), then the keys nearest to the query."""

    name = "streaming"
    label = "first and nearest tokens"

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Priority of a key: minus its distance to the query, or a positive number for the first `SINKS` tokens."""
        nearness = super().priority(inputs, draws, generator)
        first = min(SINKS, nearness.shape[-1])
        nearness[..., :first] = torch.arange(first, 0, -1, device=nearness.device)
        return nearness
