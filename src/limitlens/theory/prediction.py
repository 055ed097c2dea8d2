"""A predicted number never travels without its standing: proved, verified, heuristic or only drawn."""

from dataclasses import dataclass
from typing import Any, Self

from limitlens.outcome import Outcome
from limitlens.report.words import read_words

WORDS = read_words("theory/words.json")


class Status(Outcome):
    """How far a prediction may be trusted; the value is the word shown beside the number."""

    PROVED = ("proved", "a theorem of the literature")
    VERIFIED = ("verified", "derived for this project and confirmed by a simulation that runs in its tests")
    HEURISTIC = ("heuristic", "a scaling argument with partial support; not a theorem")
    DRAWN = ("drawn", "a curve the literature draws beside its measurements; a lower bound of the rate, not the rate")


@dataclass(frozen=True)
class Prediction:
    """One predicted number with what it rests on."""

    name: str  # the key under which documents carry it, e.g. rate_sharp
    value: float  # infinite where the quantity diverges
    status: Status
    formula: str  # in the letters of docs/theory.md
    reference: str
    note: str = ""  # what a reader must know before using it

    @classmethod
    def of(cls, name: str, value: float, status: Status, way: str = "", **known: Any) -> Self:
        """A number whose formula, reference and note are in words.json, under its name and in which way it is meant."""
        formula, reference, note = WORDS["predictions"][f"{name}, {way}" if way else name]
        return cls(name, value, status, formula, WORDS["references"][reference], note.format(**known))

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a JSON-ready mapping, without its name."""
        standing = {"predicted": self.value, "status": self.status.value, "formula": self.formula}
        return {**standing, "reference": self.reference, **({"note": self.note} if self.note else {})}

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.4g} ({self.status.value}: {self.formula})"
