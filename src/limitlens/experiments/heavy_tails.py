"""`tails`: test tokens for heavy tails, and simulate attention where no infinite-token limit may exist."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, check_number, check_seed
from limitlens.measures.discrete import Sample
from limitlens.report.text import plural, short
from limitlens.report.view import SHADES, Axis, Block, Figure, Row, Section, Table, View, frame_table, line, points
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.statistics.tails import TailReport, check_tails
from limitlens.theory.heavy import Existence, HeavyLaw, laplace_law, laplace_limit, student_law

LAWS = ("gaussian", "laplace", "student")
TOKEN_SECONDS = 1e-7  # estimated time for a token at one score factor and one size
CHUNK = 1 << 22  # tokens held at once


@dataclass(frozen=True, eq=False)
class HeavyCurve:
    """Attention of one query with softmax scores t·x over n random scalar tokens x, at several n."""

    law: str
    tilt: float  # t
    existence: Existence  # whether the infinite-token limit exists, and with which limit law
    meaning: str  # of `existence`
    limit: float | None  # the infinite-token output, where it exists
    n: tuple[int, ...]
    measured: Mapping[str, Array]  # (sizes,) each: median output, means of w₁ and Σw², and their standard errors
    replicates: int
    predicted: Mapping[str, Mapping[str, Any]]  # by name; empty for Gaussian tokens, which `limitlens theory` predicts


@dataclass(frozen=True, eq=False, repr=False)
class HeavyTails(Result):
    """Result of `tails`: attention with softmax scores t·x over random scalars x, one curve over n for each t."""

    kind, file = "tails", "tails"
    inputs: Mapping[str, Any]  # law and seed
    tilts: tuple[HeavyCurve, ...]

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per score factor t (`tilt`) and size n: median output, largest softmax weight and Σw²."""
        columns = ({"law": curve.law, "tilt": curve.tilt, "n": curve.n, **curve.measured} for curve in self.tilts)
        return pd.concat([pd.DataFrame(part) for part in columns], ignore_index=True)

    def view(self) -> View:
        """HTML page: largest softmax weight and output against n, and whether an infinite-token limit exists."""
        one, tilts = self.tilts[0], plural(len(self.tilts), "tilt")
        first, last = f"{one.n[0]:,}", f"{one.n[-1]:,}"
        lost = sum(curve.limit is None for curve in self.tilts)
        existence = [(curve.tilt, curve.existence.value, curve.limit, curve.meaning) for curve in self.tilts]
        tables = [Table("tilts", ["tilt", "verdict", "limit", "meaning"], existence)]
        columns = ["predicted", "status", "formula", "note"]
        predicted = [
            (curve.tilt, name, *(row.get(column, "") for column in columns))
            for curve in self.tilts
            for name, row in curve.predicted.items()
        ]
        if predicted:
            tables.append(Table("predicted", ["tilt", "quantity", *columns], predicted))
        blocks: list[Block] = [self._figures(), *tables, frame_table("values", self.table)]
        verdict = (
            f"One query at each of {tilts} attended to n {one.law} tokens, n from {first} to {last}.",
            f"At {lost} of {tilts} there is no infinite-token limit: the largest weight does not tend to 0."
            if lost
            else "At every tilt the infinite-token limit exists.",
            "Where there is no limit the output does not converge for any number of tokens: cap the scores or raise "
            "the temperature.",
        )
        subtitle = f"{tilts} · n from {first} to {last} · {one.replicates} replicates"
        sections = [Section("Largest weight and output", "Bars are 95%; dotted lines are limits.", blocks)]
        return View(f"Attention over {one.law} tokens", subtitle, verdict, sections)

    def _figures(self) -> Row:
        tops, outputs = [], []
        for i, curve in enumerate(self.tilts):
            label, colour, found = f"t = {short(curve.tilt)}", SHADES[i % len(SHADES)], curve.measured
            tops.append(points(label, curve.n, found["top_weight"], colour, found["top_weight_stderr"], joined=True))
            outputs.append(points(label, curve.n, found["median_output"], colour, joined=True))
            if curve.limit is not None:
                outputs.append(line(f"{label}: limit", curve.n, [curve.limit] * len(curve.n), colour, "dotted"))
        across = Axis("number of tokens n", log=True)
        weight = Figure("Largest weight", across, Axis("largest weight", low=0, high=1), tops)
        return Row([weight, Figure("Output", across, Axis("median output", log=True), outputs)])


