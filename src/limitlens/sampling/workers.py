"""One worker a core, each with one thread.

A probe consists of thousands of small pieces of work. Spread over the threads of torch, each would be split and joined
again, at a price that explodes on a busy machine; spread over workers, pieces run whole.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Event, Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

SWITCH = 5e-5  # seconds after which a worker may ask another for the interpreter: with 5e-3 two wait 8% longer

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """What applies a function to many items, in any order and so many at the same time."""

    count: int
    spread: Callable[..., Iterator[Any]]
    stopped: Event = field(default_factory=Event)

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The results, in the order of the items, each as soon as it is there."""
        return self.spread(function, items)

    def check(self) -> None:
        """Long work asks now and then whether what it is part of was broken off."""
        if self.stopped.is_set():
            raise KeyboardInterrupt

    def beside(self, windows: int) -> tuple["Workers", "Workers"]:
        """Who runs forwards of so many windows, and who does what each of them gives to do: these workers are one.

        Forwards of one thread side by side take a tenth less than one of all threads, and wait for nobody.
        """
        both = (self, one_after_another)
        return both if self.count <= windows else both[::-1]


one_after_another = Workers(1, map)  # on a device that has its own, or on a single core


class InTurn:
    """Does things in the order of their turns, 0, 1, 2, ..., whoever comes first: so sums are the same again."""

    def __init__(self) -> None:
        self.turn, self.early, self.lock = 0, dict[int, Callable[[], None]](), Lock()

    def __call__(self, turn: int, do: Callable[[], None]) -> None:
        """Do it, or leave it to whoever has the turn before."""
        with self.lock:
            self.early[turn] = do
            while self.turn in self.early:
                self.early.pop(self.turn)()
                self.turn += 1


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """A product of arrays by torch, whose workers have one thread each: NumPy's own threads would contend with them."""
    return np.asarray(torch.from_numpy(a) @ torch.from_numpy(b))


def summed(ends: NDArray[Any], places: NDArray[Any], weights: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Sums of rows in bags, times weights (`exact_bootstrap.Bags`): a sparse product takes five times as long."""
    index, offsets, times = (torch.from_numpy(part) for part in (places, ends, weights))
    bag = torch.nn.functional.embedding_bag
    found = bag(index, torch.from_numpy(rows), offsets, mode="sum", per_sample_weights=times, include_last_offset=True)
    return np.asarray(found)


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def workers_for(device: torch.device) -> Iterator[Workers]:
    """As many workers as torch has threads on the CPU; none elsewhere."""
    count = torch.get_num_threads()
    if device.type != "cpu" or count == 1:
        yield one_after_another
        return
    ready = Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first call sets its number to the common one: let it be over
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(count, initializer=begin) as pool, _switching(SWITCH):
        for _ in range(count):
            pool.submit(int)
        ready.wait()
        torch.set_num_threads(count)  # the number is each thread's own, but new threads take the one set last

        def spread(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
            own = torch.inference_mode()(function)  # the mode is each thread's own too
            futures = deque([pool.submit(own, item) for item in items])
            try:
                while futures:
                    found = futures[0].result()
                    futures.popleft()  # what was handed out is held no longer
                    yield found
            finally:
                under_way = [future for future in futures if not (future.cancel() or future.done())]
                if under_way:
                    workers.stopped.set()
                    wait(under_way)  # nobody is left behind: what is broken off may be put away

        workers = Workers(count, spread)
        yield workers
