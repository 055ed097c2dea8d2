"""Single pass of the model over windows of text, in which each layer's keys and values are collected for samples."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice, starmap
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.sampling.assignment import BlockAssignment, ForwardSlice
from limitlens.sampling.clock import Clock, DeviceTimer
from limitlens.sampling.interrupt import Interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.workers import Workers, one_after_another


@dataclass(frozen=True, eq=False)
class Pool:
    """Windows of text that samples are drawn from, and how many of them run in a forward pass and in a block."""

    windows: Windows
    indices: NDArray[np.intp]  # (windows,): indices of these windows, in the order in which they run
    per_forward: int  # windows per forward pass
    per_block: int  # windows per block, whose tokens are assigned to samples together: a multiple of `per_forward`
    at_once: int  # windows per forward pass that memory allows: `per_forward` or a divisor of it


@dataclass(frozen=True, eq=False)
class _Forward:
    """Input of one forward pass, where to store its tokens, and the tasks that are finished."""

    ids: Tensor  # (windows, length)
    part: ForwardSlice
    done: set[tuple[int, str]] = field(default_factory=set)  # finished tasks, by layer and name
    sums: list[Callable[[], None]] = field(default_factory=list)  # functions that add the sums of finished tasks

    def once(self, layer: int, name: str, task: Callable[[], Callable[[], None] | None]) -> None:
        """Run a task unless it is finished; the function that it may return adds its sums, later."""
        if (layer, name) not in self.done:
            add = task()
            if add is not None:
                self.sums.append(add)
            self.done.add((layer, name))

    def cut(self, count: int) -> Iterator[Self]:
        """Split into `count` forward passes with nearly equal numbers of windows, or one per window if fewer."""
        rest, each = self.part, len(self.part.rows) // len(self.ids)
        *others, last = self.ids.tensor_split(min(count, len(self.ids)))
        for ids in others:
            part, rest = rest.cut(len(ids) * each)
            yield type(self)(ids, part, set(self.done))
        yield type(self)(last, rest, set(self.done))


@dataclass
class BlockProgress:
    """How much of a block of windows has been read, so that a run can stop within a block and resume exactly."""

    begun: bool = False  # whether a block has been begun that is not complete
    windows: int = 0  # windows of the block that the means and covariances contain; a resumed run skips these


@dataclass
class _Sums:
    """Adds the sums of forward passes to means and covariances, in the order of windows, and counts the windows."""

    progress: BlockProgress
    at_once: int  # windows whose sums are added together, whatever the number of threads
    read: int = 0  # windows of the block, those of a resumed run included that were counted before
    windows: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def add(self, forward: _Forward) -> None:
        self.waiting += forward.sums
        self.windows += len(forward.ids)
        if self.windows < self.at_once and forward.part.completed is None:
            return
        self.read += self.windows
        if self.read > self.progress.windows:
            for add in self.waiting:
                add()
            self.progress.windows = self.read
        self.waiting, self.windows = [], 0

    def end_block(self) -> None:
        self.read = self.progress.windows = 0
        self.progress.begun = False


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


def run_blocks(
    loaded: LoadedModel, pilot: Pilot, collectors: dict[int, Collector],
    blocks: Iterator[BlockAssignment], batches: Iterable[Tensor], special: NDArray[np.bool_], at_once: int,
    workers: Workers = one_after_another,
    *, clock: Clock, warnings: list[str], report: Callable[[int], None], passed: Callable[[int], None],
    interrupt: Interrupt, progress: BlockProgress,
) -> None:  # fmt: skip
    """Run the model once over windows of text and let the collector of each layer store or merge their tokens.

    `batches` are the token ids, `at_once` windows each. `special` (positions,) is true where a sampled position of a
    window holds a special token. `report` is called with the number of tokens of each forward pass, and `passed` with 1
    after each block of windows. An interrupt drops the forward pass under way and raises KeyboardInterrupt; `progress`
    then says how much of the block was read. It acts after the block if attention over its tokens has begun.
    """
    device, tokens_each, special_each = loaded.model.device, len(special), int(special.sum())
    positions = slice(pilot.positions.start, pilot.positions.stop)
    assignment = next(iter(collectors.values())).assignment  # the same for all layers
    slices = chain.from_iterable(block.slices(at_once * tokens_each, assignment, device) for block in blocks)
    slices = chain(list(islice(slices, 1)), slices)  # assign the first slice while a GPU still runs the pilot
    pilot.check()
    forwards, within = workers.beside(at_once)
    limit, timer = at_once, DeviceTimer(device)
    last: ForwardSlice
    counted = _Sums(progress, at_once)
    special_places = cache(lambda windows: to_device(np.flatnonzero(np.tile(special, windows)), device))

    def take(captured: Captured) -> None:
        workers.check()
        forward: _Forward = captured.forward
        with timer(forwards.count):
            marks = special_places(len(forward.ids)), forward.part.before // tokens_each * special_each
            work = collectors[captured.layer].work(captured, forward.part, positions, *marks)
            list(within(lambda name: forward.once(captured.layer, name, work[name]), work))

    def run(forward: _Forward) -> _Forward:
        """Run a forward pass, in halves if memory is too small, without repeating finished tasks."""
        nonlocal limit
        if len(forward.ids) > limit:
            for half in forward.cut(2):
                forward.sums.extend(run(half).sums)
            return forward
        try:
            run_until_last_attention(input_ids=to_device(forward.ids.numpy(), device), forward=forward)
        except torch.cuda.OutOfMemoryError:
            limit = halved(len(forward.ids), "windows", warnings)
            run(forward)
        return forward

    def until_complete(first: _Forward) -> Iterator[_Forward]:
        """Yield forward passes, from `first` on, until enough tokens are stored to compute attention over them."""
        nonlocal last
        for forward in chain([first], inputs):
            last = forward.part
            yield from forward.cut(forwards.count)
            if last.completed is not None:
                return

    capturing = capture(loaded.model, take, hidden=True)
    with _timed(timer, clock), torch.inference_mode(), capturing as run_until_last_attention:
        inputs = starmap(_Forward, zip(batches, slices, strict=True))
        for first in inputs:
            stoppable = not progress.begun  # no attention over tokens of the block has been computed
            progress.begun = True
            running = forwards(run, until_complete(first))
            while (forward := interrupt.during(next, running, None, drop=stoppable)) is not None:
                counted.add(forward)
                report(forward.ids.numel())
            if stoppable:
                interrupt.check()
            assert last.completed is not None
            with timer():
                marks = (last.before + len(last.rows)) // tokens_each * special_each
                work = [collector.cells(last.completed, marks) for collector in collectors.values()]
                list(workers(lambda attend: attend(), chain.from_iterable(work)))
            if last.ends_block:
                counted.end_block()
                passed(1)
