"""`limitlens.reproduce`: run a published experiment by name and compare its numbers with the published ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from limitlens.arrays import pd
from limitlens.errors import InputError, Progress, check_seed
from limitlens.estimate import Estimate
from limitlens.published.catalogue import Number, catalogue, named
from limitlens.report.text import cell, plural
from limitlens.report.view import (
    Axis,
    Cell,
    Colour,
    Figure,
    Guide,
    Section,
    Series,
    Table,
    Text,
    View,
    line,
    look,
    points,
)
from limitlens.results import Result

LINES: tuple[Colour, ...] = ("grey", "ink", "sky")
VERDICTS = ("agrees", "differs", "no")  # first words of the verdicts on claims
T = TypeVar("T")
# Names of the experiments that each module of `limitlens.published` runs.
HOME = {
    "laws": "gaussian-horizon sphere-d50 hardmax-log",
    "encoders": "bert-layers window-random horizon-ablation downstream",
    "temperatures": "critical-weights three-regimes backward-heat critical-log-n",
}


@dataclass(frozen=True)
class Drawn:
    """A series of a reproduced experiment's figure: points with standard errors, or a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...] | None = None
    line: bool = False

    def series(self, place: int) -> Series:
        """Series for the figure, coloured and dashed as number `place` among the points or among the lines."""
        if self.line:
            return line(self.name, self.x, self.y, LINES[place % len(LINES)], ("", "dashed", "dotted")[place % 3])
        colour, dash = look(place)
        return points(self.name, self.x, self.y, colour, self.stderr, dash=dash, positive=False)


@dataclass
class Work:
    """A running experiment: seed and options, and the numbers, figure series and warnings collected so far."""

    seed: int
    as_published: bool
    progress: Progress | None = None
    numbers: dict[str, Number] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def each(self, steps: Sequence[T]) -> Iterator[T]:
        """Iterate over the steps of the experiment, reporting progress after each step."""
        for done, step in enumerate(steps):
            yield step
            if self.progress is not None:
                self.progress(done + 1, len(steps))

    def whole(self, result: T) -> T:
        """Return the result of one step and collect its warnings; an interrupted result ends the experiment."""
        if getattr(result, "interrupted", False):
            raise KeyboardInterrupt
        self.warnings += [one for one in getattr(result, "warnings", ()) if one not in self.warnings]
        return result

    def draw(self, name: str, x: Any, y: Any, stderr: Any = None, line: bool = False) -> None:
        """Add a series of points (x, y) with standard errors, or a line, to the experiment's figure."""
        x, y, bars = (None if part is None else tuple(float(one) for one in part) for part in (x, y, stderr))
        self.drawn.append(Drawn(name, x, y, bars, line))


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(Result):
    """Result of `reproduce`: our numbers for one published experiment, next to the published ones."""

    kind, file = "reproduction", "reproduction"
    name: str
    quick: bool
    as_published: bool  # whether numbers are also computed with the definitions of the published code
    parameters: Mapping[str, Any]  # parameters of the experiment in this run
    numbers: Mapping[str, Number]  # by the name of the claim in the catalogue
    drawn: tuple[Drawn, ...]
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        """One row per claim: our number, the published one, ours by the published code's definitions, and verdict."""
        rows, claims = [], named(self.name).claims
        for key, found in self.numbers.items():
            theirs, verdict = claims[key].verdict(found)
            own = {"claim": key, "ours": found.value, "stderr": found.stderr, "published": theirs}
            more = {"as_published": found.as_published, "as_published_stderr": found.as_published_stderr}
            rows.append(own | more | {"verdict": verdict, "says": claims[key].says, "where": claims[key].where})
        numeric = dict.fromkeys(("ours", "stderr", "published", "as_published", "as_published_stderr"), float)
        return pd.DataFrame(rows).astype(numeric)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Table of the claims with their verdicts, and table of the points of the figure, by file name."""
        parts = [
            pd.DataFrame({"series": one.name, "x": one.x, "y": one.y, "stderr": one.stderr, "line": one.line})
            for one in self.drawn
        ]
        return {self.file: self.table, "points": pd.concat([part.astype({"stderr": float}) for part in parts])}

    def view(self) -> View:
        """Page of the reproduction: figure, table of our numbers and the published ones, and parameters."""
        about = named(self.name)
        rows = [self._row(key) for key in self.numbers]
        extra = ["with the published code"] if self.as_published else []
        columns = ["quantity", "ours", "published", *extra, "verdict"]
        series = [one.series([other.line for other in self.drawn[:place]].count(one.line))
                  for place, one in enumerate(self.drawn)]  # fmt: skip
        names = dict.fromkeys([*about.published, *self.parameters])
        given = [(name, *(_shown(of.get(name)) for of in (about.published, self.parameters))) for name in names]
        agree, differ, other = (sum(str(row[-1]).startswith(verdict) for row in rows) for verdict in VERDICTS)
        axes = Axis(**about.figure["x"]), Axis(**about.figure["y"])
        guides = [Guide(**guide) for guide in about.figure.get("guides", ())]
        height = about.figure.get("height", 320)
        figure = Figure(about.figure["title"], *axes, series, guides, height=height)
        parameters = Table("parameters", ("parameter", "published", "here"), given)
        return View(
            about.title,
            f"{about.source} · {'quick' if self.quick else 'full'} size · {self.seconds:,.0f} s",
            (
                about.shows,
                f"Of {plural(agree + differ, 'claim')} with a published number or bound, {agree} agree and {differ} "
                f"differ by more than three standard errors; {other} further numbers have no comparable published one.",
                f"What to expect: {about.expect}",
            ),
            [
                Section(
                    "Our numbers and the published ones",
                    "Points have 95% intervals. Numbers that are published only in a figure are not read off it; "
                    "formulas are evaluated at the parameters of this run.",
                    [figure, Table("our numbers and the published ones", columns, rows)],
                ),
                Section(
                    "Parameters",
                    "Parameters of the publication and of this run, and where they differ on purpose.",
                    [Text(about.deviations, listed=True), parameters],
                ),
            ],
            warnings=self.warnings,
        )

    def _row(self, key: str) -> tuple[Cell, ...]:
        """Row of the page's table of claims for the claim `key`: description, our number, published one, verdict."""
        claim, number = named(self.name).claims[key], self.numbers[key]
        published, verdict = claim.verdict(number)
        test = "" if claim.test == "equal" else f"{claim.test} "
        where = claim.where if published is None else f"{test}{cell(published)} ({claim.where})"
        own = (Estimate.of(number.as_published, number.as_published_stderr),) if self.as_published else ()
        return (claim.says, Estimate.of(number.value, number.stderr), where, *own, verdict)

    def __repr__(self) -> str:
        return f"<Reproduction of {self.name}: {plural(len(self.numbers), 'number')}>"


