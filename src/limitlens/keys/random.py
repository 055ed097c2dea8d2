"""Random keys: what error curves measure, and what a plan counts."""

import torch
from torch import Tensor

from limitlens.keys.sight import Choice, Sight


class Random(Choice):
    """Keys drawn without replacement, the same for all queries of a draw; a sink is always among them."""

    name = "random"
    words = "random keys"

    def priority(self, sight: Sight, draws: int, generator: torch.Generator) -> Tensor:
        """A uniform number for each key."""
        scores = sight.scores
        chance = torch.rand(draws, *(1,) * (scores.ndim - 1), scores.shape[-1], generator=generator).to(scores.device)
        chance[..., : sight.held] += 1
        return chance
