"""The one forward over the pool: batches of windows through the model, layers to their collectors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count, islice, starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.sampling.assignment import Assignment, BlockAssignment, ForwardSlice
from limitlens.sampling.checkpoint import Job, under
from limitlens.sampling.clock import Clock, DeviceTimer
from limitlens.sampling.interrupt import Interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.workers import Workers, one_after_another


@dataclass(frozen=True, eq=False)
class Pool:
    """The windows of the pool and how they are run."""

    windows: Windows
    indices: NDArray[np.intp]  # (pool,): those of them that make the pool, in the order in which they are run
    per_forward: int  # windows of a forward, and of a block, a multiple of it, over which tokens are dealt at once
    per_block: int
    at_once: int  # windows that memory has room for: the same as those of a forward, or a whole part of them
    workers: Workers = one_after_another

    def blocks(self, positions: int) -> list[int]:
        """Pooled tokens of each block, with so many pooled positions a window."""
        count = len(self.indices)
        return [min(self.per_block, count - start) * positions for start in range(0, count, self.per_block)]


def going_on(
    pool: Pool, deck: Assignment, collectors: dict[int, Collector], job: Job, report: Callable[[int], None]
) -> tuple[Iterator[BlockAssignment], int]:
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
    done: int, pool: Pool, deck: Assignment, collectors: dict[int, Collector]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where a probe stands after so many blocks."""
    held = {index: collector.tensors() for index, collector in collectors.items()}
    tensors = {f"layer{index}.{name}": tensor for index, own in held.items() for name, tensor in own.items()}
    return {"blocks": done, "at_once": pool.at_once, "wait": deck.wait}, tensors


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one forward runs."""

    ids: Tensor  # (windows, length)
    part: ForwardSlice
    turn: int | None = None  # among those that run side by side

    def cut(self, count: int) -> Iterator[_Piece]:
        """The same in so many pieces, nearly as long, or one for each window."""
        rest, each = self.part, len(self.part.rows) // len(self.ids)
        *others, last = self.ids.tensor_split(min(count, len(self.ids)))
        for ids in others:
            part, rest = rest.cut(len(ids) * each)
            yield _Piece(ids, part)
        yield _Piece(last, rest)


class _Now(threading.local):
    """What a thread runs."""

    piece: _Piece
    done: set[tuple[int, str]]  # what was done with it, by layer and name


def stream(
    loaded: LoadedModel, pool: Pool, pilot: Pilot, deck: Assignment, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], job: Job, warnings: list[str],
) -> None:  # fmt: skip
    """Run the model once over the pool, from where the job stood; `report` is told of tokens.

    Interrupts are heeded between blocks, and checkpoints written there. The deal of the blocks that were done before is
    dealt again: it costs nothing beside them.
    """
    device, windows = loaded.model.device, pool.windows
    positions = slice(pilot.positions.start, pilot.positions.stop)
    special = windows.marked(pilot.positions)
    hands, done = going_on(pool, deck, collectors, job, report)
    parts = chain.from_iterable(hand.parts(pool.at_once * len(special), deck, device) for hand in hands)
    parts = chain(list(islice(parts, 1)), parts)  # the first is dealt while a device is still at the pilot
    pilot.check()
    forwards, within = pool.workers.beside(pool.at_once)
    limit, now, turns, attending = pool.at_once, _Now(), count(), DeviceTimer(device)
    last: ForwardSlice

    @cache
    def marks(many: int) -> Tensor:
        """Which pooled tokens of so many windows are special."""
        return to_device(np.flatnonzero(np.tile(special, many)), device)

    def marked(tokens: int) -> int:
        """How many of the tokens of whole windows are."""
        return tokens // len(special) * int(special.sum())

    def take(captured: Captured) -> None:
        pool.workers.check()
        part, turn, before = now.piece.part, now.piece.turn, now.done

        def once(name: str) -> None:
            if (captured.layer, name) not in before:
                work[name]()
                before.add((captured.layer, name))

        with attending(forwards.count):
            own = marks(len(now.piece.ids)), marked(part.before)
            work = collectors[captured.layer].work(captured, part, positions, *own, turn)
            list(within(once, work))

    def forward(piece: _Piece, before: frozenset[tuple[int, str]] = frozenset()) -> int:
        """Run windows, in halves where they are more than a forward may take; `before` is what was done with them."""
        nonlocal limit
        if len(piece.ids) > limit:
            return sum([forward(half, before) for half in piece.cut(2)])
        now.piece, now.done = piece, set(before)
        try:
            run_until_last_attention(input_ids=to_device(piece.ids.numpy(), device))
        except torch.cuda.OutOfMemoryError:
            limit = halved(len(piece.ids), "windows", warnings)
            forward(piece, frozenset(now.done))
        return piece.ids.numel()

    def pieces(whole: _Piece) -> Iterator[_Piece]:
        """From this one on, until what waits is complete."""
        nonlocal last
        for piece in chain([whole], batches):
            last = piece.part
            for few in piece.cut(forwards.count):
                yield replace(few, turn=next(turns)) if forwards.count > 1 else few
            if last.complete is not None:
                return

    @contextmanager
    def timed() -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            attending.wait()
            clock.attention += attending.seconds
            clock.model += time.perf_counter() - begun - attending.seconds

    with timed(), torch.inference_mode(), capture(loaded.model, take, hidden=True) as run_until_last_attention:
        read = windows.batches(pool.at_once, pool.indices[done * pool.per_block :])
        batches = starmap(_Piece, zip(read, parts, strict=True))
        for first in batches:
            for tokens in forwards(forward, pieces(first)):
                interrupt.during(report, tokens)  # half a block is no deal: it must be ended first
            assert last.complete is not None
            with attending():
                given = (last.complete, last.spans, marked(last.before + len(last.rows)))
                work = [collector.cells(*given) for collector in collectors.values()]
                list(pool.workers(lambda attend: attend(), chain.from_iterable(work)))
            if last.ends:
                done += 1
                job.passed(deck.blocks[done - 1], partial(standing, done, pool, deck, collectors), interrupt)
