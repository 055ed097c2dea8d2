"""The one forward over the pool: batches of windows through the model, layers to their collectors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.sampling.interrupt import Interrupt
from limitlens.sampling.placement import Deck, Part


@dataclass
class Clock:
    """Seconds spent in the model and in attention over its keys."""

    model: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True, eq=False)
class Pool:
    """The windows of the pool and how they are run."""

    windows: Windows
    indices: NDArray[np.intp]  # (pool,): those of them that make the pool, in the order in which they are run
    per_forward: int  # windows of a forward, and of a block, a multiple of it, over which tokens are dealt at once
    per_block: int

    def blocks(self, positions: int) -> list[int]:
        """Pooled tokens of each block, with so many pooled positions a window."""
        count = len(self.indices)
        return [min(self.per_block, count - start) * positions for start in range(0, count, self.per_block)]


def stream(
    loaded: LoadedModel, pool: Pool, pilot: Pilot, deck: Deck, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None],
) -> None:  # fmt: skip
    """Run the model once over the pool; `report` is told of tokens, interrupts are heeded between blocks."""
    device = loaded.model.device
    positions = slice(pilot.positions.start, pilot.positions.stop)
    windows = pool.windows
    ends = [*range(len(windows.prefix)), *range(windows.length - len(windows.suffix), windows.length)]
    special = np.isin(pilot.positions, ends)  # which pooled positions of a window hold special tokens
    parts = chain.from_iterable(
        hand.parts(pool.per_forward * len(special), deck.first, device) for hand in deck.hands()
    )
    part: Part
    marked: Tensor

    def take(captured: Captured) -> None:
        begun = time.perf_counter()
        collectors[captured.layer].add(captured, part, positions, marked)
        clock.attention += time.perf_counter() - begun

    with torch.inference_mode(), capture(loaded.model, take, hidden=True):
        for ids, part in zip(windows.batches(pool.per_forward, pool.indices), parts, strict=True):
            marked = torch.as_tensor(np.flatnonzero(np.tile(special, len(ids))), device=device)
            begun, before = time.perf_counter(), clock.attention
            loaded.model(input_ids=ids.to(device))
            clock.model += time.perf_counter() - begun - (clock.attention - before)
            try:
                report(ids.numel())
            except KeyboardInterrupt:  # half a block is no deal: it must be ended first
                interrupt.asked = True
            if part.complete is not None:
                interrupt.check()
