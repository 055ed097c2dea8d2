"""Base class of enumerations that explain their members, such as verdicts shown to a user."""

from enum import Enum
from typing import Self


class Outcome(Enum):
    """Base class of enumerations whose members explain themselves: (word, meaning) or (word, meaning, remedy)."""

    _value_: str  # the word that documents and pages show
    meaning: str
    remedy: str  # what a user can do about this outcome

    def __new__(cls, word: str, meaning: str = "", remedy: str = "nothing to do") -> Self:
        """Create a member whose value is the word alone, with its meaning and remedy as attributes."""
        member = object.__new__(cls)
        member._value_ = word
        member.meaning = meaning
        member.remedy = remedy
        return member
