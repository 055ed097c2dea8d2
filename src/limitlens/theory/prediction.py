"""A predicted number and its status: proved, verified, heuristic or drawn."""

from dataclasses import dataclass
from typing import Any

from limitlens.outcome import Outcome

BOHBOT = "Bohbot, Letrouit, Peyré, Vialard, Token Sample Complexity of Attention (arXiv 2512.10656)"
DERIVED = "derived here; docs/theory.md"


class Status(Outcome):
    """How far a prediction can be trusted; the value is the word shown next to the number."""

    PROVED = "proved", "a theorem of the literature"
    VERIFIED = "verified", "derived for this project and confirmed by a simulation that runs in its tests"
    HEURISTIC = "heuristic", "a scaling argument with partial support; not a theorem"
    DRAWN = "drawn", "a curve the literature draws next to its measurements; a lower bound of the rate, not the rate"


@dataclass(frozen=True)
class Prediction:
    """One predicted number with its status, formula and source."""

    name: str  # its key in documents, such as rate_sharp
    value: float  # infinite where the quantity diverges
    status: Status
    formula: str  # in the notation of docs/theory.md
    note: str = ""  # what the number is about, and its conditions
    reference: str = DERIVED

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a JSON-ready mapping, without its name."""
        note = {"note": self.note} if self.note else {}
        return predicted(self.value, self.status, formula=self.formula, reference=self.reference, **note)

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.4g} ({self.status.value}: {self.formula})"


def predicted(value: Any, status: Status, **more: Any) -> dict[str, Any]:
    """The JSON form of a predicted number or array: value, status, and where known formula, reference and note."""
    return {"predicted": value, "status": status.value, **more}
