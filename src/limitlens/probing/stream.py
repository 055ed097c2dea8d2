"""Single pass of the model over the pool of windows; the collector of each layer stores the captured tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice, starmap
from typing import Any, Self

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
            saved = under(f"layer{index}.", job.saved.tensors)
            for name, tensor in collector.tensors().items():
                tensor.copy_(saved[name])
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


def stream(
    loaded: LoadedModel, pool: Pool, pilot: Pilot, assignment: Assignment, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], job: Job, warnings: list[str],
) -> None:  # fmt: skip
    """Run the model once over the pool and let the collector of each layer store or merge its tokens.

    The run resumes after the blocks that `job` has saved. `report` is called with the number of tokens of each forward
    pass. Interrupts take effect, and checkpoints are written, between blocks.
    """
    blocks, done = resume(pool, assignment, collectors, job, report)

    def after_block() -> None:
        nonlocal done
        done += 1
        state = partial(checkpoint_state, done, pool, assignment, collectors)
        job.passed(assignment.blocks[done - 1], state, interrupt)

    run_blocks(
        loaded, pilot, collectors, blocks,
        pool.windows.batches(pool.at_once, pool.indices[done * pool.per_block :]),
        pool.windows.marked(pilot.positions), pool.at_once, pool.workers, clock=clock, warnings=warnings,
        report=lambda tokens: interrupt.during(report, tokens),  # interrupts act after the block
        after_block=after_block,
    )  # fmt: skip


def run_blocks(
    loaded: LoadedModel, pilot: Pilot, collectors: dict[int, Collector],
    blocks: Iterator[BlockAssignment], batches: Iterable[Tensor], special: NDArray[np.bool_], at_once: int,
    workers: Workers = one_after_another,
    *, clock: Clock, warnings: list[str], report: Callable[[int], None], after_block: Callable[[], None],
) -> None:  # fmt: skip
    """Run the model over some blocks of windows; the collectors store or merge the tokens.

    `batches` are the token ids of the windows, `at_once` windows each. `special` (positions,) says whether a pooled
    position of a window holds a special token. `report` is called with the number of tokens of each forward pass.
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

    @cache
    def special_places(windows: int) -> Tensor:
        return to_device(np.flatnonzero(np.tile(special, windows)), device)

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
        """Yield forward passes, beginning with `first`, until all waiting tokens of an assignment have arrived."""
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
                after_block()
