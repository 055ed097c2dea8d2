"""A predicted number never travels without its standing: proved, verified, heuristic or only drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from limitlens.outcome import Outcome


class Status(Outcome):
    """How far a prediction may be trusted; the value is the word shown beside the number."""

    PROVED = (
        "proved",
        "a theorem of the literature",
    )
    VERIFIED = (
        "verified",
        "derived for this project and confirmed by a simulation that runs in its tests",
    )
    HEURISTIC = (
        "heuristic",
        "a scaling argument with partial support; not a theorem",
    )
    DRAWN = (
        "drawn",
        "a curve the literature draws beside its measurements; a valid lower bound of the rate, not the rate",
    )


@dataclass(frozen=True)
class Prediction:
    """One predicted number with what it rests on.

    Attributes
    ----------
    name : str
        The key under which documents carry it, e.g. ``rate_sharp``.
    value : float
        The number; infinite where the quantity diverges.
    status : Status
        Proved, verified, heuristic or drawn.
    formula : str
        The formula, in the letters of docs/theory.md.
    reference : str
        Where it comes from.
    note : str
        What a reader must know before using it; often empty.
    """

    name: str
    value: float
    status: Status
    formula: str
    reference: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a JSON-ready mapping, without its name."""
        document: dict[str, Any] = {
            "predicted": self.value,
            "status": self.status.value,
            "formula": self.formula,
            "reference": self.reference,
        }
        if self.note:
            document["note"] = self.note
        return document

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.4g} ({self.status.value}: {self.formula})"


BOHBOT = "Bohbot, Letrouit, Peyré, Vialard, Token Sample Complexity of Attention (arXiv 2512.10656)"
DERIVED = "derived here; docs/theory.md"
