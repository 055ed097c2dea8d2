"""The one forward over the pool: batches of windows through the model, layers to their collectors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.lazily import sent
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.sampling.checkpoint import Job, under
from limitlens.sampling.interrupt import Interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.placement import Deck, Hand, Part

AHEAD = 64  # layers by which Python may be ahead of a device: more would only hold memory that was sent to it


@dataclass
class Clock:
    """Seconds spent in the model and in attention over its keys."""

    model: float = 0.0
    attention: float = 0.0


class _Attending:
    """Seconds within spans of work: of the device's own time where there is one, which runs behind whoever asks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self.open: deque[tuple[torch.cuda.Event, ...]] = deque()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.device.type == "cpu":
            begun = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begun
            return
        span = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        span[0].record()
        yield
        span[1].record()
        self.open.append(span)
        if len(self.open) > AHEAD:
            self.open[0][1].synchronize()
        self.settle(lambda event: bool(event.query()))  # type: ignore[no-untyped-call]

    def settle(self, over: Callable[[torch.cuda.Event], bool]) -> None:
        """Count the spans that are over."""
        while self.open and over(self.open[0][1]):
            begin, end = self.open.popleft()
            self.seconds += begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Wait for the device, and count all of them."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.settle(lambda event: True)


@dataclass(frozen=True, eq=False)
class Pool:
    """The windows of the pool and how they are run."""

    windows: Windows
    indices: NDArray[np.intp]  # (pool,): those of them that make the pool, in the order in which they are run
    per_forward: int  # windows of a forward, and of a block, a multiple of it, over which tokens are dealt at once
    per_block: int
    at_once: int  # windows that memory has room for: the same as those of a forward, or a whole part of them

    def blocks(self, positions: int) -> list[int]:
        """Pooled tokens of each block, with so many pooled positions a window."""
        count = len(self.indices)
        return [min(self.per_block, count - start) * positions for start in range(0, count, self.per_block)]


def going_on(
    pool: Pool, deck: Deck, collectors: dict[int, Collector], job: Job, report: Callable[[int], None]
) -> tuple[Iterator[Hand], int]:
    """The hands that are left and how many blocks were done before; collectors are as they were then."""
    hands, done = deck.hands(), 0
    if job.saved is not None:
        done = int(job.saved.position["blocks"])
        deque(islice(hands, done), maxlen=0)
        for index, collector in collectors.items():
            collector.restore(under(f"layer{index}.", job.saved.tensors))
        report(done * pool.per_block * pool.windows.length)
    return hands, done


def standing(
    done: int, pool: Pool, deck: Deck, collectors: dict[int, Collector]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where a probe stands after so many blocks."""
    held = {index: collector.tensors() for index, collector in collectors.items()}
    tensors = {f"layer{index}.{name}": tensor for index, own in held.items() for name, tensor in own.items()}
    return {"blocks": done, "at_once": pool.at_once, "wait": deck.wait}, tensors


def stream(
    loaded: LoadedModel, pool: Pool, pilot: Pilot, deck: Deck, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], job: Job, warnings: list[str],
) -> None:  # fmt: skip
    """Run the model once over the pool, from where the job stood; `report` is told of tokens.

    Interrupts are heeded between blocks, and checkpoints written there. The deal of the blocks that were done before is
    dealt again: it costs nothing beside them.
    """
    device = loaded.model.device
    positions = slice(pilot.positions.start, pilot.positions.stop)
    windows = pool.windows
    special = windows.marked(pilot.positions)
    hands, done = going_on(pool, deck, collectors, job, report)
    length = pool.at_once * len(special)
    parts = chain.from_iterable(hand.parts(length, deck, device) for hand in hands)
    parts = chain(list(islice(parts, 1)), parts)  # the first is dealt while a device is still at the pilot
    pilot.check()
    part: Part
    marked: Tensor
    taken: set[tuple[int, str]]
    limit, attending = pool.at_once, _Attending(device)

    @cache
    def marks(count: int) -> Tensor:
        """Which pooled tokens of so many windows are special."""
        return sent(np.flatnonzero(np.tile(special, count)), device)

    def take(captured: Captured) -> None:
        with attending():
            collectors[captured.layer].add(captured, part, positions, marked, taken)

    def forward(ids: Tensor, own: Part, before: frozenset[tuple[int, str]] = frozenset()) -> None:
        """Run windows, in halves where they are more than a forward may take; `before` is what was done with them."""
        nonlocal part, marked, taken, limit
        if len(ids) > limit:
            half = len(ids) // 2
            for few, piece in zip((ids[:half], ids[half:]), own.cut(half * len(special)), strict=True):
                forward(few, piece, before)
            return
        part, taken = own, set(before)
        marked = marks(len(ids))
        try:
            see(input_ids=sent(ids.numpy(), device))
        except torch.cuda.OutOfMemoryError:
            limit = halved(len(ids), "windows", warnings)
            forward(ids, own, frozenset(taken))

    @contextmanager
    def timed() -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            attending.wait()
            clock.attention += attending.seconds
            clock.model += time.perf_counter() - begun - attending.seconds

    with timed(), torch.inference_mode(), capture(loaded.model, take, hidden=True) as see:
        batches = windows.batches(pool.at_once, pool.indices[done * pool.per_block :])
        for ids, whole in zip(batches, parts, strict=True):
            forward(ids, whole)
            interrupt.during(report, ids.numel())  # half a block is no deal: it must be ended first
            if whole.ends:
                done += 1
                job.passed(deck.blocks[done - 1], partial(standing, done, pool, deck, collectors), interrupt)
