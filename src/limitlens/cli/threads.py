"""The number of CPU threads of a command: as asked for, or fewer where the machine is busy."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read by libraries when they are loaded


def default_threads() -> int | None:
    """Threads that other programs leave free, or None, the choice of the libraries, if the machine is not busy.

    Threads that wait for a busy core slow each other down: two can take 20 times as long as one.
    """
    if VARIABLES[0] in os.environ or not hasattr(os, "getloadavg"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return max(1, cores - round(load)) if load > cores - 1 else None


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Compute with this number of threads in torch and NumPy within the block; None stands for `default_threads`.

    torch is not imported here: if it is imported later, it reads its number of threads from the environment.
    """
    count = default_threads() if threads is None else threads
    if count is None:
        yield
        return
    torch = sys.modules.get("torch")
    torch_before = None if torch is None else torch.get_num_threads()
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    blas_before = _set_blas_threads(count)
    if torch is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        for name in VARIABLES:
            del os.environ[name]
        os.environ.update(environment)
        if torch is not None:
            torch.set_num_threads(torch_before)
        _set_blas_threads(blas_before)


def _set_blas_threads(count: int | None) -> int | None:
    """Set the threads of the OpenBLAS library that NumPy has loaded from its wheel; return their number before."""
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*") if count is not None else ():
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            before = int(library.scipy_openblas_get_num_threads64_())
            library.scipy_openblas_set_num_threads64_(count)
            return before
    return None
