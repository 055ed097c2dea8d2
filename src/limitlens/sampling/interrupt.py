"""Delay Ctrl-C and SIGTERM until the current step of work is complete."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class Interrupt:
    """Whether an interrupt was requested (`asked`), and a second one that stops at once (`again`)."""

    asked = again = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was requested."""
        if self.asked:
            raise KeyboardInterrupt

    def during(
        self, report: Callable[Arguments, None] | None, *progress: Arguments.args, **named: Arguments.kwargs
    ) -> None:
        """Report progress; an interrupt during the call is recorded, not raised."""
        try:
            if report is not None:
                report(*progress, **named)
        except KeyboardInterrupt:
            self.asked = True


@contextmanager
def held_interrupt() -> Iterator[Interrupt]:
    """Within the block a first Ctrl-C or SIGTERM is recorded for `Interrupt.check`; a second one interrupts at once."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            interrupt.again = True
            raise KeyboardInterrupt
        interrupt.asked = True
        message = "limitlens: stopping after the current step; Ctrl-C again stops at once without saving"
        print(message, file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
