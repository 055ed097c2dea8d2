"""Keep the transformers library from talking while it works for us: what matters is raised or returned, not logged."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the warnings and progress bars of transformers, and put its settings back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
