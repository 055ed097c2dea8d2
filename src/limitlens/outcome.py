"""Outcomes that carry their meaning and their remedy, so that a word never reaches a reader alone."""

from enum import Enum
from typing import Self


class Outcome(Enum):
    """An enumeration whose members are written (word, meaning, remedy); the value is the word documents show."""

    meaning: str
    remedy: str

    def __new__(cls, word: str, meaning: str, remedy: str = "nothing to do") -> Self:
        """A member: its value is the word."""
        member = object.__new__(cls)
        member._value_ = word
        member.meaning, member.remedy = meaning, remedy
        return member

    @classmethod
    def of(cls, word: str) -> Self:
        """The member of a word."""
        return next(member for member in cls if member.value == word)
