"""Key policy that samples keys by the attention of the last queries: unbiased like random keys, with a smaller error.

Priority sampling (Duffield, Lund, Thorup 2007): keep the keys with the largest a_j / u_j, where a_j is the estimated
weight of key j and u_j is uniform on (0, 1]. A kept key stands for max(1, τ / a_j) keys, with τ the largest a_j / u_j
of a key that is not kept. Sums over the kept keys are unbiased (proved).
"""

import torch
from torch import Tensor

from limitlens.attention.policies.base import PolicyInput, Selection, held_first, keep, norms, uniform
from limitlens.attention.policies.snapkv import SnapKV

FLOOR = 0.1  # share of the mean estimated weight that is added to every key, so that none is excluded


class Priority(SnapKV):
    """Sample keys by SnapKV's attention weight times value norm, with log-weights that make sums unbiased."""

    name = "priority"
    label = "sampled by the attention of the last queries"
    sampled = True
    unbiased = True

    def _estimate(self, inputs: PolicyInput) -> Tensor:
        """Estimated attention weight times value norm a_j > 0 of each key, (1, ..., 1, n)."""
        weight = super().priority(inputs, 1, torch.Generator()) * norms(inputs.value)[None, ..., None, :]
        return weight + FLOOR * weight.mean(-1, keepdim=True)

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Priority of key j: estimated weight over a uniform random number, a_j / u_j."""
        return self._estimate(inputs) / uniform(inputs, draws, generator)

    def select_by(self, inputs: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """Keep the `counts` keys of highest priority, with log-weights log max(1, τ / a_j), τ the highest left out."""
        priority = held_first(priority, inputs.held)
        mask = keep(priority, counts, inputs.seen)
        left_out = ~mask if inputs.seen is None else ~mask & inputs.seen
        threshold = priority.masked_fill(~left_out | priority.isinf(), 0).amax(-1, keepdim=True)
        weight = torch.log(threshold / self._estimate(inputs)).clamp_min(0).expand(mask.shape).clone()
        weight[..., : inputs.held] = 0
        return Selection(mask, weight)
