"""Comparison of two or more runs of one kind with the first of them (`limitlens.compare`).

Differences are tested at 5% by Welch's t-test, with Holm's correction over all comparisons of one quantity. Runs of one
model are compared head by head and over all heads; runs of different models by their means over heads.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from limitlens.arrays import pd
from limitlens.errors import InputError
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.experiments.study_result import StudyResult
from limitlens.probing.result import ProbeRun
from limitlens.record import Run, read_run, to_json
from limitlens.report.text import join, plural, short
from limitlens.report.view import Axis, Cell, Colour, Figure, Row, Section, Table, View, line, points
from limitlens.results import Result
from limitlens.statistics.documents import holm, p_value
from limitlens.statistics.error_curve import ErrorCurve

Value: TypeAlias = tuple[Estimate, int | None]  # a measured number, and its number of replicates if known
Column: TypeAlias = dict[tuple[str, str], Value]  # numbers of a run by (head or kind of error, quantity)

LEVEL = 0.05  # significance level of the tests of differences
LISTED, SHOWN = 400, 12  # differences listed on a page and in a terminal; the saved table has all
PLACES = 6  # fewest heads (or kinds of error) for a figure of a quantity and for a test over all heads
AT = " at n = "  # between a quantity and the n at which it was measured
TOKENS = "tokens for 5%"  # the quantity n(5%)
QUANTITIES = {
    "top_weight": "largest weight", "entropy": "entropy", "horizon": "horizon", "score_std": "score spread",
    "mean_tilt": "mean tilt", "sink_mass": "mass on the sink", "pareto_k": "tail k̂",
}  # fmt: skip
CLASSES = {"probe": ProbeRun, "study": StudyResult}  # by kind
OVER_HEADS = (
    " Mean differences are paired by head; p has Holm's correction over all rows. For quantities without a standard "
    "error, p ignores the random choice of text: two runs on the same text show how large its effect is."
)


@dataclass(frozen=True)
class Difference:
    """One quantity of one head (or kind of error) in the first run and in a later run, and their difference."""

    where: str  # name of the head or kind of error
    quantity: str
    run: str
    first: Estimate
    value: Estimate
    difference: Estimate
    exceeds: bool | None  # whether the difference is significant; None without a standard error

    @property
    def in_errors(self) -> float | None:
        """Difference divided by its standard error; None if one of them is unknown."""
        stderr = self.difference.stderr
        return self.difference.value / stderr if self.difference.known and stderr and not math.isnan(stderr) else None


@dataclass(frozen=True)
class QuantitySummary:
    """Comparison of one quantity between a later run and the first run, over all heads (or kinds of error).

    For runs of one model, `difference` is the mean over heads of later − first. Its standard error is √(s²/h + e²)
    with h heads, s the standard deviation over heads, and e the mean standard error of a head (0 where unknown). e² is
    not divided by h, because all heads read the same text.
    """

    quantity: str
    run: str
    places: int  # number of heads (or kinds of error)
    first: float  # median in the first run
    value: float  # median in the later run
    tested: int  # number of heads whose difference has a standard error
    marked: int  # number of heads whose difference is significant
    difference: Estimate  # unknown unless the runs are of one model
    p: float | None  # of that mean difference by Student's t, with Holm's correction over all quantities and runs

    @property
    def real(self) -> bool:
        """Whether the mean difference over all heads is significant."""
        return self.p is not None and self.p < LEVEL


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Result of `limitlens.compare`: two or more runs, each compared with the first run."""

    kind, file = "comparison", "differences"
    command: str  # the command that makes such runs
    unit: str  # what is compared between runs: "head", "error" (each kind of error) or "model average"
    runs: tuple[Mapping[str, Any], ...]  # description of each run, its `name` first
    differences: tuple[Difference, ...]  # for each head (or kind of error), quantity and later run

    @property
    def names(self) -> list[str]:
        """Names of the compared runs, the first run first."""
        return [run["name"] for run in self.runs]

    @property
    def matched(self) -> int:
        """Number of heads (or kinds of error) that all runs have."""
        return len({row.where for row in self.differences})

    @cached_property
    def ranked(self) -> list[Difference]:
        """All differences, significant ones first, then by size in standard errors."""
        return sorted(self.differences, key=lambda r: (not r.exceeds, -abs(r.in_errors or 0.0), not r.difference.known))

    @cached_property
    def summary(self) -> list[QuantitySummary]:
        """Summary of each quantity in each later run, over all heads (or kinds of error)."""
        groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
        for row in self.differences:
            groups[row.quantity, row.run].append(row)
        rows = []
        for (quantity, run), found in groups.items():
            pairs = pd.DataFrame([(row.first.value, row.value.value) for row in found])
            first, value = pairs.median().tolist()  # of the values that are known
            tested = [row.exceeds for row in found if row.exceeds is not None]
            known = [row.difference for row in found if row.difference.known]
            difference, p = UNKNOWN, None
            # n(5%) is known only for heads that converge fast
            if self.unit == "head" and quantity != TOKENS and len(known) >= PLACES:
                shared = mean(0.0 if math.isnan(one.stderr) else one.stderr for one in known)
                values = [one.value for one in known]
                difference = Estimate(mean(values), math.hypot(stdev(values) / math.sqrt(len(values)), shared))
                p = p_value(difference.value, difference.stderr, len(values) - 1)
            counts = len(tested), sum(tested)
            rows.append(QuantitySummary(quantity, run, len(found), first, value, *counts, difference, p))
        adjusted = iter(holm([row.p for row in rows if row.p is not None]))
        return [row if row.p is None else replace(row, p=next(adjusted)) for row in rows]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per difference: head, quantity, run, both values and whether it is significant."""
        return pd.DataFrame(to_json(self.differences))

    def document(self) -> dict[str, Any]:
        """Comparison as a JSON document, with the summary of each quantity."""
        summary = [{**to_json(row), "real": row.real} for row in self.summary]
        return {**super().document(), "matched": self.matched, "summary": summary}

    def view(self) -> View:
        """Tables of the runs and their differences, and figures of later runs against the first, for display."""
        first = self.names[0]
        in_common = plural(self.matched, self.unit)
        keys = list(dict.fromkeys(key for run in self.runs for key in run if key != "name"))
        about = Table("runs", ["run", *keys], [[run["name"], *(run.get(key) for key in keys)] for run in self.runs])
        trust = [
            f"A difference is marked if it is significant at the level {LEVEL:.0%} over all comparisons of its "
            "quantity (Holm); quantities without a standard error are never marked."
        ]
        if self.unit == "model average":
            trust.append("The runs probed different models, whose heads have no counterparts: means are compared.")
        if self.unit == "head":
            trust.append(
                "Standard errors of errors and rates are those between seeds on one text; if the runs read different "
                "texts, they also count the choice of each text's windows."
            )
        if len({run.get("score_scale") for run in self.runs}) > 1:
            trust.append("The runs scaled the scores differently, which may cause the differences.")
        lead = f"Each run compared with {first}.{OVER_HEADS if self.unit == 'head' else ''}"
        sections = [
            Section("The runs", "", [about]),
            Section("By quantity", lead, (self._summary_table(), Row(self._figures()))),
            Section("By place", f"The {LISTED} clearest differences; the table has all.", [self._differences_table()]),
        ]
        subtitle = f"{plural(len(self.runs), 'run')} of limitlens {self.command} · {in_common} in common"
        measured = f"{join(self.names)} were compared on {in_common}: each difference from {first} with its error."
        return View(" against ".join(self.names), subtitle, (measured, *self._verdict()), sections, trust=trust)

    def _verdict(self) -> tuple[str, str]:
        """Two sentences: which quantities differ, and what to look at first."""
        verdict = "No difference exceeds its error: the runs agree within their uncertainty."
        advice = "Use more replicates or more tokens to detect smaller differences."
        top = self.ranked[0]
        if top.exceeds:
            number = sum(row.marked for row in self.summary)
            exceed = f"{number} differences exceed their errors" if number > 1 else "One difference exceeds its error"
            of = {run: f" of {run}" if len(self.runs) > 2 else "" for run in self.names}
            marked = [f"{r.quantity}{of[r.run]} in {r.marked} of {r.tested}" for r in self.summary if r.marked]
            verdict = f"{exceed}: {join(marked)}."
            change = f"{short(top.first.value)} to {short(top.value.value)}"
            advice = f"Look first at {top.where}: its {top.quantity} changes from {change} in {top.run}."
        real = [(row, row.difference) for row in self.summary if row.real]
        if real:
            named = [f"{row.quantity} of {row.run} ({mean.value:+.2g} ± {mean.stderr:.1g})" for row, mean in real]
            verdict += f" Significant over all heads: {join(named)}."
        elif any(row.p is not None for row in self.summary):
            verdict += " Paired by head, no quantity differs significantly over all heads."
        return verdict, advice

    def _summary_table(self) -> Table:
        average = "mean" if self.unit == "model average" else "median"
        columns = ["quantity", "run", f"{average} in {self.names[0]}", f"{average} in run", "places that differ"]
        paired = ["mean difference over heads", "p (Holm)", "significant"] if self.unit == "head" else []
        rows: list[list[Cell]] = []
        for row in self.summary:
            differ = f"{row.marked} of {row.tested}" if row.tested else None
            verdict = None if row.p is None else row.real
            cells: list[Cell] = [row.quantity, row.run, row.first, row.value, differ, row.difference, row.p, verdict]
            rows.append(cells[: len(columns) + len(paired)])
        marked = frozenset(i for i, row in enumerate(self.summary) if row.real)
        return Table("summary", [*columns, *paired], rows, marked)

    def _differences_table(self) -> Table:
        columns = ("where", "quantity", "run", f"in {self.names[0]}", "in run", "difference", "difference / error")
        listed = self.ranked[:LISTED]
        rows = [(r.where, r.quantity, r.run, r.first, r.value, r.difference, r.in_errors, r.exceeds) for r in listed]
        marked = frozenset(i for i, row in enumerate(listed) if row.exceeds)
        return Table("differences", (*columns, "exceeds its error"), rows, marked=marked, shown=SHOWN)

    def _figures(self) -> list[Figure]:
        """Figure for each quantity: its values in later runs against the first run, with a point for each head."""
        looks: dict[bool, tuple[str, Colour]] = {False: ("within errors", "grey"), True: ("exceeds its error", "blue")}
        figures = []
        for quantity in dict.fromkeys(row.quantity for row in self.summary if row.places >= PLACES and row.tested):
            tested = [row for row in self.differences if row.quantity == quantity and row.exceeds is not None]
            values = [one.value for row in tested for one in (row.first, row.value)]
            ends = [min(values), max(values)]
            series = [line("equal", ends, ends, "ink", "dashed")]
            for exceeds, (name, colour) in looks.items():
                rows = [row for row in tested if row.exceeds is exceeds]
                x, y = [row.first.value for row in rows], [row.value.value for row in rows]
                labels = [f"{r.where}, {r.run}\n{short(r.first.value)} → {short(r.value.value)}" for r in rows]
                series += [points(name, x, y, colour, labels=labels)] if rows else []
            log = ends[0] > 0 and ends[1] > 5 * ends[0]
            axes = (Axis(f"{quantity} in {self.names[0]}", log), Axis(f"{quantity} in {join(self.names[1:])}", log))
            figures.append(Figure(quantity.capitalize(), *axes, series, height=380))
        return figures


def compare(*runs: Result | str | Path) -> Comparison:
    """Compare two or more results (or their folders) with the first: all of `probe` and `predict`, or all of `study`.

    >>> law, head, sizes = ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800]
    >>> runs = [ll.study(law, head, sizes, replicates=12, queries=32, seed=seed) for seed in (0, 1)]
    >>> len(ll.compare(*runs).table) > 0
    True
    """
    if len(runs) < 2:
        raise InputError(f"{plural(len(runs), 'run')} was given; expected at least two to compare, so name another run")
    found: list[Any] = [read_run(run) if isinstance(run, str | Path) else run for run in runs]
    kinds = list(dict.fromkeys(run.kind for run in found))
    if len(kinds) > 1:
        raise InputError(f"runs of {', '.join(kinds)} were given; expected runs of one kind, so leave out some")
    if kinds[0] not in CLASSES:
        raise InputError(f"runs of {kinds[0]!r} cannot be compared; expected probes, predictions or studies")
    results = [run.result(CLASSES[kinds[0]]) if isinstance(run, Run) else run for run in found]
    read: Callable[[Any], Column]
    command, unit, read = ("probe", "head", _probe) if kinds[0] == "probe" else ("study", "error", _study)
    if unit == "head" and len({run.model_sha256 or run.model for run in results}) > 1:
        unit, read = "model average", _model_means
    elif unit == "head" and len({run.corpus_sha256 for run in results}) > 1:
        read = partial(_probe, other_text=True)
    names = [_name(run) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    differences = find_differences([read(run) for run in results], names)
    if not differences:
        raise InputError("the runs have nothing in common to compare; expected the same sizes, errors or quantities")
    keys = ("model", "corpus", "measure", "sampling", "window", "tokens", "score_scale", "device", "seed")
    about = [{"name": name} for name in names]
    for row, run in zip(about, results, strict=True):
        row |= {key: value for key in keys if (value := getattr(run, key, None)) is not None}
        row |= {"horizon": run.theory["horizon"]} if command == "study" else {}
    return Comparison(command, unit, tuple(about), tuple(differences))


def _name(run: Result | str | Path) -> str:
    if isinstance(run, str | Path):
        return Path(run).resolve().name
    return f"{run.model} on {run.corpus}" if isinstance(run, ProbeRun) else run.kind


def _value(value: Any, stderr: Any = None, replicates: int | None = None) -> Value:
    """Estimate with its number of replicates; None, NaN and ∞ stand for unknown numbers."""
    return Estimate.of(to_json(value), to_json(stderr)), replicates


def _probe(run: ProbeRun, other_text: bool = False) -> Column:
    """Numbers of every head of a probe that are compared: rate, errors, tokens needed, `QUANTITIES` and others.

    With `other_text`, standard errors of errors and rates count the choice of text: the runs read different texts.
    """
    found: Column = {}
    for head in run.records:
        found |= _curve(head.name, head.curve.for_other_text if other_text else head.curve, run.replicates)
        effective = [None] * len(head.sizes) if head.effective_tokens is None else head.effective_tokens.tolist()
        for n, tokens in zip(head.sizes, effective, strict=True):
            found[head.name, f"effective tokens{AT}{n:,}"] = _value(tokens)
        needed = head.curve.tokens_for(0.05)
        low, high = needed.interval  # the standard error follows from the 95% interval
        stderr = None if low is None or high is None else (high - low) / (2 * 1.96)
        found[head.name, TOKENS] = (UNKNOWN, None) if needed.document() is None else _value(needed.n, stderr)
        for name, label in QUANTITIES.items():
            last = f"{AT}{head.sizes[-1]:,}" if name in ("top_weight", "entropy") else ""
            found[head.name, label + last] = _value(getattr(head, name))
    return found


def _model_means(run: ProbeRun) -> Column:
    """Mean of each quantity of a probe over all heads, with its standard error from the spread over heads."""
    heads: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), (estimate, _) in _probe(run).items():
        if estimate.known and quantity != TOKENS:  # n(5%) is known only for heads that converge fast
            heads[quantity].append(estimate.value)
    return {
        ("all heads", name): _value(mean(found), stdev(found) / math.sqrt(len(found)), len(found))
        for name, found in heads.items()
        if len(found) > 1
    }


def _study(run: StudyResult) -> Column:
    """Numbers of a study that are compared: the rate and the errors of each error curve."""
    found: Column = {}
    for name, errors in run.errors.items():  # each kind of error is a quantity of its own
        found |= _curve(name, errors, run.replicates, f" of the {name}")
    return found


def _curve(where: str, curve: ErrorCurve, count: int, of: str = "") -> Column:
    """Rate and errors of the error curve of head `where`, from `count` replicates; `of` ends the quantities' names."""
    rate = curve.rate
    found = {(where, f"rate{of}"): (UNKNOWN, None) if rate is None else _value(rate.slope, rate.stderr, count)}
    for n, error, stderr in zip(curve.sizes, curve.error, curve.stderr, strict=True):
        found[where, f"error{of}{AT}{n:,}"] = _value(error, stderr, count)
    return found


