"""Outcomes that carry their meaning and their remedy, so that a word never reaches a reader alone."""

from enum import Enum
from functools import cache
from typing import Any

from limitlens.report.words import read_words


class Outcome(Enum):
    """An enumeration of the words that documents show; what they mean and what to do is in outcomes.json."""

    @property
    def meaning(self) -> str:
        """What the word means."""
        return str(_told()[type(self).__name__][self.value][0])

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return str(_told()[type(self).__name__][self.value][1])


@cache
def _told() -> dict[str, Any]:
    return read_words("outcomes.json")
