"""One worker a core, each with one thread.

A probe consists of thousands of small pieces of work. Spread over the threads of torch, each would be split and joined
again, at a price that explodes on a busy machine; spread over workers, pieces run whole.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

SWITCH = 5e-5  # seconds after which a worker may ask another for the interpreter: with 5e-3 two wait 8% longer

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Protocol):
    """Something that applies a function to many items, in any order and at the same time."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """The results, in the order of the items, each as soon as it is there."""


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """A product of arrays by torch, whose workers have one thread each: NumPy's own threads would contend with them."""
    return np.asarray(torch.from_numpy(a) @ torch.from_numpy(b))


def summed(ends: NDArray[Any], places: NDArray[Any], weights: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Sums of rows in bags, times weights (`theory.pilot_law.Bags`): a sparse product takes five times as long."""
    index, offsets, times = (torch.from_numpy(part) for part in (places, ends, weights))
    bag = torch.nn.functional.embedding_bag
    found = bag(index, torch.from_numpy(rows), offsets, mode="sum", per_sample_weights=times, include_last_offset=True)
    return np.asarray(found)


def one_after_another(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """No workers at all: on a device that has its own, or on a single core."""
    return map(function, items)


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
            return pool.map(torch.inference_mode()(function), items)  # the mode is each thread's own too

        yield spread
