"""Result of comparing two or more runs: differences from the first run, and whether they exceed their errors.

Runs of one model are also compared over all heads (`Paired`), which shows small differences that all heads share, such
as the differences between two texts.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median, stdev
from typing import Any

from limitlens.arrays import pd
from limitlens.errors import InputError
from limitlens.estimate import Estimate
from limitlens.record import to_json
from limitlens.report.text import join, plural, short
from limitlens.report.view import Axis, Colour, Figure, Row, Section, Table, View, line, points
from limitlens.results import Result
from limitlens.statistics.documents import holm, p_value

LEVEL = 0.05  # significance level of the tests of differences
TOKENS = "tokens for 5%"  # the quantity n(5%)
LISTED, SHOWN = 400, 12  # differences listed on a page and in a terminal; the saved table has all
PLACES, PICTURES = 6, 3  # places a quantity needs for a figure, and the largest number of figures
OVER_HEADS = (
    "Mean differences, paired by head; p has Holm's correction over all rows. For quantities without a standard "
    "error, p ignores the random choice of text: two runs on the same text show how large its effect is."
)


@dataclass(frozen=True)
class Difference:
    """One quantity at one place (head or error) in the first run and in a later run, and the difference."""

    where: str
    quantity: str
    run: str
    first: Estimate
    value: Estimate
    difference: Estimate
    exceeds: bool | None  # whether the difference is significant; None without a standard error

    @property
    def in_errors(self) -> float | None:
        """Difference divided by its standard error; None where either is not known."""
        stderr = self.difference.stderr
        return self.difference.value / stderr if self.difference.known and stderr and not math.isnan(stderr) else None


@dataclass(frozen=True)
class Paired:
    """Mean over all heads of one quantity in a later run minus that quantity in the first run, paired by head.

    The squared standard error is the variance over heads divided by the number of heads, plus the square of the mean
    standard error of a head where that is known: all heads read the same windows, so the error of the sample does not
    average out over heads.
    """

    quantity: str
    run: str
    heads: int
    difference: float
    stderr: float
    p: float  # by Student's t, with Holm's correction over all quantities and runs
    real: bool  # whether p is below `LEVEL`, so that the difference is significant


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Result of `limitlens.compare`: two or more runs, each compared with the first run."""

    kind, file = "comparison", "differences"
    command: str  # the command that makes such runs
    unit: str  # kind of place at which runs are compared: head, error, number or model average
    runs: tuple[Mapping[str, Any], ...]  # description of each run, its `name` first
    regimes: Mapping[str, Any] | None  # of probes: heads in each regime by run, and heads that changed from the first
    differences: tuple[Difference, ...]  # one for each place, quantity and later run

    @property
    def names(self) -> list[str]:
        """Names of the compared runs, the first run first."""
        return [run["name"] for run in self.runs]

    @property
    def matched(self) -> int:
        """Number of places (heads or errors) that the runs have in common."""
        return len({row.where for row in self.differences})

    @cached_property
    def ranked(self) -> list[Difference]:
        """All differences in order: significant ones first, then by size in standard errors, unknown ones last."""
        return sorted(
            self.differences,
            key=lambda row: (bool(row.exceeds), abs(row.in_errors or 0.0) if row.difference.known else -1.0),
            reverse=True,
        )

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """Summary of each quantity: medians over places by run, and numbers of differences tested and significant."""
        first, *others = self.names
        rows = []
        for quantity in dict.fromkeys(row.quantity for row in self.differences):
            of = {name: [r for r in self.differences if (r.quantity, r.run) == (quantity, name)] for name in others}
            values = {first: [row.first for row in of[others[0]]]}
            values |= {name: [row.value for row in found] for name, found in of.items()}
            known = {name: [one.value for one in found if one.known] for name, found in values.items()}
            rows.append({
                "quantity": quantity,
                "places": len(values[first]),
                "medians": {name: median(found) if found else None for name, found in known.items()},
                "marked": {name: sum(row.exceeds is True for row in found) for name, found in of.items()},
                "tested": {name: sum(row.exceeds is not None for row in found) for name, found in of.items()},
            })  # fmt: skip
        return rows

    @cached_property
    def paired(self) -> tuple[Paired, ...]:
        """Mean differences over all heads, for every quantity and later run; empty unless runs are of one model."""
        groups: dict[tuple[str, str], list[Estimate]] = defaultdict(list)
        for row in self.differences if self.unit == "head" else ():
            if row.difference.known and row.quantity != TOKENS:  # n(5%) is known only for heads that converge fast
                groups[row.quantity, row.run].append(row.difference)
        found = []
        for place, heads in groups.items():
            if (count := len(heads)) >= PLACES:
                values = [head.value for head in heads]
                shared = mean(0.0 if math.isnan(head.stderr) else head.stderr for head in heads)
                stderr = math.hypot(stdev(values) / math.sqrt(count), shared)
                found.append((*place, count, mean(values), stderr, p_value(mean(values), stderr, count - 1)))
        adjusted = holm([row[-1] for row in found])
        return tuple(Paired(*row[:-1], p, p < LEVEL) for row, p in zip(found, adjusted, strict=True))

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per difference: place, quantity, run, both values and whether it is significant."""
        return pd.DataFrame(to_json(self.differences))

    def document(self) -> dict[str, Any]:
        """JSON document of the comparison, with the summary of quantities and the paired differences."""
        return {**super().document(), "matched": self.matched, "summary": self.summary, "paired": to_json(self.paired)}

    def view(self) -> View:
        """View of the comparison: tables of runs and differences, and figures of later runs against the first."""
        first = self.names[0]
        in_common = plural(self.matched, self.unit)
        keys = list(dict.fromkeys(key for run in self.runs for key in run if key != "name"))
        about = [Table("runs", ["run", *keys], [[run["name"], *(run.get(key) for key in keys)] for run in self.runs])]
        if self.regimes:
            *words, _ = self.regimes[first]
            rows = [(name, *counts.values()) for name, counts in self.regimes.items()]
            about.append(Table("regimes", ("run", *words, f"changed from {first}"), rows))
        trust = [
            f"A difference is marked if it is significant at the level {LEVEL:.0%} over all comparisons of its "
            "quantity (Holm); quantities without a standard error are never marked."
        ]
        if self.unit == "model average":
            trust.append("The runs probed different models, whose heads have no counterparts: means are compared.")
        if len({run.get("score_scale") for run in self.runs}) > 1:
            trust.append("The runs scaled the scores differently, which may cause the differences.")
        if len(self.ranked) > LISTED:
            trust.append(
                f"Only the {LISTED} clearest of {len(self.ranked):,} differences are listed; the table has all."
            )
        sections = [
            Section("The runs", "", about),
            *([Section("Over all heads", OVER_HEADS, [_paired_table(self)])] if self.paired else []),
            Section("By quantity", f"Each run compared with {first}.", (_summary_table(self), Row(_figures(self)))),
            Section("By place", "Significant differences come first.", [_differences_table(self)]),
        ]
        subtitle = f"{plural(len(self.runs), 'run')} of limitlens {self.command} · {in_common} in common"
        measured = f"{join(self.names)} were compared on {in_common}: each difference from {first} with its error."
        return View(" against ".join(self.names), subtitle, (measured, *_verdict(self)), sections, trust=trust)

    def figures(self) -> list[Figure]:
        """Figures of later runs against the first run, for quantities with several places and standard errors."""
        if figures := _figures(self):
            return figures
        raise InputError(f"no quantity has {PLACES} places with errors to draw; see the table of the comparison")

    def __repr__(self) -> str:
        marked = sum(bool(row.exceeds) for row in self.differences)
        found = f"{marked} of {len(self.differences)} differences exceed their errors"
        return f"<Comparison of {join(self.names)}: {plural(self.matched, self.unit)} in common, {found}>"


def _verdict(found: Comparison) -> tuple[str, str]:
    """Two sentences for the view: which quantities differ, and what to look at first."""
    verdict = "No difference exceeds its error: the runs agree within their uncertainty."
    advice = "Use more replicates or more tokens to detect smaller differences."
    top = found.ranked[0]
    if top.exceeds:
        marked = [(row["quantity"], sum(row["marked"].values()), sum(row["tested"].values())) for row in found.summary]
        number = sum(count for _, count, _ in marked)
        exceed = f"{number} differences exceed their errors" if number > 1 else "One difference exceeds its error"
        verdict = f"{exceed}: {join([f'{name} in {count} of {tested}' for name, count, tested in marked if count])}."
        change = f"{short(top.first.value)} to {short(top.value.value)}"
        advice = f"Look first at {top.where}: its {top.quantity} changes from {change} in {top.run}."
    real = [f"{r.quantity} of {r.run} ({r.difference:+.2g} ± {r.stderr:.1g})" for r in found.paired if r.real]
    if real:
        verdict += f" Significant over all heads: {join(real)}."
    elif found.paired:
        verdict += " Paired by head, no quantity differs significantly over all heads."
    return verdict, advice


def _paired_table(found: Comparison) -> Table:
    columns = ("quantity", "run", "heads", "mean difference from the first run", "p (Holm)", "significant")
    rows = [(r.quantity, r.run, r.heads, Estimate(r.difference, r.stderr), r.p, r.real) for r in found.paired]
    return Table("paired", columns, rows, frozenset(i for i, row in enumerate(rows) if row[-1]))


def _summary_table(found: Comparison) -> Table:
    average = "mean" if found.unit == "model average" else "median"
    others = found.names[1:]
    rows = []
    for row in found.summary:
        counts = [(row["marked"][name], row["tested"][name]) for name in others]
        differ = [f"{marked} of {tested}" if tested else None for marked, tested in counts]
        rows.append([row["quantity"], *row["medians"].values(), *differ])
    columns = ["quantity", *(f"{average}, {name}" for name in found.names), *(f"differ, {name}" for name in others)]
    return Table("summary", columns, rows)


def _differences_table(found: Comparison) -> Table:
    columns = ("where", "quantity", "run", f"in {found.names[0]}", "in run", "difference", "difference / error")
    verdicts = {True: "exceeds its error", False: "", None: "no standard error"}
    listed = found.ranked[:LISTED]
    rows = [
        (r.where, r.quantity, r.run, r.first, r.value, r.difference, r.in_errors, verdicts[r.exceeds]) for r in listed
    ]
    marked = frozenset(i for i, row in enumerate(listed) if row.exceeds)
    return Table("differences", (*columns, "verdict"), rows, marked=marked, shown=SHOWN)


def _figures(found: Comparison) -> list[Figure]:
    """Figures of each quantity in later runs against the first run, with a point for each place."""
    looks: tuple[tuple[bool, str, Colour], ...] = (
        (False, "within errors", "grey"),
        (True, "exceeds its error", "blue"),
    )
    figures = []
    for quantity in [
        row["quantity"] for row in found.summary if row["places"] >= PLACES and any(row["tested"].values())
    ]:
        tested = [row for row in found.differences if row.quantity == quantity and row.exceeds is not None]
        values = [one.value for row in tested for one in (row.first, row.value)]
        ends = [min(values), max(values)]
        series = [line("equal", ends, ends, "ink", "dashed")]
        for exceeds, name, colour in looks:
            rows = [row for row in tested if row.exceeds is exceeds]
            labels = [f"{row.where}, {row.run}\n{short(row.first.value)} → {short(row.value.value)}" for row in rows]
            x, y = [row.first.value for row in rows], [row.value.value for row in rows]
            series += [points(name, x, y, colour, labels=labels)] if rows else []
        log = ends[0] > 0 and ends[1] > 5 * ends[0]
        axes = (Axis(f"{quantity} in {found.names[0]}", log), Axis(f"{quantity} in {join(found.names[1:])}", log))
        figures.append(Figure(quantity.capitalize(), *axes, series, height=380))
    return figures