def tails(
    tokens: Any = None, *, law: str = "laplace", tilts: str | Sequence[float] = "0.4,0.75,2", degrees: float = 3.0,
    sizes: str | Sequence[int] = "100:100000:4", replicates: int = 200, seed: int = 0,
) -> HeavyTails | TailReport:  # fmt: skip
    """Test whether tokens have heavy tails, or simulate attention over heavy-tailed tokens.

    With `tokens`, (n, d) or a `Sample`, the result is a `TailReport`, which says whether they are sub-Gaussian.
    Without, it is a `HeavyTails`: one query with softmax scores t·x attends to n random scalars x, for n in `sizes` and
    t in `tilts`. The `law` of x is "laplace" (scale 1), "gaussian" or "student" (with `degrees` of freedom). Ranges are
    "lo:hi:k", "a,b,c" or sequences.

    >>> ll.tails(np.random.default_rng(0).normal(size=(2000, 2))).verdict.value
    'sub-Gaussian'
    """
    if tokens is not None:
        return check_tails(tokens.tokens if isinstance(tokens, Sample) else Sample(tokens).tokens)
    counts = parse_sizes(sizes)
    grid = parse_grid(tilts, "tilts")
    check_seed(seed)
    check_number("replicates", replicates, "at least 2, for the error bars", low=2)
    check_number("degrees", degrees, "0.1 degrees of freedom or more", low=0.1)
    cost = (TOKEN_SECONDS * replicates * sum(counts) * len(grid), 64.0 * max(counts[-1], replicates))
    check_cost("tails", *cost, remedy="ask for smaller sizes, or fewer replicates or tilts")
    attend = partial(heavy_curve, law, sizes=counts, degrees=degrees, replicates=replicates, seed=seed)
    return HeavyTails({"law": law, "seed": seed}, tuple(attend(tilt) for tilt in grid))


def heavy_curve(
    law: str, tilt: float, sizes: tuple[int, ...] = (100, 1000, 10_000, 100_000), *, degrees: float = 3.0,
    replicates: int = 200, seed: int = 0,
) -> HeavyCurve:  # fmt: skip
    """Simulate attention with scores t·x, t = `tilt` > 0, over the first n random tokens x, and add predictions."""
    output, top, participation = heavy_samples(law, tilt, sizes, degrees, replicates, seed)
    measured = {"median_output": np.median(output, axis=0)}
    for name, values in (("top_weight", top), ("participation", participation)):
        measured |= {name: values.mean(axis=0), f"{name}_stderr": values.std(axis=0, ddof=1) / np.sqrt(replicates)}
    theory, limit = HeavyLaw(Existence.NORMAL, ()), float(tilt) if law == "gaussian" else None
    if law == "student":
        theory = student_law(degrees)
    elif law == "laplace":
        theory = laplace_law(tilt, 1.0)
        limit = None if theory.existence is Existence.NONE else float(laplace_limit([tilt], 1.0)[0])
    label = f"student({degrees:g})" if law == "student" else law
    predicted = {prediction.name: prediction.as_dict() for prediction in theory.predictions}
    existence = (theory.existence, theory.existence.meaning)
    return HeavyCurve(label, float(tilt), *existence, limit, tuple(sizes), measured, replicates, predicted)


def heavy_samples(law: str, tilt: float, sizes: tuple[int, ...], degrees: float, replicates: int, seed: int) -> Array:
    """Simulate attention with scores t·x; output, largest softmax weight and Σw² at each n: (3, replicates, sizes)."""
    if law not in LAWS:
        raise InputError(f"the law is {law!r}; expected one of {', '.join(LAWS)}")
    if not 0 < tilt < float("inf"):
        raise InputError(f"the tilt is {tilt}; expected a positive number")
    if not sizes or sizes[0] < 2 or replicates < 2:
        raise InputError(f"sizes are {list(sizes)} with {replicates} replicates; expected at least 2 of each")
    rng = np.random.default_rng(np.random.SeedSequence([seed, LAWS.index(law)]))
    draws: dict[str, Any] = {"gaussian": rng.standard_normal, "laplace": rng.laplace}
    draw = draws.get(law, partial(rng.standard_t, degrees))
    group = max(1, CHUNK // sizes[-1])
    counts = [min(group, replicates - start) for start in range(0, replicates, group)]
    return np.concatenate([_attend(draw(size=(count, sizes[-1])), tilt, sizes) for count in counts], axis=1)


def _attend(tokens: Array, tilt: float, sizes: tuple[int, ...]) -> Array:
    """Output, largest softmax weight and Σw² over the first n of `tokens` (rows, N), n in `sizes`: (3, rows, sizes)."""
    rows = []
    for n in sizes:
        scores = tilt * tokens[:, :n]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1)
        output = np.einsum("rn,rn->r", weights, tokens[:, :n]) / total
        rows.append((output, 1.0 / total, np.einsum("rn,rn->r", weights, weights) / total**2))
    return np.stack(rows, axis=-1)
