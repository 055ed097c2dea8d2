"""The first tokens and the nearest: the usual rule of sinks and a sliding window."""

import torch
from torch import Tensor

from limitlens.errors import InputError
from limitlens.keys.sight import Choice, Sight

SINKS = 4  # first tokens that are kept before all others


class Recent(Choice):
    """The first tokens and those nearest to the query."""

    name = "recent"
    words = "first tokens and the nearest"
    ordered = True

    def priority(self, sight: Sight, draws: int, generator: torch.Generator) -> Tensor:
        """Minus the distance to the query; the first tokens before all others."""
        if sight.position is None:
            raise InputError("pooled tokens have no order; expected another choice than 'recent', such as 'random'")
        length = sight.scores.shape[-1]
        recency = -(torch.arange(length, device=sight.scores.device) - sight.position[:, None]).abs()
        recency[:, :SINKS] += length
        return recency.reshape(*(1,) * (sight.scores.ndim - 1), *recency.shape)
