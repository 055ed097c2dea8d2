"""Worker threads, one per core, that each run whole tasks, because splitting small tasks over threads is slow."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Event
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

SWITCH = 5e-5  # seconds between switches of the interpreter lock: with 5e-3 two workers take 8% longer

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """Pool of threads that applies a function to many items, `count` items at the same time."""

    count: int
    spread: Callable[..., Iterator[Any]]
    stopped: Event = field(default_factory=Event)

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results of the function in the order of the items, each as soon as it is available."""
        return self.spread(function, items)

    def check(self) -> None:
        """Raise KeyboardInterrupt if the work was aborted; long tasks call this from time to time."""
        if self.stopped.is_set():
            raise KeyboardInterrupt

    def beside(self, windows: int) -> tuple["Workers", "Workers"]:
        """Choose what runs in parallel: the forward passes of `windows` windows of text, or the tasks within each pass.

        Returns the workers for the passes, and those for the tasks within a pass. One of the two is a single thread.
        """
        both = (self, one_after_another)
        return both if self.count <= windows else both[::-1]


one_after_another = Workers(1, map)  # for a GPU, or a single core


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Matrix product of two NumPy arrays, by torch, because NumPy's own threads would compete with the workers."""
    return np.asarray(torch.from_numpy(a) @ torch.from_numpy(b))


def summed(ends: NDArray[Any], places: NDArray[Any], weights: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Sums (b, w) of rows (M, w): sum i is of `weights[k] · rows[places[k]]` over `ends[i]` ≤ k < `ends[i + 1]`."""
    index, offsets, times = (torch.from_numpy(part) for part in (places, ends, weights))
    bag = torch.nn.functional.embedding_bag
    found = bag(index, torch.from_numpy(rows), offsets, mode="sum", per_sample_weights=times, include_last_offset=True)
    return np.asarray(found)


@contextmanager
def workers_for(device: torch.device) -> Iterator[Workers]:
    """Context manager that gives one worker per torch thread of the CPU; a single worker for a GPU."""
    count = torch.get_num_threads()
    if device.type != "cpu" or count == 1:
        yield one_after_another
        return
    ready = Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread resets its number of threads
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(count, initializer=begin) as pool, ExitStack() as at_end:
        at_end.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH)
        for _ in range(count):
            pool.submit(int)
        ready.wait()
        torch.set_num_threads(count)  # each thread has its own number, but new threads start with the one set last

        def spread(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
            inferring = torch.inference_mode()(function)  # each thread has its own mode
            futures = deque([pool.submit(inferring, item) for item in items])
            try:
                while futures:
                    found = futures[0].result()
                    futures.popleft()  # release the result before it is used
                    yield found
            finally:
                under_way = [future for future in futures if not (future.cancel() or future.done())]
                if under_way:
                    workers.stopped.set()
                    wait(under_way)  # no task may run on after an abort
                    workers.stopped.clear()

        workers = Workers(count, spread)
        yield workers
