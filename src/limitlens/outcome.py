"""Base class of enumerations whose members carry a meaning and a remedy, so that no word is shown unexplained."""

from enum import Enum
from typing import Self


class Outcome(Enum):
    """An enumeration of words; each member is written as (word, meaning) or (word, meaning, remedy)."""

    _value_: str  # the word that documents and pages show
    meaning: str
    remedy: str  # what to do about it

    def __new__(cls, word: str, meaning: str = "", remedy: str = "nothing to do") -> Self:
        """A member whose value is the word alone."""
        member = object.__new__(cls)
        member._value_ = word
        member.meaning = meaning
        member.remedy = remedy
        return member
