"""Timers for work on a CPU, and on a GPU, which runs asynchronously."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

AHEAD = 64  # most timed pieces of unfinished GPU work before Python waits: queued work holds memory


@dataclass
class Clock:
    """Seconds spent in forward passes of the model, and in attention over sampled keys."""

    model: float = 0.0
    attention: float = 0.0


class DeviceTimer:
    """Adds up the seconds of timed work; on a GPU by CUDA events, so that Python need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: deque[float] = deque()  # seconds of each finished piece; appending is safe from several threads
        self.open: deque[tuple[torch.cuda.Event, ...]] = deque()

    @property
    def seconds(self) -> float:
        """Total seconds of all finished work."""
        return sum(self.spans)

    @contextmanager
    def __call__(self, threads: int = 1) -> Iterator[None]:
        """Time the work in a `with` block; the seconds are divided by the number of parallel `threads`."""
        if self.device.type == "cpu":
            begun = time.perf_counter()
            yield
            self.spans.append((time.perf_counter() - begun) / threads)
            return
        span = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        span[0].record()
        yield
        span[1].record()
        self.open.append(span)
        if len(self.open) > AHEAD:
            self.open[0][1].synchronize()
        self._close()

    def wait(self) -> None:
        """Wait until the GPU is idle, so that all timed work is counted."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self._close()

    def _close(self) -> None:
        while self.open and self.open[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self.open.popleft()
            self.spans.append(begin.elapsed_time(end) / 1e3)
