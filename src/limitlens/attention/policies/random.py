"""Random keys: what error curves measure. With weights they are unbiased; without them they are plain eviction."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, Selection, uniform


class Unweighted(KeyPolicy):
    """Keys drawn without replacement, the same for all queries of a draw; a sink is always among them."""

    name = "unweighted"
    words = "random keys, unweighted"
    sampled = True

    def priority(self, sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """A uniform number for each key."""
        return uniform(sight, draws, generator)


class Random(Unweighted):
    """The same keys, each with the weight log(N/n): n of them stand for N, and what is always kept does not grow."""

    name = "random"
    words = "random keys"
    unbiased = True

    def kept(self, sight: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """Keys that are always held weigh as they are."""
        kept = super().kept(sight, priority, counts)
        every = torch.ones_like(kept.mask) if sight.seen is None else sight.seen
        there, taken = (part[..., sight.held :].sum(-1, keepdim=True) for part in (every, kept.mask))
        weight = torch.log(there / taken.clamp_min(1)).expand(kept.mask.shape).clone()
        weight[..., : sight.held] = 0
        return Selection(kept.mask, weight)
