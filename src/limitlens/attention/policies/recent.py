"""The nearest keys: a sliding window."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class Recent(KeyPolicy):
    """Those nearest to the query."""

    name = "recent"
    words = "the nearest tokens"
    ordered = True

    def priority(self, sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Minus the distance to the query."""
        if sight.position is None:
            given = "pooled tokens have no order"
            raise InputError(f"{given}; expected another choice than {self.name!r}, such as 'random'")
        place = torch.arange(sight.key.shape[-2], device=sight.key.device)
        nearness = -(place - sight.position[:, None]).abs()
        return nearness.reshape(*(1,) * (sight.key.ndim - 1), *nearness.shape)
