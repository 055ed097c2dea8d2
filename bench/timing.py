"""Timing: noisy machines want alternating rounds and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Wall time of one call, or what another clock says."""
    started = clock()
    work()
    return clock() - started


def alternate(
    rounds: int, clock: Callable[[], float] = time.perf_counter, **works: Callable[[], Any]
) -> dict[str, float]:
    """Median time of each piece of work, after a warm-up, taken in turns so that all see the same machine."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work, clock))
    return {name: statistics.median(taken) for name, taken in times.items()}


def taken(work: Callable[[], Any], rounds: int = 5, pick: Callable[[list[float]], float] = statistics.median) -> float:
    """Processor seconds of one call, of some after one more: a busy machine tells much the same.

    What lives in cache is slowed by others even so: for that `pick` the least.
    """
    work()
    found = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return pick(found)
