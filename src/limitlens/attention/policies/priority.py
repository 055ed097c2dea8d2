"""The keys that matter exactly, the rest sampled: unbiased like random keys, with a small error like the largest ones.

Priority sampling (Duffield, Lund, Thorup 2007): key j of guessed weight a_j gets the priority a_j / u_j, u_j uniform on
(0, 1]; the n of highest priority are kept, and with τ the largest priority that is not, each stands for max(1, τ / a_j)
keys. Keys with a_j > τ are kept for certain and weigh as they are. Sums over the kept ones are unbiased (proved).
"""

import torch
from torch import Tensor

from limitlens.attention.policies.base import PolicyInput, Selection, held_first, keep, uniform
from limitlens.attention.policies.past import Accumulated

FLOOR = 0.1  # share of the guessed weight that is spread evenly: a guess may not rule a key out


class Mixed(Accumulated):
    """Keys sampled in proportion to the attention of the last queries, with the weights that make them unbiased."""

    name = "mixed"
    words = "sampled by the attention of the last queries"
    sampled = True
    unbiased = True

    def _guess(self, sight: PolicyInput) -> Tensor:
        weight = self.weight(sight)
        return (weight + FLOOR * weight.mean(-1, keepdim=True))[None, ..., None, :]

    def priority(self, sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """a_j / u_j."""
        return self._guess(sight) / uniform(sight, draws, generator)

    def kept(self, sight: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """The largest priority that was not kept is the threshold; where all were, there is none."""
        priority = held_first(priority, sight.held)
        mask = keep(priority, counts, sight.seen)
        left_out = ~mask if sight.seen is None else ~mask & sight.seen
        threshold = priority.masked_fill(~left_out | priority.isinf(), 0).amax(-1, keepdim=True)
        weight = torch.log(threshold / self._guess(sight)).clamp_min(0).expand(mask.shape).clone()
        weight[..., : sight.held] = 0
        return Selection(mask, weight)
