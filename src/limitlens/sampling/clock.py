"""What time is spent on, on a CPU and on a device that runs behind whoever asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

AHEAD = 64  # layers by which Python may be ahead of a device: more would only hold memory that was sent to it


@dataclass
class Clock:
    """Seconds spent in the model and in attention over its keys."""

    model: float = 0.0
    attention: float = 0.0


class DeviceTimer:
    """Seconds within spans of work: of the device's own time where there is one, which runs behind whoever asks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.lock = device, 0.0, threading.Lock()
        self.open: deque[tuple[torch.cuda.Event, ...]] = deque()

    @contextmanager
    def __call__(self, beside: int = 1) -> Iterator[None]:
        """A span of one of so many threads."""
        if self.device.type == "cpu":
            begun = time.perf_counter()
            yield
            with self.lock:
                self.seconds += (time.perf_counter() - begun) / beside
            return
        span = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        span[0].record()
        yield
        span[1].record()
        self.open.append(span)
        if len(self.open) > AHEAD:
            self.open[0][1].synchronize()
        self.settle(lambda event: bool(event.query()))  # type: ignore[no-untyped-call]

    def settle(self, over: Callable[[torch.cuda.Event], bool]) -> None:
        """Count the spans that are over."""
        while self.open and over(self.open[0][1]):
            begin, end = self.open.popleft()
            self.seconds += begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Wait for the device, and count all of them."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.settle(lambda event: True)
