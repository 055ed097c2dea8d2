"""Fixed patterns of positions, as sparse attention draws them: each is an order of the keys around a query.

With i the query's place and j a key's, the first k of the order are kept: more keys always hold fewer.
"""

import torch
from torch import Generator, Tensor

from limitlens.attention.policies.base import PolicyInput, uniform
from limitlens.attention.policies.recent import Recent

GAP = 4  # of the dilated window


class Strided(Recent):
    """Keys at equal distances: (i − j) mod n with its bits reversed, smallest first; multiples of n/k of 2^b tokens."""

    name = "strided"
    words = "at equal distances"

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus the reversed offset."""
        turned, there = torch.zeros_like(super().priority(sight, draws, generator)), sight.key.shape[-2]
        offset = (_query(sight) - torch.arange(there, device=sight.key.device)) % there
        for _ in range((there - 1).bit_length()):
            turned, offset = 2 * turned + offset % 2, offset // 2
        return -turned


class Dilated(Recent):
    """A window with gaps: distances that are multiples of `GAP` first, the nearest of them before the others."""

    name = "dilated"
    words = f"a window with gaps of {GAP}"

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus the distance, those between the multiples after all of them."""
        nearest = super().priority(sight, draws, generator)
        return nearest - sight.key.shape[-2] * (nearest % GAP != 0)


class Block(Recent):
    """The query's own block: the smallest aligned block of 2^b tokens that holds both, then the nearest in it."""

    name = "block"
    words = "its own block"

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus the bits b of i xor j, then the nearness."""
        nearest, there = super().priority(sight, draws, generator), sight.key.shape[-2]
        apart = _query(sight) ^ torch.arange(there, device=sight.key.device)
        return nearest - there * torch.frexp(apart.double()).exponent.long()


class WindowRandom(Recent):
    """Half of the keys the nearest, half of them at random, in turns: BigBird without its global tokens."""

    name = "bigbird"
    words = "half the nearest, half random"
    sampled = True

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus the better of the even rank by nearness and the odd rank by chance, among keys that are seen."""
        ranks = []
        for order in (super().priority(sight, draws, generator).float(), uniform(sight, draws, generator)):
            seen = order if sight.seen is None else order.masked_fill(~sight.seen, -torch.inf)
            ranks.append(seen.argsort(-1, descending=True).argsort(-1))
        return -torch.minimum(2 * ranks[0], 2 * ranks[1] + 1)


def _query(sight: PolicyInput) -> Tensor:
    """Where the queries stand, (m, 1)."""
    assert sight.position is not None  # `Recent` has asked for it
    return sight.position[:, None]