def find_differences(columns: Sequence[Column], names: Sequence[str]) -> list[Difference]:
    """Test the differences between later runs and the first, for each number that all runs have.

    `columns` holds the numbers of each run. Quantities measured at several n are compared at the largest n in common.
    """
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    last = {(where, quantity.split(AT)[0]): quantity for where, quantity in shared}
    compared = [
        (key, name, columns[0][key], column[key])
        for key in shared
        if last[key[0], key[1].split(AT)[0]] == key[1] and any(column[key][0].known for column in columns)
        for name, column in zip(names[1:], columns[1:], strict=True)
    ]
    tested = [_welch(first, later) for _, _, first, later in compared]
    p_values: dict[str, list[float]] = defaultdict(list)
    for (key, *_), (_, p) in zip(compared, tested, strict=True):
        p_values[key[1]] += [] if p is None else [p]
    adjusted = {quantity: iter(holm(found)) for quantity, found in p_values.items()}
    return [
        Difference(*key, name, first[0], later[0], difference, None if p is None else next(adjusted[key[1]]) < LEVEL)
        for (key, name, first, later), (difference, p) in zip(compared, tested, strict=True)
    ]


def _welch(first: Value, later: Value) -> tuple[Estimate, float | None]:
    """Difference later − first, and its p-value by Welch's t-test (None if a standard error is unknown)."""
    (a, replicates_a), (b, replicates_b) = first, later
    variance = a.stderr**2 + b.stderr**2
    if math.isnan(b.value - a.value) or math.isnan(variance):
        return Estimate(b.value - a.value), None
    below = 0.0
    if replicates_a and replicates_b and min(replicates_a, replicates_b) > 1:
        below = a.stderr**4 / (replicates_a - 1) + b.stderr**4 / (replicates_b - 1)
    difference = Estimate(b.value - a.value, math.sqrt(variance))
    return difference, p_value(difference.value, difference.stderr, variance**2 / below if below > 0 else math.inf)
