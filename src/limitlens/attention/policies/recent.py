"""Key policy that keeps the most recent keys: a sliding window."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class Recent(KeyPolicy):
    """Keep the keys nearest to the query."""

    name = "recent"
    label = "nearest tokens"
    ordered = True

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Priority of a key: minus its distance to the query, in tokens."""
        if inputs.position is None:
            given = "pooled tokens have no order"
            raise InputError(f"{given}; {self.name!r} ranks keys by position, so choose another, such as 'random'")
        place = torch.arange(inputs.key.shape[-2], device=inputs.key.device)
        nearness = -(place - inputs.position[:, None]).abs()
        return nearness.reshape(*(1,) * (inputs.key.ndim - 1), *nearness.shape)
