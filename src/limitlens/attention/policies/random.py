"""Uniformly random keys, with weights (unbiased, as in the error curves of a probe) or without (plain eviction)."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, Selection, uniform


class RandomEviction(KeyPolicy):
    """Keep keys drawn without replacement, the same for all queries of a draw; the sink is always kept."""

    name = "random_eviction"
    label = "random keys, unweighted"
    sampled = True

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """A uniform number for each key."""
        return uniform(inputs, draws, generator)


class Random(RandomEviction):
    """Keep the same keys with log-weight log(N/n): n keys stand for N, and those always kept stand for themselves."""

    name = "random"
    label = "random keys"
    unbiased = True

    def select_by(self, inputs: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """Keys that are always kept have log-weight 0."""
        mask = super().select_by(inputs, priority, counts).mask
        every = torch.ones_like(mask) if inputs.seen is None else inputs.seen
        total, kept = (part[..., inputs.held :].sum(-1, keepdim=True) for part in (every, mask))
        weight = torch.log(total / kept.clamp_min(1)).expand(mask.shape).clone()
        weight[..., : inputs.held] = 0
        return Selection(mask, weight)
