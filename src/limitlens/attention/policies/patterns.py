"""Fixed sparse-attention patterns: each ranks the keys by their positions around a query and keeps the first k.

i is the index of the query and j that of a key. The keys kept for a smaller k are a subset of those for a larger k.
"""

import torch
from torch import Generator, Tensor

from limitlens.attention.policies.base import PolicyInput, uniform
from limitlens.attention.policies.recent import Recent

GAP = 4  # distance between neighbouring keys of the dilated window


class Strided(Recent):
    """Keep keys at equal distances from each other: key j ranks by the bit reversal of (i − j) mod n, i the query."""

    name = "strided"
    label = "at equal distances"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j: minus the bit reversal of the offset (i − j) mod n."""
        reverse = torch.zeros_like(super().priority(inputs, draws, generator))
        length = inputs.key.shape[-2]
        offset = (_query(inputs) - torch.arange(length, device=inputs.key.device)) % length
        for _ in range((length - 1).bit_length()):
            reverse = 2 * reverse + offset % 2
            offset = offset // 2
        return -reverse


class Dilated(Recent):
    """Keep a dilated window: keys at distances that are multiples of `GAP` first, nearest first, then other keys."""

    name = "dilated"
    label = f"a window with gaps of {GAP}"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j: minus the distance |i − j|, and lower by n unless it is a multiple of `GAP`."""
        nearest = super().priority(inputs, draws, generator)
        return nearest - inputs.key.shape[-2] * (nearest % GAP != 0)


class Block(Recent):
    """Keep the query's own block: keys rank by the smallest aligned block of 2^b tokens that holds key and query."""

    name = "block"
    label = "its own block"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j: −n b − |i − j|, with b the bit length of i xor j (2^b: smallest block with both)."""
        nearest = super().priority(inputs, draws, generator)
        length = inputs.key.shape[-2]
        apart = _query(inputs) ^ torch.arange(length, device=inputs.key.device)
        return nearest - length * torch.frexp(apart.double()).exponent.long()


class WindowRandom(Recent):
    """Keep alternately the nearest keys and random keys, half of each (BigBird without its global tokens)."""

    name = "bigbird"
    label = "half the nearest, half random"
    sampled = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a seen key: −min(2 · rank by nearness, 2 · random rank + 1), ranks from 0."""
        ranks = []
        for order in (super().priority(inputs, draws, generator).float(), uniform(inputs, draws, generator)):
            seen = order if inputs.seen is None else order.masked_fill(~inputs.seen, -torch.inf)
            ranks.append(seen.argsort(-1, descending=True).argsort(-1))
        return -torch.minimum(2 * ranks[0], 2 * ranks[1] + 1)


def _query(inputs: PolicyInput) -> Tensor:
    assert inputs.position is not None  # `Recent.priority` has checked it
    return inputs.position[:, None]  # (m, 1): indices of the queries among the keys
