"""Number of CPU threads that a command uses: the option --threads, or fewer than all cores on a busy machine."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    """Set the number of threads of NumPy's OpenBLAS library; return the number before (None if none was set)."""
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*") if count is not None else ():
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            before = int(library.scipy_openblas_get_num_threads64_())
            library.scipy_openblas_set_num_threads64_(count)
            return before
    return None
