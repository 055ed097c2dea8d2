"""Silence the log and the progress bars of the transformers library."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers within the block, then restore its settings."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
