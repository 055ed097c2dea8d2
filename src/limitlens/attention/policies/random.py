"""Key policies that keep uniformly random keys, with log-weights that make sums unbiased or without."""

import torch
from torch import Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, Selection, uniform


class RandomEviction(KeyPolicy):
    """Keep random keys, the same for all queries, drawn without replacement; attention sinks are always kept."""

    name = "random_eviction"
    label = "random keys, unweighted"
    sampled = True

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Priority of a key: a uniform random number."""
        return uniform(inputs, draws, generator)


class Random(RandomEviction):
    """Keep n random keys of N with log-weight log(N/n), so that sums are unbiased; attention sinks are always kept."""

    name = "random"
    label = "random keys"
    unbiased = True

    def select_by(self, inputs: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """Keep `counts` random keys with log-weight log(N/n); attention sinks, always kept, have log-weight 0."""
        mask = super().select_by(inputs, priority, counts).mask
        every = torch.ones_like(mask) if inputs.seen is None else inputs.seen
        total, kept = (part[..., inputs.held :].sum(-1, keepdim=True) for part in (every, mask))
        weight = torch.log(total / kept.clamp_min(1)).expand(mask.shape).clone()
        weight[..., : inputs.held] = 0
        return Selection(mask, weight)
