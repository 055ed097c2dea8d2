"""`tails`: are tokens sub-Gaussian, and how does attention behave where its infinite-token limit does not exist?

Tokens are one-dimensional: standard normal, Laplace of scale 1 or Student. The largest softmax weights and the size
of the output distinguish the cases of `limitlens.theory.heavy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, check_number, check_seed
from limitlens.measures.discrete import Sample
from limitlens.record import Run, from_json
from limitlens.report.text import plural, short
from limitlens.report.view import SHADES, Axis, Figure, Row, Section, Table, View, frame_table, line, points
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.statistics.tails import TailReport, check_tails
from limitlens.theory.heavy import Existence, HeavyLaw, laplace_law, laplace_limit, student_law
from limitlens.theory.prediction import Prediction

LAWS = ("gaussian", "laplace", "student")
TOKEN_SECONDS = 1e-7  # estimated time for a token at one tilt and one size
CHUNK = 1 << 22  # tokens held at once


@dataclass(frozen=True, eq=False)
class HeavyCurve:
    """Attention at one tilt t (scores t x) over n tokens x of a law, for nested n; arrays are (replicates, sizes)."""

    law: str
    tilt: float
    sizes: tuple[int, ...]
    output: Array
    top: Array  # the largest softmax weight
    participation: Array  # Σ w²
    limit: float | None  # the infinite-token output, where it exists
    theory: HeavyLaw  # without predictions for Gaussian tokens, for which `limitlens theory` has them

    def summary(self) -> dict[str, Array]:
        """Median output, means of the largest softmax weight and of Σw², and their standard errors, each (sizes,)."""
        summary = {"median_output": np.median(self.output, axis=0)}
        for name, values in (("top_weight", self.top), ("participation", self.participation)):
            stderr = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            summary |= {name: values.mean(axis=0), f"{name}_stderr": stderr}
        return summary

    def document(self) -> dict[str, Any]:
        """JSON document of the curve: law, tilt, limit if it exists, measured summary and predictions."""
        return {
            "law": self.law,
            "tilt": self.tilt,
            "existence": self.theory.existence.value,
            "meaning": self.theory.existence.meaning,
            "limit": self.limit,
            "n": list(self.sizes),
            "measured": self.summary(),
            "replicates": len(self.output),
            "predicted": {prediction.name: prediction.as_dict() for prediction in self.theory.predictions},
        }

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per size n: median output, largest softmax weight and Σw²."""
        return pd.DataFrame({"law": self.law, "tilt": self.tilt, "n": self.sizes, **self.summary()})


