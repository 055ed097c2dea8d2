"""Random tokens for many replicates (samples), which can be drawn again instead of being stored.

Tokens come in pages, each drawn by a generator seeded with (seed, replicate, page). CPU and GPU draw different tokens.
"""

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import InputError
from limitlens.measures.base import Measure

PAGE = 4096  # tokens of a replicate drawn at a time
DEVICE_PAGES = (1 << 15, 1 << 18)  # shortest and longest page on a GPU: shorter pages would not use all of it


def generator_for(*key: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Random generator on a device, seeded by a key of non-negative integers such as (seed, replicate, page)."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


class IidStream:
    """Independent tokens from a distribution, the same in every run with the same seed."""

    def __init__(self, measure: Measure, seed: int, device: torch.device | str = "cpu", largest: int = 1) -> None:
        self.measure, self.seed, self.device = measure, seed, torch.device(device)
        least, most = DEVICE_PAGES
        self.page = PAGE if self.device.type == "cpu" else min(most, max(least, 1 << (largest - 1).bit_length()))
        self._last: tuple[range, int, Tensor] = (range(0), -1, torch.empty(0))

    def draw(self, replicates: range, start: int, stop: int) -> Tensor:
        """Draw tokens start .. stop − 1 of each replicate (sample), in float64: (replicates, stop − start, d)."""
        length = self.page
        pages = range(start // length, (stop - 1) // length + 1)
        parts = [self._page(replicates, p)[:, max(start - p * length, 0) : stop - p * length] for p in pages]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _page(self, replicates: range, page: int) -> Tensor:
        if self._last[:2] != (replicates, page):  # keep the last page: short ranges share it
            drawn = (generator_for(self.seed, r, page, device=self.device) for r in replicates)
            draws = [self.measure.sample(self.page, generator).to(self.device) for generator in drawn]
            self._last = (replicates, page, torch.stack(draws))
        return self._last[2]


class PoolStream:
    """Tokens drawn without replacement from N given tokens (N, d), in a new random order for each replicate."""

    def __init__(self, tokens: Tensor, largest: int, seed: int) -> None:
        if largest > len(tokens):
            given = f"the largest size is {largest} and the sample has {len(tokens)} tokens"
            remedy = "so lower the sizes or bring more tokens"
            raise InputError(f"{given}; expected sizes no larger than the sample, {remedy}")
        self.tokens, self.largest, self.seed, self.page = tokens, largest, seed, PAGE
        self._orders: dict[int, Tensor] = {}

    def draw(self, replicates: range, start: int, stop: int) -> Tensor:
        """Draw tokens start .. stop − 1 of each replicate (sample), in float64: (replicates, stop − start, d)."""
        return self.tokens[self.indices(replicates, start, stop)].double()

    def indices(self, replicates: range, start: int, stop: int) -> Tensor:
        """Indices, among the given tokens, of draws start .. stop − 1 of each replicate: (replicates, stop − start)."""
        self._orders = {r: order for r, order in self._orders.items() if r in replicates}
        for r in replicates:
            if r not in self._orders:
                order = torch.randperm(len(self.tokens), generator=generator_for(self.seed, r))
                self._orders[r] = order[: self.largest].clone()
        return torch.stack([self._orders[r][start:stop] for r in replicates]).to(self.tokens.device)

    def finite_population_correction(self, n: int) -> float:
        """Factor √(1 − n/N): the error of n tokens against all N, over their error against the whole distribution."""
        return float(np.sqrt(1 - n / len(self.tokens)))
