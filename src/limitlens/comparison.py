"""Runs side by side: what differs, and whether the difference exceeds its error.

Every run is compared with the first. A measured quantity carries a standard error; the difference of two is marked when
it exceeds its own by more than chance explains over all the comparisons of that quantity, at the level 5% (Holm), by
Welch's t where the numbers of replicates are known. Quantities without an error are shown and never marked. The heads
of two models have no counterparts, so that models are compared by the means over their heads, with their spread as the
error. Runs of one model are compared head by head too (`Paired`): that is where a text, as a whole, differs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from limitlens.arrays import pd
from limitlens.errors import InputError
from limitlens.estimate import Estimate
from limitlens.loading import load
from limitlens.probing.regimes import Regime
from limitlens.probing.result import ProbeRun
from limitlens.record import to_json
from limitlens.report.view import SHADES, Axis, Colour, Figure, Row, Section, Table, View, line, points
from limitlens.report.words import join, plural, read_words, short
from limitlens.results import Result
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.multiple_testing import chance, holm

LEVEL = 0.05
WANTED, TOKENS = 0.05, "tokens for 5%"  # the error whose number of tokens is compared, and how that is called
WORDS = read_words("comparison.json")
AT = " at n = "  # between a quantity and the n it was measured at
LISTED, SHOWN = 400, 12  # differences that a page and a terminal list; the folder's table has them all
PLACES, PICTURES = 6, 3  # places from which on a quantity is worth a picture, and pictures at most


@dataclass(frozen=True)
class Value:
    """A finite number with its standard error and the replicates behind it, each None where not known."""

    value: float | None = None
    stderr: float | None = None
    replicates: int | None = None


Column = dict[tuple[str, str], Value]  # of a run: place and quantity


@dataclass(frozen=True)
class Difference:
    """One quantity at one place in the first run and in a later one; `exceeds` is None where an error is not known."""

    where: str
    quantity: str
    run: str
    first: float | None
    first_stderr: float | None
    value: float | None
    stderr: float | None
    difference: float | None
    difference_stderr: float | None
    exceeds: bool | None

    @property
    def in_errors(self) -> float | None:
        """The difference in standard errors, where they are known."""
        difference, error = self.difference, self.difference_stderr
        return difference / error if difference is not None and error else None


@dataclass(frozen=True)
class Paired:
    """One quantity in a later run less that in the first, the mean over the heads of a model, head by head.

    The squared error is the spread over heads over their number, plus the square of the mean standard error of a head
    where that is known: all heads read the same windows, so that what these do by chance is no more certain of many.
    """

    quantity: str
    run: str
    heads: int
    difference: float
    stderr: float
    p: float  # of Student's law, Holm's over all quantities and runs
    real: bool  # whether that is below the level


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Two or more runs, each against the first."""

    kind, file = "comparison", "differences"
    command: str  # which makes such runs
    unit: str  # what they have in common: head, error, number or model average
    runs: tuple[Mapping[str, Any], ...]  # what each run is, its `name` first
    same_model: bool  # they are probes, all of one model
    regimes: Mapping[str, Any] | None  # of probes: heads of each regime by run, and how many are not as in the first
    differences: tuple[Difference, ...]  # one for each place, quantity and later run
    level: float = LEVEL

    @property
    def names(self) -> list[str]:
        """The runs by name."""
        return [run["name"] for run in self.runs]

    @property
    def matched(self) -> int:
        """Places that the runs have in common."""
        return len({row.where for row in self.differences})

    @cached_property
    def ranked(self) -> list[Difference]:
        """The differences, those that exceed their errors first, the clearest before the others."""

        def clear(row: Difference) -> tuple[bool, float]:
            return bool(row.exceeds), -1.0 if row.difference is None else abs(row.in_errors or 0.0)

        return sorted(self.differences, key=clear, reverse=True)

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """One row per quantity: medians over places, and how many differences were tested and are marked."""
        first, *others = self.names
        rows = []
        for quantity in dict.fromkeys(row.quantity for row in self.differences):
            mine = [row for row in self.differences if row.quantity == quantity]
            runs = {name: [row for row in mine if row.run == name] for name in others}
            values = {first: [row.first for row in runs[others[0]]]}
            values |= {name: [row.value for row in own] for name, own in runs.items()}
            known = {name: [value for value in found if value is not None] for name, found in values.items()}
            medians = {name: median(found) if found else None for name, found in known.items()}
            marked = {name: sum(row.exceeds is True for row in own) for name, own in runs.items()}
            tested = {name: sum(row.exceeds is not None for row in own) for name, own in runs.items()}
            counts = {"places": len(values[first]), "medians": medians, "marked": marked, "tested": tested}
            rows.append({"quantity": quantity, **counts})
        return rows

    @cached_property
    def paired(self) -> tuple[Paired, ...]:
        """What differs over all heads of one model, for every quantity and later run; nothing for other runs."""
        groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for row in self.differences if self.same_model else ():
            if row.difference is not None and row.quantity != TOKENS:  # that is known for the quick heads alone
                groups[row.quantity, row.run].append((row.difference, row.difference_stderr or 0.0))
        found = []
        for place, pairs in groups.items():
            if (count := len(pairs)) >= PLACES:
                own, errors = zip(*pairs, strict=True)
                spread = math.hypot(stdev(own) / math.sqrt(count), mean(errors))
                found.append((*place, count, mean(own), spread, chance(mean(own), spread, count - 1)))
        adjusted = holm([row[-1] for row in found])
        return tuple(Paired(*row[:-1], p, p < self.level) for row, p in zip(found, adjusted, strict=True))

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per difference."""
        return pd.DataFrame(to_json(self.differences))

    def document(self) -> dict[str, Any]:
        """The comparison as a JSON document."""
        return {**super().document(), "matched": self.matched, "summary": self.summary, "paired": to_json(self.paired)}

    def view(self) -> View:
        """What it shows."""
        return _view(self)

    def figures(self) -> list[Figure]:
        """The later runs against the first, for quantities with several places and known errors."""
        found = _figures(self)
        if not found:
            raise InputError(f"no quantity has {PLACES} places with errors to draw; see the table of the comparison")
        return found

    def __repr__(self) -> str:
        marked = sum(bool(row.exceeds) for row in self.differences)
        found = f"{marked} of {len(self.differences)} differences exceed their errors"
        return f"<Comparison of {join(self.names)}: {plural(self.matched, self.unit)} in common, {found}>"


def compare(*runs: Result | str | Path) -> Comparison:
    """Two or more runs of one kind, each against the first: folders, or results of `probe`, `study` or `scaling`.

    >>> law, head, sizes = ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800]
    >>> runs = [ll.study(law, head, sizes, replicates=12, queries=32, seed=seed) for seed in (0, 1)]
    >>> len(ll.compare(*runs).table) > 0
    True
    """
    if len(runs) < 2:
        raise InputError(f"{plural(len(runs), 'run')} was given; expected at least two to compare, so name another run")
    found: list[Any] = [load(run) if isinstance(run, str | Path) else run for run in runs]
    kinds = list(dict.fromkeys(run.kind for run in found))
    if len(kinds) > 1:
        raise InputError(f"runs of {', '.join(kinds)} were given; expected runs of one kind, so leave out some")
    if kinds[0] not in _READERS:
        raise InputError(f"runs of {kinds[0]!r} cannot be compared; expected probes, studies or scaling limits")
    command, unit, read = _READERS[kinds[0]]
    models = [run.model_sha256 or run.model for run in found] if kinds == ["probe"] else []
    if len(set(models)) > 1:
        unit, read = "model average", _model_means
    names = _names(runs)
    differences = tuple(_differences([read(run) for run in found], names))
    if not differences:
        raise InputError("the runs have nothing in common to compare; expected the same sizes, errors or quantities")
    described = tuple({"name": name, **_described(run)} for name, run in zip(names, found, strict=True))
    regimes = _regimes(found, names, models) if models else None
    return Comparison(command, unit, described, len(set(models)) == 1, regimes, differences)


def _names(runs: Sequence[Any]) -> list[str]:
    """Names of folders, with their parents where names alone are not distinct; else what a result is about."""

    def name(run: Any, whole: bool) -> str:
        if isinstance(run, str | Path):
            return str(run) if whole else Path(run).resolve().name
        return f"{run.model} on {run.corpus}" if run.kind == "probe" else str(run.kind)

    brief, long = ([name(run, whole) for run in runs] for whole in (False, True))
    numbered = [f"{name} ({i})" for i, name in enumerate(long, 1)]
    return next(names for names in (brief, long, numbered) if len(set(names)) == len(names))


def _described(run: Any) -> dict[str, Any]:
    keys = ("model", "corpus", "measure", "sampling", "window", "tokens", "score_scale", "device", "seed")
    found = {key: value for key in keys if (value := getattr(run, key, None)) is not None}
    if run.kind == "study":
        found["horizon"] = run.theory["horizon"]
    elif run.kind == "scaling":
        inputs = run.document()["inputs"]
        found |= {key: inputs[key] for key in ("law", "dim", "n", "beta", "theta") if key in inputs}
    return found


def _regimes(runs: Sequence[ProbeRun], names: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    """Heads of each regime per run, and how many heads of a later run are of another regime than in the first."""
    found = {}
    of = [{head.place: head.regime for head in run.records} for run in runs]
    for name, model, own in zip(names, models, of, strict=True):
        counts = {regime.value: list(own.values()).count(regime) for regime in Regime}
        changed = sum(own[place] is not of[0][place] for place in own if place in of[0])
        found[name] = {**counts, "changed": changed if model == models[0] else None}
    return found


def _probe(run: ProbeRun) -> Column:
    found: Column = {}
    for head in run.records:
        where, last = head.name, f"{AT}{head.sizes[-1]:,}"
        found |= _curve(where, head.curve, run.replicates)
        effective = [None] * len(head.sizes) if head.effective_tokens is None else head.effective_tokens.tolist()
        for n, tokens in zip(head.sizes, effective, strict=True):
            found[where, f"effective tokens{AT}{n:,}"] = Value(to_json(tokens))
        known = head.curve.tokens_for(WANTED)  # its standard error is read off its 95% interval
        low, high = known.interval
        spread = None if low is None or high is None else (high - low) / (2 * 1.96)
        found[where, TOKENS] = Value() if known.document() is None else Value(known.n, spread)
        for name, word in WORDS["quantities"].items():
            found[where, word.format(last=last)] = Value(to_json(getattr(head, name)))
    return found


def _model_means(run: ProbeRun) -> Column:
    """A model whose heads have no counterpart in another: means over its heads, their spread as the error."""
    heads: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), value in _probe(run).items():
        if value.value is not None and quantity != TOKENS:  # known only for the quick heads: its mean says nothing
            heads[quantity].append(value.value)
    return {
        ("all heads", name): Value(mean(found), stdev(found) / math.sqrt(len(found)), len(found))
        for name, found in heads.items()
        if len(found) > 1
    }


def _study(run: Any) -> Column:
    """The error curves of a study, or of every study of a sweep."""
    studies = [("", run)]
    if run.kind != "study":
        name, grid = ("H", run.horizons) if run.kind == "horizons" else ("R", run.radii)
        studies = [(f"{name} = {value:.4g}, ", curve) for value, curve in zip(grid, run.curves, strict=False)]
    found: Column = {}
    for prefix, study in studies:
        for name in study.names:  # error by error: a median over mean, covariance and output would say nothing
            found |= _curve(f"{prefix}{name}", study.errors[name], study.replicates, f" of the {name}")
    return found


def _curve(where: str, curve: ErrorCurve, count: int, of: str = "") -> Column:
    """The rate of an error curve, and its errors."""
    rate = curve.rate
    found = {(where, f"rate{of}"): Value() if rate is None else Value(to_json(rate.slope), to_json(rate.stderr), count)}
    for n, error, stderr in zip(curve.sizes, curve.error, curve.stderr, strict=True):
        found[where, f"error{of}{AT}{n:,}"] = Value(to_json(error), to_json(stderr), count)
    return found


def _scaling(run: Any) -> Column:
    found, count = run.quantities.items(), run.inputs["replicates"]
    return {(name, "measured"): Value(to_json(one.measured), to_json(one.stderr), count) for name, one in found}


# By kind: its command, what is matched, how to read it.
_READERS: dict[str, tuple[str, str, Callable[[Any], Column]]] = {
    "probe": ("probe", "head", _probe),
    "study": ("study", "error", _study),
    "horizons": ("study", "error", _study),
    "radii": ("study", "error", _study),
    "scaling": ("scaling", "number", _scaling),
}


def _differences(columns: Sequence[Column], names: Sequence[str]) -> list[Difference]:
    """What every run has, in the order of the first; of what depends on n only the largest n they share."""
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    last = {(where, quantity.split(AT)[0]): quantity for where, quantity in shared}
    pairs = [
        (key, name, columns[0][key], column[key], *_difference(columns[0][key], column[key]))
        for key in shared
        if last[key[0], key[1].split(AT)[0]] == key[1] and any(column[key].value is not None for column in columns)
        for name, column in zip(names[1:], columns[1:], strict=True)
    ]
    chances: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), *_, difference, spread, freedom in pairs:
        if difference is not None and spread is not None:
            chances[quantity].append(chance(difference, spread, freedom))
    left = {quantity: iter(holm(found)) for quantity, found in chances.items()}
    rows = []
    for key, name, a, b, difference, spread, _ in pairs:
        exceeds = None if spread is None else next(left[key[1]]) < LEVEL
        rows.append(Difference(*key, name, a.value, a.stderr, b.value, b.stderr, difference, spread, exceeds))
    return rows


def _difference(a: Value, b: Value) -> tuple[float | None, float | None, float]:
    """b − a, its standard error, and the degrees of freedom of that (Welch); None for what is not known."""
    difference = None if a.value is None or b.value is None else b.value - a.value
    if difference is None or a.stderr is None or b.stderr is None:
        return difference, None, math.inf
    total, shares = a.stderr**2 + b.stderr**2, 0.0
    if a.replicates and b.replicates and min(a.replicates, b.replicates) > 1:
        shares = a.stderr**4 / (a.replicates - 1) + b.stderr**4 / (b.replicates - 1)
    return difference, math.sqrt(total), total**2 / shares if shares > 0 else math.inf


def _view(found: Comparison) -> View:
    first, in_common, top = found.names[0], plural(found.matched, found.unit), found.ranked[0]
    keys = list(dict.fromkeys(key for run in found.runs for key in run if key != "name"))
    about = [Table("runs", ["run", *keys], [[run["name"], *(run.get(key) for key in keys)] for run in found.runs])]
    known = {"of": found, "first": first, "listed": LISTED, "count": len(found.ranked), "in_common": in_common}
    if found.regimes:
        columns = ("run", *(regime.value for regime in Regime), f"other than in {first}")
        about.append(Table("regimes", columns, [(name, *row.values()) for name, row in found.regimes.items()]))
    cautions = {
        "models": found.regimes is not None and not found.same_model,
        "factors": len({run.get("score_scale") for run in found.runs}) > 1,
        "listed": len(found.ranked) > LISTED,
    }
    trust = [WORDS["level"], *(WORDS[name] for name, applies in cautions.items() if applies)]
    told = WORDS["agree"]
    if top.exceeds:
        marked = {row["quantity"]: (sum(row["marked"].values()), sum(row["tested"].values())) for row in found.summary}
        counts = [f"{quantity} in {some} of {tested}" for quantity, (some, tested) in marked.items() if some]
        number = sum(some for some, _ in marked.values())
        known |= {"counts": join(counts), "top": top, "change": f"{short(top.first)} to {short(top.value)}"}
        known["exceed"] = WORDS["many" if number > 1 else "one"].format(number=number)
        told = WORDS["differ"]
    parts = (WORDS["subtitle"], WORDS["read"], *told, *trust)
    subtitle, read, verdict, advice, *notes = (
        text.format(names=join(found.names), runs=plural(len(found.runs), "run"), **known) for text in parts
    )
    rows = [(r.quantity, r.run, r.heads, Estimate.of(r.difference, r.stderr), r.p, r.real) for r in found.paired]
    real = [f"{r.quantity} of {r.run} ({r.difference:+.2g} ± {r.stderr:.1g})" for r in found.paired if r.real]
    over_heads = Table("paired", WORDS["paired columns"], rows, frozenset(i for i, row in enumerate(rows) if row[-1]))
    if found.paired:
        verdict += " " + WORDS["real" if real else "not real"].format(real=join(real))
    sections = [
        Section("The runs", "", about),
        *([Section("Over all heads", WORDS["paired"], [over_heads])] if found.paired else []),
        Section("Quantity by quantity", f"Each against {first}.", (_summary_table(found), Row(_figures(found)))),
        Section("Place by place", WORDS["place by place"], [_differences_table(found)]),
    ]
    return View(" against ".join(found.names), subtitle, (read, verdict, advice), sections, trust=notes)


def _summary_table(found: Comparison) -> Table:
    middle, others = "mean" if found.regimes and not found.same_model else "median", found.names[1:]
    rows = []
    for row in found.summary:
        marked, tested = row["marked"], row["tested"]
        differ = [f"{marked[name]} of {tested[name]}" if tested[name] else None for name in others]
        rows.append([row["quantity"], *row["medians"].values(), *differ])
    columns = ["quantity", *(f"{middle}, {name}" for name in found.names), *(f"differ, {name}" for name in others)]
    return Table("summary", columns, rows)


def _differences_table(found: Comparison) -> Table:
    values = (f"in {found.names[0]}", "in run", "difference", "difference / error", "verdict")
    words = {True: "exceeds its error", False: "", None: "no error known"}
    listed = found.ranked[:LISTED]
    rows = [
        (
            *(row.where, row.quantity, row.run),
            *(Estimate.of(row.first, row.first_stderr), Estimate.of(row.value, row.stderr)),
            *(Estimate.of(row.difference, row.difference_stderr), row.in_errors, words[row.exceeds]),
        )
        for row in listed
    ]
    marked = frozenset(i for i, row in enumerate(listed) if row.exceeds)
    return Table("differences", ("where", "quantity", "run", *values), rows, marked=marked, shown=SHOWN)


def _figures(found: Comparison) -> list[Figure]:
    """The later runs against the first, for quantities with several places and known errors."""
    drawn = [row["quantity"] for row in found.summary if row["places"] >= PLACES and any(row["tested"].values())]
    return [_scatter(found, quantity) for quantity in drawn[:PICTURES]]


def _scatter(found: Comparison, quantity: str) -> Figure:
    first, *others = found.names
    tested = [row for row in found.differences if row.quantity == quantity and row.exceeds is not None]
    values = [value for row in tested for value in (row.first, row.value) if value is not None]
    ends = [min(values), max(values)]
    series = [line("equal", ends, ends, "ink", "dashed")]
    looks: list[tuple[str, Colour]] = [("within errors", "grey"), *((n, SHADES[i % 6]) for i, n in enumerate(others))]
    for name, colour in looks:
        own = [row for row in tested if (row.run if row.exceeds else "within errors") == name]
        labels = [f"{row.where}, {row.run}\n{short(row.first)} → {short(row.value)}" for row in own]
        across, up = [row.first for row in own], [row.value for row in own]
        label = f"{name}: exceeds its error" if name in others else name
        series += [points(label, across, up, colour, labels=labels)] if own else []
    log = ends[0] > 0 and ends[1] > 5 * ends[0]
    where = others[0] if len(others) == 1 else "the others"
    axes = (Axis(f"{quantity} in {first}", log), Axis(f"{quantity} in {where}", log))
    return Figure(quantity.capitalize(), *axes, series, height=380)
