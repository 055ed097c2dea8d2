"""Delay Ctrl-C and SIGTERM until the current piece of work is complete."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Records whether Ctrl-C or SIGTERM was received (`asked`), and whether a second one was (`again`)."""

    asked = again = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C or SIGTERM was received."""
        if self.asked:
            raise KeyboardInterrupt

    def during(self, report: Callable[..., None] | None, *progress: float) -> None:
        """Call `report`, if given, with the progress; Ctrl-C during the call is recorded in `asked`, not raised."""
        try:
            if report is not None:
                report(*progress)
        except KeyboardInterrupt:
            self.asked = True


@contextmanager
def held_interrupt() -> Iterator[Interrupt]:
    """Context manager that delays a first Ctrl-C or SIGTERM until `Interrupt.check`; a second one stops at once."""
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
