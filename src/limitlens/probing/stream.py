"""Single pass of the model over the pool of windows; the collector of each layer stores the captured tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    """Windows of text from which samples are drawn (the pool), and how many run in a forward pass and in a block."""

    windows: Windows
    indices: NDArray[np.intp]  # (pool,): the windows of the pool, in the order in which they run
    per_forward: int  # windows per forward pass
    per_block: int  # windows per block, whose tokens are assigned to cells together: a multiple of `per_forward`
    at_once: int  # windows per forward pass that memory allows: `per_forward` or a divisor of it
    workers: Workers = one_after_another

    def blocks(self, positions: int) -> list[int]:
        """Number of pooled tokens in each block of windows; `positions` tokens of each window are pooled."""
        count = len(self.indices)
        return [min(self.per_block, count - start) * positions for start in range(0, count, self.per_block)]


def resume(
    pool: Pool, assignment: Assignment, collectors: dict[int, Collector], job: Job, report: Callable[[int], None]
) -> tuple[Iterator[BlockAssignment], int]:
    """Restore the collectors from a saved job, if any; return the blocks left to do and the number of blocks done.

    The cells of blocks done before are drawn again, which costs little and restores the random state.
    """
    blocks, done = assignment.assign_blocks(), 0
    if job.saved is not None:
        done = int(job.saved.position["blocks"])
        deque(islice(blocks, done), maxlen=0)
        for index, collector in collectors.items():
            collector.restore(under(f"layer{index}.", job.saved.tensors))
        report(done * pool.per_block * pool.windows.length)
    return blocks, done


def checkpoint_state(
    done: int, pool: Pool, assignment: Assignment, collectors: dict[int, Collector]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Position and tensors of a probe after `done` blocks, for a checkpoint."""
    tensors = {
        f"layer{index}.{name}": tensor
        for index, collector in collectors.items()
        for name, tensor in collector.tensors().items()
    }
    return {"blocks": done, "at_once": pool.at_once, "wait": assignment.wait}, tensors


@dataclass(frozen=True, eq=False)
class _Forward:
    """Input of one forward pass: windows, the cells of their tokens, and the work that is finished."""

    ids: Tensor  # (windows, length)
    part: ForwardSlice
    turn: int | None = None  # order among forward passes that run concurrently
    done: set[tuple[int, str]] = field(default_factory=set)  # finished tasks, by layer and name

    def cut(self, count: int) -> Iterator[_Forward]:
        """Split into `count` forward passes with nearly equal numbers of windows, or one per window if fewer."""
        rest, each = self.part, len(self.part.rows) // len(self.ids)
        *others, last = self.ids.tensor_split(min(count, len(self.ids)))
        for ids in others:
            part, rest = rest.cut(len(ids) * each)
            yield _Forward(ids, part, done=set(self.done))
        yield _Forward(last, rest, done=set(self.done))


class _Special:
    """Places and number of special tokens among the pooled tokens of consecutive windows."""

    def __init__(self, mask: NDArray[np.bool_], device: torch.device) -> None:
        self.mask = mask  # (positions,): whether a pooled position of a window holds a special token
        self.places = cache(lambda windows: to_device(np.flatnonzero(np.tile(mask, windows)), device))

    def count(self, tokens: int) -> int:
        """Number of special tokens among the first `tokens` pooled tokens, which fill whole windows."""
        return tokens // len(self.mask) * int(self.mask.sum())


@contextmanager
def _timed(timer: DeviceTimer, clock: Clock) -> Iterator[None]:
    """Add the time spent in the `with` block to the clock: time measured by `timer` as attention, the rest as model."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        timer.wait()
        clock.attention += timer.seconds
        clock.model += time.perf_counter() - begun - timer.seconds


def stream(
    loaded: LoadedModel, pool: Pool, pilot: Pilot, assignment: Assignment, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], job: Job, warnings: list[str],
) -> None:  # fmt: skip
    """Run the model once over the pool and let the collector of each layer store or merge its tokens.

    The run resumes after the blocks that `job` has saved. `report` is called with the number of tokens of each forward
    pass. Interrupts take effect, and checkpoints are written, between blocks.
    """
    device, windows = loaded.model.device, pool.windows
    positions = slice(pilot.positions.start, pilot.positions.stop)
    special = _Special(windows.marked(pilot.positions), device)
    blocks, done = resume(pool, assignment, collectors, job, report)
    length = pool.at_once * len(special.mask)
    slices = chain.from_iterable(block.slices(length, assignment, device) for block in blocks)
    slices = chain(list(islice(slices, 1)), slices)  # assign the first slice while a GPU still runs the pilot
    pilot.check()
    forwards, within = pool.workers.beside(pool.at_once)
    limit, turns, timer = pool.at_once, count(), DeviceTimer(device)
    last: ForwardSlice

    def take(captured: Captured) -> None:
        pool.workers.check()
        forward: _Forward = captured.forward
        part = forward.part

        def once(name: str) -> None:
            if (captured.layer, name) not in forward.done:
                work[name]()
                forward.done.add((captured.layer, name))

        with timer(forwards.count):
            marks = special.places(len(forward.ids)), special.count(part.before)
            work = collectors[captured.layer].work(captured, part, positions, *marks, forward.turn)
            list(within(once, work))

    def run(forward: _Forward) -> int:
        """Run a forward pass, in halves if memory is too small, without repeating finished tasks; return its tokens."""
        nonlocal limit
        if len(forward.ids) > limit:
            return sum([run(half) for half in forward.cut(2)])
        try:
            run_until_last_attention(input_ids=to_device(forward.ids.numpy(), device), forward=forward)
        except torch.cuda.OutOfMemoryError:
            limit = halved(len(forward.ids), "windows", warnings)
            run(forward)
        return forward.ids.numel()

    def until_complete(first: _Forward) -> Iterator[_Forward]:
        """Yield forward passes, beginning with `first`, until all waiting tokens of an assignment have arrived."""
        nonlocal last
        for forward in chain([first], batches):
            last = forward.part
            for piece in forward.cut(forwards.count):
                yield replace(piece, turn=next(turns)) if forwards.count > 1 else piece
            if last.completed is not None:
                return

    in_time = _timed(timer, clock)
    with in_time, torch.inference_mode(), capture(loaded.model, take, hidden=True) as run_until_last_attention:
        read = windows.batches(pool.at_once, pool.indices[done * pool.per_block :])
        batches = starmap(_Forward, zip(read, slices, strict=True))
        for first in batches:
            for tokens in forwards(run, until_complete(first)):
                interrupt.during(report, tokens)  # after the block: half a block is not a random sample
            assert last.completed is not None
            with timer():
                marks = special.count(last.before + len(last.rows))
                work = [collector.cells(last.completed, marks) for collector in collectors.values()]
                list(pool.workers(lambda attend: attend(), chain.from_iterable(work)))
            if last.ends_block:
                done += 1
                state = partial(checkpoint_state, done, pool, assignment, collectors)
                job.passed(assignment.blocks[done - 1], state, interrupt)
