"""The one forward over the pool: batches of windows through the model, layers to their collectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.heads.collect import Collector
from limitlens.heads.pilot import Pilot
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.sampling.interrupt import Interrupt
from limitlens.sampling.placement import Deck, Part


@dataclass
class Clock:
    """Seconds spent in the model and in attention over its keys."""

    model: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True, eq=False)
class Pool:
    """The windows of the pool and how they are run.

    Attributes
    ----------
    windows : Windows
    indices : (pool,)
        Those of them that make the pool, in the order in which they are run.
    per_forward, per_block : int
        Windows of a forward, and of a block: a multiple of the former, over which tokens are dealt at once.
    """

    windows: Windows
    indices: NDArray[np.intp]
    per_forward: int
    per_block: int

    def blocks(self, positions: int) -> list[int]:
        """Pooled tokens of each block, with so many pooled positions a window."""
        count = len(self.indices)
        return [min(self.per_block, count - start) * positions for start in range(0, count, self.per_block)]


def stream(
    loaded: LoadedModel,
    pool: Pool,
    pilot: Pilot,
    deck: Deck,
    collectors: dict[int, Collector],
    *,
    clock: Clock,
    interrupt: Interrupt,
    report: Callable[[int], None],
) -> None:
    """Run the model once over the pool; `report` is told of tokens, interrupts are heeded between blocks."""
    device = loaded.model.device
    positions = slice(pilot.positions.start, pilot.positions.stop)
    special = _special(pool.windows, pilot)
    part: Part
    marked: Tensor

    def take(captured: Captured) -> None:
        begun = time.perf_counter()
        collectors[captured.layer].add(captured, part, positions, marked)
        clock.attention += time.perf_counter() - begun

    with torch.inference_mode(), capture(loaded.model, take, hidden=True):
        batches = pool.windows.batches(pool.per_forward, pool.indices)
        for ids, part in zip(batches, _parts(deck, pool.per_forward * len(special)), strict=True):
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


def _parts(deck: Deck, length: int) -> Iterator[Part]:
    for hand in deck.hands():
        yield from hand.parts(length)


def _special(windows: Windows, pilot: Pilot) -> NDArray[np.bool_]:
    """Which pooled positions of a window hold special tokens."""
    ends = [*range(len(windows.prefix)), *range(windows.length - len(windows.suffix), windows.length)]
    return np.isin(pilot.positions, ends)
