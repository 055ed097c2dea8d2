"""Number of CPU threads of a command: --threads, or the idle cores, because threads on busy cores are far slower."""

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
    """Number of cores that other programs leave idle; None if the machine is not busy or OMP_NUM_THREADS is set."""
    if VARIABLES[0] in os.environ or not hasattr(os, "getloadavg"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return max(1, cores - round(load)) if load > cores - 1 else None


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Limit torch and NumPy to this number of threads within the block; None means `default_threads()`."""
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
    """Yield (getter, setter) of the number of threads: of torch, if it is imported, and of NumPy's OpenBLAS."""
    if (torch := sys.modules.get("torch")) is not None:
        yield torch.get_num_threads, torch.set_num_threads
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            yield library.scipy_openblas_get_num_threads64_, library.scipy_openblas_set_num_threads64_
