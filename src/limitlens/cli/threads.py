"""Number of CPU threads that a command uses: the option --threads, or fewer than all cores on a busy machine."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read by libraries when they are loaded


def default_threads() -> int | None:
    """Number of threads that other programs leave free; None (the libraries choose) if the machine is not busy.

    Threads that wait for a busy core slow each other down: two can take 20 times as long as one.
    """
    if VARIABLES[0] in os.environ or not hasattr(os, "getloadavg"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return max(1, cores - round(load)) if load > cores - 1 else None


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Within the block, torch and NumPy compute with this number of threads; None stands for `default_threads()`.

    This function does not import torch: imported later, torch reads its number of threads from the environment.
    """
    count = default_threads() if threads is None else threads
    if count is None:
        yield
        return
    environment = {name: os.environ.pop(name, None) for name in VARIABLES}
    before = [(set_threads, get_threads()) for get_threads, set_threads in _libraries()]
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    for set_threads, _ in before:
        set_threads(count)
    try:
        yield
    finally:
        for name, value in environment.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        for set_threads, number in before:
            set_threads(number)


def _libraries() -> Iterator[tuple[Callable[[], int], Callable[[int], Any]]]:
    """Functions that get and set the number of threads, of torch (if it is imported) and of NumPy's OpenBLAS."""
    if (torch := sys.modules.get("torch")) is not None:
        yield torch.get_num_threads, torch.set_num_threads
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            yield library.scipy_openblas_get_num_threads64_, library.scipy_openblas_set_num_threads64_