def _shown(value: Any) -> str:
    """Text of a parameter's value for the page's table of parameters; lists and mappings are joined by commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return ", ".join(map(_shown, value)) if listed else cell(value)


def listing() -> View:
    """View with a table of all published experiments that `limitlens reproduce` can run."""
    rows = [(name, one.shows, one.source, one.minutes) for name, one in catalogue().items()]
    table = Table("experiments", ("name", "shows", "paper", "minutes"), rows)
    return View(
        "Published experiments",
        "limitlens reproduce NAME; --quick for a small run, --as-published for the published code's own definitions",
        (
            "Each name runs one published experiment with its parameters.",
            "A table compares our numbers with the published ones, with a verdict on every claim.",
            "Run one with --quick first; --out DIR writes tables, figure and numbers, and limitlens report a page.",
        ),
        [Section("Experiments", "Minutes of processor time at full size.", [table])],
    )


def reproduce(
    name: str, quick: bool = False, *, as_published: bool = False, seed: int = 0, progress: Progress | None = None,
    **changes: Any,
) -> Reproduction:  # fmt: skip
    """Reproduce a published experiment: our numbers and the published ones, a figure, and a verdict on each claim.

    `quick` runs small sizes in place of the full ones. `as_published` also computes the numbers by the definitions of
    the published code, where these differ from the right ones. `changes` replace parameters of the experiment by name,
    such as `replicates=50`, or `corpus="wikipedia.txt"` for an experiment that reads a text.

    >>> found = ll.reproduce("backward-heat", quick=True)
    >>> found.table["verdict"].tolist()[:2]
    ['agrees within 1%', 'agrees within 1%']
    """
    about = named(name)
    check_seed(seed)
    parameters = {**about.full, **(about.quick if quick else {})}
    if (unknown := next((key for key in changes if key not in parameters), None)) is not None:
        raise InputError(f"{name!r} has no parameter {unknown!r}; expected one of {', '.join(parameters)}")
    parameters |= changes
    started, work = time.perf_counter(), Work(seed, as_published, progress)
    module = next(module for module, names in HOME.items() if name in names.split())
    getattr(import_module(f"limitlens.published.{module}"), name.replace("-", "_"))(work, **parameters)
    used = {**parameters, "seed": seed} | ({"model": str(model)} if (model := parameters.get("model")) else {})
    found = (work.numbers, tuple(work.drawn), time.perf_counter() - started, tuple(work.warnings))
    return Reproduction(name, quick, as_published, used, *found)
