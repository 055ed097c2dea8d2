"""Timing on machines with other load: alternating rounds and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Duration of one call in seconds, by wall time or by another clock."""
    started = clock()
    work()
    return clock() - started


def alternate(
    rounds: int, clock: Callable[[], float] = time.perf_counter, **works: Callable[[], Any]
) -> dict[str, float]:
    """Median time of each piece of work after a warm-up; the pieces alternate, so that load affects all alike."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work, clock))
    return {name: statistics.median(taken) for name, taken in times.items()}


def taken(work: Callable[[], Any], rounds: int = 5, pick: Callable[[list[float]], float] = statistics.median) -> float:
    """Median processor seconds of several calls after a warm-up call; they depend little on other load.

    Work that fits the CPU cache is slowed by other load even so; pass `pick=min` for it.
    """
    work()
    found = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return pick(found)
