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

    def cut(self, count: int) -> Iterator[Self]:
        """Split into `count` forward passes with nearly equal numbers of windows, or one per window if fewer."""
        rest, each = self.part, len(self.part.rows) // len(self.ids)
        *others, last = self.ids.tensor_split(min(count, len(self.ids)))
        for ids in others:
            part, rest = rest.cut(len(ids) * each)
            yield type(self)(ids, part, set(self.done))
        yield type(self)(last, rest, set(self.done))


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
) -> None:  # fmt: skip
    """Run the model once over windows of text and let the collector of each layer store or merge their tokens.

    `batches` are the token ids, `at_once` windows each. `special` (positions,) is true where a sampled position of a
    window holds a special token. `report` is called with the number of tokens of each forward pass, and `passed` with 1
    after each block of windows.
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
    special_places = cache(lambda windows: to_device(np.flatnonzero(np.tile(special, windows)), device))

    def take(captured: Captured) -> None:
        workers.check()
        forward: _Forward = captured.forward

        def once(name: str) -> None:
            if (captured.layer, name) not in forward.done:
                add = work[name]()
                if add is not None and forwards.count > 1:
                    forward.sums.append(add)
                elif add is not None:  # no other forward pass runs
                    add()
                forward.done.add((captured.layer, name))

        with timer(forwards.count):
            marks = special_places(len(forward.ids)), forward.part.before // tokens_each * special_each
            work = collectors[captured.layer].work(captured, forward.part, positions, *marks)
            list(within(once, work))

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
            for forward in forwards(run, until_complete(first)):
                for add in forward.sums:  # in the order of the windows, whichever thread was first
                    add()
                report(forward.ids.numel())
            assert last.completed is not None
            with timer():
                marks = (last.before + len(last.rows)) // tokens_each * special_each
                work = [collector.cells(last.completed, marks) for collector in collectors.values()]
                list(workers(lambda attend: attend(), chain.from_iterable(work)))
            if last.ends_block:
                passed(1)