@dataclass(frozen=True, eq=False, repr=False)
class HeavyTails(Result):
    """Result of `tails`: attention over tokens of one law, with one curve over n for each tilt."""

    kind, file = "tails", "tails"
    law: str
    curves: tuple[HeavyCurve, ...]
    seed: int = 0

    def document(self) -> dict[str, Any]:
        """JSON document of the result: law, seed and the curve of every tilt."""
        return {"inputs": {"law": self.law, "seed": self.seed}, "tilts": [curve.document() for curve in self.curves]}

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per tilt and size n: median output, largest softmax weight and Σw²."""
        return pd.concat([curve.table for curve in self.curves], ignore_index=True)

    def arrays(self) -> dict[str, Array]:
        """Arrays by name to be saved: output, largest softmax weight and Σw², each (tilts, replicates, sizes)."""
        names = ("output", "top", "participation")
        return {name: np.stack([getattr(curve, name) for curve in self.curves]) for name in names}

    @classmethod
    def load(cls, run: Run) -> Self:
        """Read a `tails` result back from a run folder."""
        inputs, arrays, curves = run.document["inputs"], run.arrays(), []
        for i, row in enumerate(run.document["tilts"]):
            predicted = [{"name": name, "value": of["predicted"], **of} for name, of in row["predicted"].items()]
            theory = HeavyLaw(Existence(row["existence"]), from_json(tuple[Prediction, ...], predicted))
            measured = {name: stored[i] for name, stored in arrays.items()}
            known = {"sizes": tuple(row["n"]), "limit": row["limit"], "theory": theory}
            curves.append(HeavyCurve(row["law"], row["tilt"], **known, **measured))
        return cls(inputs["law"], tuple(curves), inputs["seed"])

    def view(self) -> View:
        """Page of the result: largest softmax weight and output against n at every tilt, and whether a limit exists."""
        curves, law = self.curves, self.curves[0].law
        first, last = f"{curves[0].sizes[0]:,}", f"{curves[0].sizes[-1]:,}"
        tilts = plural(len(curves), "tilt")
        lost = sum(curve.limit is None for curve in curves)
        existence = [
            (curve.tilt, curve.theory.existence.value, curve.limit, curve.theory.existence.meaning) for curve in curves
        ]
        tables = [Table("tilts", ["tilt", "verdict", "limit", "meaning"], existence)]
        predicted = [
            (curve.tilt, row.name, row.value, row.status.value, row.formula, row.note)
            for curve in curves
            for row in curve.theory.predictions
        ]
        if predicted:
            columns = ["tilt", "quantity", "predicted", "status", "formula", "note"]
            tables.append(Table("predicted", columns, predicted))
        return View(
            f"Attention over {law} tokens",
            f"{tilts} · n from {first} to {last} · {len(curves[0].output)} replicates",
            (
                f"One query at each of {tilts} attended to n {law} tokens, n from {first} to {last}.",
                f"At {lost} of {tilts} there is no infinite-token limit: the largest weight does not tend to 0."
                if lost
                else "At every tilt the infinite-token limit exists.",
                "Where there is no limit the output does not converge for any number of tokens: cap the scores or "
                "raise the temperature.",
            ),
            [
                Section(
                    "Largest weight and output",
                    "Bars are 95%; dotted lines are limits.",
                    [_figures(curves), *tables, frame_table("values", self.table)],
                )
            ],
        )


def _figures(curves: Sequence[HeavyCurve]) -> Row:
    """Two figures side by side: largest softmax weight and median output against n, one curve per tilt."""
    tops, outputs = [], []
    for i, curve in enumerate(curves):
        label, colour, summary = f"t = {short(curve.tilt)}", SHADES[i % len(SHADES)], curve.summary()
        stderr = summary["top_weight_stderr"]
        tops.append(points(label, curve.sizes, summary["top_weight"], colour, stderr, joined=True))
        outputs.append(points(label, curve.sizes, summary["median_output"], colour, joined=True))
        if curve.limit is not None:
            limits = [curve.limit] * len(curve.sizes)
            outputs.append(line(f"{label}: limit", curve.sizes, limits, colour, "dotted"))
    across = Axis("number of tokens n", log=True)
    return Row(
        [
            Figure("Largest weight", across, Axis("largest weight", low=0, high=1), tops),
            Figure("Output", across, Axis("median output", log=True), outputs),
        ]
    )


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
    """Test whether tokens are sub-Gaussian, or show attention over a law whose infinite-token limit may not exist.

    With `tokens`, (n, d) or a `Sample`, the result is a `TailReport` on them. Without, it is a `HeavyTails`: one query
    attends to `sizes` one-dimensional tokens of a `law`, "laplace" of scale 1, "gaussian" or "student" with `degrees`
    degrees of freedom, at each of the `tilts` t (scores are t x). Sizes and tilts are "lo:hi:k", "a,b,c" or sequences.

    >>> ll.tails(np.random.default_rng(0).normal(size=(2000, 2))).verdict.value
    'sub-Gaussian'
    """
    if tokens is not None:
        return check_tails(tokens.tokens if isinstance(tokens, Sample) else Sample(tokens).tokens)
    counts = parse_sizes(sizes)
    grid = parse_grid(tilts, "tilts")
    check_seed(seed)
    check_number("replicates", replicates, "at least 2, for the error bars", low=2)
    seconds = TOKEN_SECONDS * replicates * sum(counts) * len(grid)
    memory = 64.0 * max(counts[-1], replicates)
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
    """Sample tokens x of a law and attend to the first n, for every n in `sizes`, with scores t x at the tilt t > 0."""
    if law not in LAWS:
        raise InputError(f"the law is {law!r}; expected one of {', '.join(LAWS)}")
    if not 0 < tilt < float("inf"):
        raise InputError(f"the tilt is {tilt}; expected a positive number")
    if not sizes or sizes[0] < 2 or replicates < 2:
        raise InputError(f"sizes are {list(sizes)} with {replicates} replicates; expected at least 2 of each")
    theory = HeavyLaw(Existence.NORMAL, ())
    limit = float(tilt) if law == "gaussian" else None
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
    """Output, largest softmax weight and Σw² over the first n tokens of each row, n in `sizes`: (3, rows, sizes)."""
    rows = []
    for n in sizes:
        scores = tilt * tokens[:, :n]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1)
        output = np.einsum("rn,rn->r", weights, tokens[:, :n]) / total
        rows.append((output, 1.0 / total, np.einsum("rn,rn->r", weights, weights) / total**2))
    return np.stack(rows, axis=-1)
