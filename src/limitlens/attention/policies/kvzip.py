"""Global threshold on reconstruction scores over all layers and heads, as KVzip divides a cache (Kim et al. 2025)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from limitlens.attention.policies.base import held_first, keep
from limitlens.attention.policies.shared import SharedPolicy

SINKS = 4  # first tokens that every head keeps, as in kvpress's `KVzipPress`


class KVzip(SharedPolicy):
    """Keep the keys of largest reconstruction score among all layers and heads; every head keeps the first tokens."""

    name = "kvzip"
    label = "kvzip: global threshold on reconstruction scores"
    policy = "reconstruction"

    def masks(self, priorities: Sequence[Tensor], total: int) -> list[Tensor]:
        """Masks of the `total` keys of highest priority in the whole model."""
        stacked = held_first(torch.stack(list(priorities)), SINKS)
        return list(keep(stacked.flatten(), total).view_as(stacked))
