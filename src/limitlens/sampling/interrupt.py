"""Delay Ctrl-C and SIGTERM until the current piece of work is complete, or drop that piece at once."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopNow(KeyboardInterrupt):
    """Raised by a second Ctrl-C or SIGTERM: nothing more is saved, and finished work is not returned."""


class Interrupt:
    """Records whether Ctrl-C or SIGTERM was received (`asked`)."""

    asked = False
    dropping = False  # whether the work under way can be dropped, so that a signal ends it at once

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C or SIGTERM was received."""
        if self.asked:
            raise KeyboardInterrupt

    def during(self, work: Callable[..., Any] | None, *arguments: Any, drop: bool = False) -> Any:
        """Call `work`, if given, and return its result; a Ctrl-C that it raises is recorded in `asked`, and gives None.

        With `drop`, a signal ends the call at once, and after a signal it is not begun; otherwise it is completed.
        """
        if drop and self.asked:
            return None
        self.dropping = drop
        try:
            return None if work is None else work(*arguments)
        except StopNow:
            raise
        except KeyboardInterrupt:
            self.asked = True
            return None
        finally:
            self.dropping = False


@contextmanager
def held_interrupt() -> Iterator[Interrupt]:
    """Context manager that delays a first Ctrl-C or SIGTERM until `Interrupt.check`; a second one raises `StopNow`."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            raise StopNow
        interrupt.asked = True
        when = "now" if interrupt.dropping else "after the current step"
        print(f"limitlens: stopping {when}; Ctrl-C again stops at once without saving", file=sys.stderr)
        if interrupt.dropping:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
