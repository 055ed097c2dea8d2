"""Attention over heavy-tailed tokens at a fixed tilt, measured beyond the point where its limit exists.

Tokens are one-dimensional: standard normal, Laplace of scale 1 or Student. The share of the heaviest tokens and the
size of the output tell the three laws of `limitlens.theory.heavy` apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import Array, InputError
from limitlens.theory.heavy import Existence, HeavyLaw, laplace_law, laplace_limit, student_law

if TYPE_CHECKING:
    import pandas as pd

LAWS = ("gaussian", "laplace", "student")
CHUNK = 1 << 22  # tokens held at once


@dataclass(frozen=True)
class HeavyCurve:
    """Attention at one tilt over n tokens of a law, for nested sizes; arrays of shape (replicates, sizes).

    Attributes
    ----------
    output : Array
        The attention output.
    top : Array
        The largest attention weight.
    participation : Array
        Σ w².
    limit : float or None
        The infinite-token output where it exists.
    theory : HeavyLaw or None
        What is predicted; None for Gaussian tokens, which have theories of their own.
    """

    law: str
    tilt: float
    sizes: tuple[int, ...]
    output: Array
    top: Array
    participation: Array
    limit: float | None
    theory: HeavyLaw | None

    @property
    def existence(self) -> Existence:
        """Whether the infinite-token limit exists at this tilt."""
        return Existence.NORMAL if self.theory is None else self.theory.existence

    def summary(self) -> dict[str, Array]:
        """Per size: median output, means of the top weight and of Σw² with their standard errors."""
        root = np.sqrt(len(self.output))
        return {
            "median_output": np.median(self.output, axis=0),
            "top_weight": self.top.mean(axis=0),
            "top_weight_stderr": self.top.std(axis=0, ddof=1) / root,
            "participation": self.participation.mean(axis=0),
            "participation_stderr": self.participation.std(axis=0, ddof=1) / root,
        }

    def document(self) -> dict[str, Any]:
        """The experiment as a JSON-ready mapping."""
        predictions = () if self.theory is None else self.theory.predictions
        return {
            "law": self.law,
            "tilt": self.tilt,
            "existence": self.existence.value,
            "meaning": self.existence.meaning,
            "limit": self.limit,
            "n": list(self.sizes),
            "measured": self.summary(),
            "predicted": {prediction.name: prediction.as_dict() for prediction in predictions},
            "replicates": len(self.output),
        }

    def table(self) -> pd.DataFrame:
        """One row per size."""
        import pandas as pd

        return pd.DataFrame({"law": self.law, "tilt": self.tilt, "n": self.sizes, **self.summary()})


def heavy_curve(
    law: str,
    tilt: float,
    sizes: tuple[int, ...] = (100, 1000, 10_000, 100_000),
    *,
    degrees: float = 3.0,
    replicates: int = 200,
    seed: int = 0,
) -> HeavyCurve:
    """Attend to nested samples of a law at the tilt t.

    Parameters
    ----------
    law : {"gaussian", "laplace", "student"}
    tilt : float
        t > 0; scores are t x.
    sizes : tuple of int
        Increasing numbers of tokens.
    degrees : float
        Degrees of freedom of the Student law.
    """
    if law not in LAWS:
        raise InputError(f"the law is {law!r}; expected one of {', '.join(LAWS)}")
    if not 0 < tilt < float("inf"):
        raise InputError(f"the tilt is {tilt}; expected a positive number")
    if not sizes or sizes[0] < 2 or replicates < 2:
        raise InputError(f"sizes are {list(sizes)} with {replicates} replicates; expected at least 2 of each")
    predicted: HeavyLaw | None = None
    limit: float | None = None
    if law == "gaussian":
        limit = float(tilt)
    elif law == "student":
        predicted = student_law(degrees)
    else:
        predicted = laplace_law(tilt, 1.0)
        if predicted.existence is not Existence.NONE:
            limit = float(laplace_limit([tilt], 1.0)[0])
    rng = np.random.default_rng(np.random.SeedSequence([seed, LAWS.index(law)]))
    group = max(1, CHUNK // sizes[-1])
    parts = [
        _attend(_draw(law, degrees, (min(group, replicates - start), sizes[-1]), rng), tilt, sizes)
        for start in range(0, replicates, group)
    ]
    output, top, participation = (np.concatenate(column) for column in zip(*parts, strict=True))
    label = f"student({degrees:g})" if law == "student" else law
    return HeavyCurve(label, float(tilt), tuple(sizes), output, top, participation, limit, predicted)


def _draw(law: str, degrees: float, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    if law == "gaussian":
        return rng.standard_normal(shape)
    if law == "laplace":
        return rng.laplace(size=shape)
    return rng.standard_t(degrees, size=shape)


def _attend(tokens: Array, tilt: float, sizes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Output, largest weight and Σw² over each prefix of the tokens (r, n): three arrays (r, sizes)."""
    rows = []
    for n in sizes:
        scores = tilt * tokens[:, :n]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1)
        output = np.einsum("rn,rn->r", weights, tokens[:, :n]) / total
        rows.append((output, 1.0 / total, np.einsum("rn,rn->r", weights, weights) / total**2))
    output, top, participation = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
    return output, top, participation
