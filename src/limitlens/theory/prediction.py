"""A predicted number with its status (proved, verified, ...), and checks of common arguments."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.outcome import Outcome

BOHBOT = "Bohbot, Letrouit, Peyré, Vialard, Token Sample Complexity of Attention (arXiv 2512.10656)"
DERIVED = "derived here; docs/theory.md"

check_nonnegative = partial(check_number, expected="a finite number that is zero or positive")


class Status(Outcome):
    """How far a prediction can be trusted. The value of a member is the word shown next to the predicted number."""

    PROVED = "proved", "a theorem of the literature, or a proof in docs/theory.md; most are about n → ∞"
    VERIFIED = "verified", "derived for this project and confirmed by a simulation that runs in its tests"
    HEURISTIC = "heuristic", "a scaling argument with partial support; not a theorem"
    ASYMPTOTIC = "asymptotic", "a limit theorem for large samples; at a finite size its coverage is only measured"
    DRAWN = ("drawn", "a line the literature draws next to its measurements; not proved, neither the rate nor a bound")


@dataclass(frozen=True)
class Prediction:
    """One predicted number with its status, formula and source."""

    name: str  # key of the number in JSON documents, such as rate_sharp
    value: float  # infinite where the quantity diverges
    status: Status
    formula: str  # in the notation of docs/theory.md
    note: str = ""  # the error or quantity that the number describes, and the conditions under which it holds
    reference: str = DERIVED

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a JSON-ready dictionary, without its name."""
        note = {"note": self.note} if self.note else {}
        return predicted(self.value, self.status, formula=self.formula, reference=self.reference, **note)


def predicted(value: Any, status: Status, **more: Any) -> dict[str, Any]:
    """JSON-ready dictionary of a predicted number or array and its status; `more` holds formula, reference or note."""
    return {"predicted": value, "status": status.value, **more}


def as_sizes(sizes: ArrayLike) -> Array:
    """One number of tokens, or a sequence of them, as an array (sizes,)."""
    return np.atleast_1d(as_array("sizes", sizes, ndim=(0, 1)))


def value_matrix(V: ArrayLike | None, dim: int) -> Array:
    """Value matrix V as an array (d_out, dim): the identity if V is None, an `InputError` if the shape is wrong."""
    if V is None:
        return np.eye(dim)
    matrix = as_array("V", V, ndim=2)
    if matrix.shape[1] != dim:
        raise InputError(f"V has shape {matrix.shape}; expected (d_out, {dim})")
    return matrix
