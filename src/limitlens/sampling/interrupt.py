"""Ctrl-C and SIGTERM between steps, not within them: the first one waits until the work at hand is whole."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec

Told = ParamSpec("Told")


class Interrupt:
    """Whether somebody asked to stop, and asked once more, to stop at once."""

    asked = again = False

    def check(self) -> None:
        """Raise the interrupt that was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def during(self, told: Callable[Told, None] | None, *progress: Told.args, **named: Told.kwargs) -> None:
        """Tell of progress; an interrupt meanwhile is only noted."""
        try:
            if told is not None:
                told(*progress, **named)
        except KeyboardInterrupt:
            self.asked = True


@contextmanager
def held_interrupt() -> Iterator[Interrupt]:
    """Within the block a first Ctrl-C or SIGTERM is only noted, for `Interrupt.check`; a second interrupts at once."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # signals do not reach it
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            interrupt.again = True
            raise KeyboardInterrupt
        interrupt.asked = True
        told = "limitlens: stopping after the work at hand; Ctrl-C again stops at once and saves nothing"
        print(told, file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
