"""Attention over heavy-tailed tokens at a fixed tilt, measured beyond the point where its limit exists.

Tokens are one-dimensional: standard normal, Laplace of scale 1 or Student. The share of the heaviest tokens and the
size of the output tell the three laws of `limitlens.theory.heavy` apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, check_number, check_seed
from limitlens.measures.discrete import Sample
from limitlens.record import Run, from_json
from limitlens.report.view import SHADES, Row, Table, View, cells, line, points
from limitlens.report.words import plural, read_words, short, worded_figure, worded_view
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.statistics.tails import TailReport, check_tails
from limitlens.theory.heavy import Existence, HeavyLaw, laplace_law, laplace_limit, student_law
from limitlens.theory.prediction import Prediction

WORDS = read_words("experiments/words.json")["tails"]
LAWS = ("gaussian", "laplace", "student")
A_TOKEN = 1e-7  # seconds for a token at a tilt and a size
CHUNK = 1 << 22  # tokens held at once


@dataclass(frozen=True, eq=False)
class HeavyCurve:
    """Attention at one tilt over n tokens of a law, for nested sizes; arrays of shape (replicates, sizes)."""

    law: str
    tilt: float
    sizes: tuple[int, ...]
    output: Array
    top: Array  # the largest weight
    participation: Array  # Σ w²
    limit: float | None  # the infinite-token output where it exists
    theory: HeavyLaw  # without predictions for Gaussian tokens, which have theories of their own

    def summary(self) -> dict[str, Array]:
        """Per size: median output, means of the top weight and of Σw² with their standard errors."""
        found = {"median_output": np.median(self.output, axis=0)}
        for name, values in (("top_weight", self.top), ("participation", self.participation)):
            stderr = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            found |= {name: values.mean(axis=0), f"{name}_stderr": stderr}
        return found

    def document(self) -> dict[str, Any]:
        """The curve as JSON."""
        existence, predictions = self.theory.existence, self.theory.predictions
        found = {"limit": self.limit, "n": list(self.sizes), "measured": self.summary(), "replicates": len(self.output)}
        told = {"law": self.law, "tilt": self.tilt, "existence": existence.value, "meaning": existence.meaning}
        return told | found | {"predicted": {prediction.name: prediction.as_dict() for prediction in predictions}}

    @property
    def table(self) -> pd.DataFrame:
        """One row per size."""
        return pd.DataFrame({"law": self.law, "tilt": self.tilt, "n": self.sizes, **self.summary()})


@dataclass(frozen=True, eq=False, repr=False)
class HeavyTails(Result):
    """Attention over tokens of one law, a curve per tilt."""

    kind, file = "tails", "tails"
    law: str
    curves: tuple[HeavyCurve, ...]
    seed: int = 0

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        return {"inputs": {"law": self.law, "seed": self.seed}, "tilts": [curve.document() for curve in self.curves]}

    @property
    def table(self) -> pd.DataFrame:
        """One row per tilt and size."""
        return pd.concat([curve.table for curve in self.curves], ignore_index=True)

    def arrays(self) -> dict[str, Array]:
        """Output, largest weight and Σw², each (tilts, replicates, sizes)."""
        names = ("output", "top", "participation")
        return {name: np.stack([getattr(curve, name) for curve in self.curves]) for name in names}

    @classmethod
    def load(cls, run: Run) -> HeavyTails:
        """The result that a run folder holds."""
        inputs, arrays, curves = run.document["inputs"], run.arrays(), []
        for i, row in enumerate(run.document["tilts"]):
            told = [{"name": name, "value": of["predicted"], **of} for name, of in row["predicted"].items()]
            theory = HeavyLaw(Existence(row["existence"]), from_json(tuple[Prediction, ...], told))
            found = {name: stored[i] for name, stored in arrays.items()}
            known = {"sizes": tuple(row["n"]), "limit": row["limit"], "theory": theory}
            curves.append(HeavyCurve(row["law"], row["tilt"], **known, **found))
        return cls(inputs["law"], tuple(curves), inputs["seed"])

    def view(self) -> View:
        """The largest weight and the output, beyond the end of the limit."""
        curves, sizes = self.curves, self.curves[0].sizes
        tops, outputs, numbers = [], [], []
        for i, curve in enumerate(curves):
            label, colour, found = f"t = {short(curve.tilt)}", SHADES[i % len(SHADES)], curve.summary()
            tops.append(points(label, sizes, found["top_weight"], colour, found["top_weight_stderr"], joined=True))
            outputs.append(points(label, sizes, found["median_output"], colour, joined=True))
            if curve.limit is not None:
                outputs.append(line(f"{label}: limit", sizes, [curve.limit] * len(sizes), colour, "dotted"))
            top, shared = (cells(found[name], found[f"{name}_stderr"]) for name in ("top_weight", "participation"))
            rows = list(zip(sizes, found["median_output"].tolist(), top, shared, strict=True))
            numbers.append(Table(f"tilt {curve.tilt:g}", WORDS["numbers"], rows))
        figures = [worded_figure(WORDS["top"], tops), worded_figure(WORDS["output"], outputs)]
        means = [(curve.tilt, curve.theory.existence, curve.limit) for curve in curves]
        verdicts = [(tilt, existence.value, limit, existence.meaning) for tilt, existence, limit in means]
        predicted = [
            (curve.tilt, told.name, told.value, told.status.value, told.formula, told.note)
            for curve in curves
            for told in curve.theory.predictions
        ]
        tables = [Table("tilts", WORDS["tilts"], verdicts)]
        if predicted:
            tables.append(Table("predicted", WORDS["predicted"], predicted))
        ends = {"first": sizes[0], "last": sizes[-1], "tilts": plural(len(curves), "tilt")}
        lost = sum(curve.limit is None for curve in curves)
        limits = WORDS["lost" if lost else "kept"].format(lost=lost, **ends)
        known = {"law": curves[0].law, "replicates": len(curves[0].output), "limits": limits, **ends}
        return worded_view(WORDS, [Row(figures), *tables], numbers, **known)

    def __repr__(self) -> str:
        told = "; ".join(f"t = {curve.tilt:g}: {curve.theory.existence.value}" for curve in self.curves[:6])
        return f"<HeavyTails: {self.curves[0].law}, {told}{'; …' if len(self.curves) > 6 else ''}>"


def tails(
    tokens: Any = None,
    *,
    law: str = "laplace",
    tilts: str | Sequence[float] = "0.4,0.75,2",
    degrees: float = 3.0,
    sizes: str | Sequence[int] = "100:100000:4",
    replicates: int = 200,
    seed: int = 0,
) -> HeavyTails | TailReport:
    """Judge the tails of tokens, or show attention over a law where its infinite-token limit ends.

    With `tokens`, (n, d) or a `Sample`, they are judged: a `TailReport`. Else one-dimensional tokens of a `law`,
    "laplace" of scale 1, "gaussian" or "student" with `degrees` degrees of freedom, are attended to at `tilts` t (the
    scores are t x), over `sizes` tokens; both are "lo:hi:k", "a,b,c" or sequences.

    >>> ll.tails(np.random.default_rng(0).normal(size=(2000, 2))).verdict.value
    'sub-Gaussian'
    """
    if tokens is not None:
        return check_tails(tokens.tokens if isinstance(tokens, Sample) else Sample(tokens).tokens)
    counts, grid = parse_sizes(sizes), parse_grid(tilts, "tilts")
    check_seed(seed)
    check_number("replicates", replicates, "at least 2, for the error bars", low=2)
    seconds, memory = A_TOKEN * replicates * sum(counts) * len(grid), 64.0 * max(counts[-1], replicates)
    check_cost("tails", seconds=seconds, memory=memory, remedy="ask for smaller sizes, or fewer replicates or tilts")
    attend = partial(heavy_curve, law, sizes=counts, degrees=degrees, replicates=replicates, seed=seed)
    return HeavyTails(law, tuple(attend(tilt) for tilt in grid), seed)


def heavy_curve(
    law: str,
    tilt: float,
    sizes: tuple[int, ...] = (100, 1000, 10_000, 100_000),
    *,
    degrees: float = 3.0,
    replicates: int = 200,
    seed: int = 0,
) -> HeavyCurve:
    """Attend to nested samples of a law at the tilt t > 0: scores are t x."""
    if law not in LAWS:
        raise InputError(f"the law is {law!r}; expected one of {', '.join(LAWS)}")
    if not 0 < tilt < float("inf"):
        raise InputError(f"the tilt is {tilt}; expected a positive number")
    if not sizes or sizes[0] < 2 or replicates < 2:
        raise InputError(f"sizes are {list(sizes)} with {replicates} replicates; expected at least 2 of each")
    theory, limit = HeavyLaw(Existence.NORMAL, ()), float(tilt) if law == "gaussian" else None
    if law == "student":
        theory = student_law(degrees)
    elif law == "laplace":
        theory = laplace_law(tilt, 1.0)
        limit = None if theory.existence is Existence.NONE else float(laplace_limit([tilt], 1.0)[0])
    rng = np.random.default_rng(np.random.SeedSequence([seed, LAWS.index(law)]))
    draws: dict[str, Any] = {"gaussian": rng.standard_normal, "laplace": rng.laplace}
    draw = draws.get(law, partial(rng.standard_t, degrees))
    group = max(1, CHUNK // sizes[-1])
    parts = [
        _attend(draw(size=(min(group, replicates - start), sizes[-1])), tilt, sizes)
        for start in range(0, replicates, group)
    ]
    output, top, participation = np.concatenate(parts, axis=1)
    label = f"student({degrees:g})" if law == "student" else law
    return HeavyCurve(label, float(tilt), tuple(sizes), output, top, participation, limit, theory)


def _attend(tokens: Array, tilt: float, sizes: tuple[int, ...]) -> Array:
    """Output, largest weight and Σw² over each prefix of the tokens (r, n): (3, r, sizes)."""
    rows = []
    for n in sizes:
        scores = tilt * tokens[:, :n]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1)
        output = np.einsum("rn,rn->r", weights, tokens[:, :n]) / total
        rows.append((output, 1.0 / total, np.einsum("rn,rn->r", weights, weights) / total**2))
    return np.stack(rows, axis=-1)
