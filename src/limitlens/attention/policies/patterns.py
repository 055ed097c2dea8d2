"""Fixed sparse-attention patterns: key policies that rank key j by its position relative to the query's position i."""

import torch
from torch import Generator, Tensor

from limitlens.attention.policies.base import PolicyInput, uniform
from limitlens.attention.policies.recent import Recent

GAP = 4  # distance between neighbouring keys of the dilated window


class Strided(Recent):
    """Keep keys at equal distances: key j ranks by the bit reversal of (i − j) mod n, with i the query's position."""

    name = "strided"
    label = "at equal distances"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j for the query at position i: minus the bit reversal of (i − j) mod n."""
        reverse = torch.zeros_like(super().priority(inputs, draws, generator))
        length = inputs.key.shape[-2]
        offset = (_query(inputs) - torch.arange(length, device=inputs.key.device)) % length
        for _ in range((length - 1).bit_length()):
            reverse = 2 * reverse + offset % 2
            offset = offset // 2
        return -reverse


class Dilated(Recent):
    """Keep a dilated window: first keys at distances that are multiples of `GAP`, nearest first, then all others."""

    name = "dilated"
    label = f"a window with gaps of {GAP}"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j for query i: minus the distance |i − j|, and lower by n unless `GAP` divides it."""
        nearest = super().priority(inputs, draws, generator)
        return nearest - inputs.key.shape[-2] * (nearest % GAP != 0)


class Block(Recent):
    """Keep the block around the query: keys rank by the smallest aligned block of 2^b tokens with key and query."""

    name = "block"
    label = "its own block"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of key j for query i: −n b − |i − j|, with 2^b the smallest aligned block that contains both."""
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
        """Priority of a key: −min(2 · rank by nearness, 2 · random rank + 1), with ranks from 0 among visible keys."""
        ranks = []
        for order in (super().priority(inputs, draws, generator).float(), uniform(inputs, draws, generator)):
            seen = order if inputs.seen is None else order.masked_fill(~inputs.seen, -torch.inf)
            ranks.append(seen.argsort(-1, descending=True).argsort(-1))
        return -torch.minimum(2 * ranks[0], 2 * ranks[1] + 1)


def _query(inputs: PolicyInput) -> Tensor:
    assert inputs.position is not None  # `Recent.priority` has checked it
    return inputs.position[:, None]  # (m, 1): indices of the queries among the keys
