"""`limitlens.reproduce`: run a published experiment by name and compare its numbers with the published ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from limitlens.arrays import pd
from limitlens.errors import InputError, Progress, check_seed
from limitlens.estimate import Estimate
from limitlens.published.catalogue import Claim, Number, catalogue, named
from limitlens.report.text import cell, plural
from limitlens.report.view import Axis, Colour, Figure, Guide, Section, Series, Table, Text, View, line, look, points
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint

LINES: tuple[Colour, ...] = ("grey", "ink", "sky")
VERDICTS = ("agrees", "differs", "no")  # first words of the verdicts on claims
T = TypeVar("T")
# Names of the experiments that each module of `limitlens.published` runs.
HOME = {
    "laws": "gaussian-horizon sphere-d50 hardmax-log coupling-or-horizon uniform-ball",
    "encoders": "bert-layers window-random horizon-ablation downstream",
    "temperatures": "critical-weights three-regimes backward-heat critical-log-n critical-scaling",
}
RESUMABLE = ("bert-layers",)  # experiments that save their state as they run


@dataclass(frozen=True)
class Drawn:
    """A series of a reproduced experiment's figure: points with standard errors, or a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...] | None = None
    line: bool = False

    def series(self, place: int) -> Series:
        """Series for the figure; `place`, its index among the points or among the lines, determines colour and dash."""
        if self.line:
            return line(self.name, self.x, self.y, LINES[place % len(LINES)], ("", "dashed", "dotted")[place % 3])
        colour, dash = look(place)
        return points(self.name, self.x, self.y, colour, self.stderr, dash=dash, positive=False)


@dataclass
class Work:
    """A running experiment: its options, and the numbers, figure series and warnings collected so far."""

    seed: int
    as_published: bool
    progress: Progress
    checkpoint: Checkpoint | None = None  # where a resumable experiment saves its state
    numbers: dict[str, Number] = field(default_factory=dict)
    details: list[dict[str, Any]] = field(default_factory=list)  # rows of a table of everything measured, if any
    drawn: list[Drawn] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False

    def each(self, steps: Sequence[T]) -> Iterator[T]:
        """Iterate over the steps of the experiment, and report progress after each."""
        for done, step in enumerate(steps):
            yield step
            self.progress(done + 1, len(steps))

    def whole(self, result: T, part: bool = False) -> T:
        """Return a step's result and collect its warnings; raise KeyboardInterrupt if it was interrupted.

        With `part` the result of an interrupted step, which is valid for the tokens read so far, is returned too.
        """
        self.interrupted |= getattr(result, "interrupted", False)
        if self.interrupted and not part:
            raise KeyboardInterrupt
        self.warnings += [one for one in getattr(result, "warnings", ()) if one not in self.warnings]
        return result

    def record(self, prefix: str, names: Iterable[str], values: Any, stderrs: Any) -> None:
        """Add numbers with standard errors, named `prefix` plus each name."""
        for name, value, stderr in zip(names, values, stderrs, strict=True):
            self.numbers[prefix + name] = Number(Estimate(float(value), float(stderr)))

    def draw(self, name: str, x: Any, y: Any, stderr: Any = None, line: bool = False) -> None:
        """Add points (x, y) with standard errors, or a line, to the experiment's figure."""
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
    details: tuple[Mapping[str, Any], ...] = ()  # rows of a table of everything measured, if the experiment has one
    interrupted: bool = False  # whether the experiment was stopped, and the numbers are from a part of the text

    @property
    def table(self) -> pd.DataFrame:
        """One row per claim: our number, the published one, ours by the published code's definitions, and verdict."""
        rows = []
        for key, claim, number, published, verdict in self._claims():
            ours, theirs = number.value, number.as_published
            numbers = (ours.value, ours.stderr, published, theirs.value, theirs.stderr)
            rows.append((key, *numbers, verdict, claim.says, claim.where))
        numeric = ["ours", "stderr", "published", "as_published", "as_published_stderr"]
        table = pd.DataFrame(rows, columns=["claim", *numeric, "verdict", "says", "where"])
        return table.astype(dict.fromkeys(numeric, float))

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by file name: the claims with their verdicts, and the points of the figure."""
        parts = [pd.DataFrame(vars(one)).rename(columns={"name": "series"}) for one in self.drawn]
        found = {self.file: self.table, "points": pd.concat([part.astype({"stderr": float}) for part in parts])}
        return found | ({"details": pd.DataFrame(self.details)} if self.details else {})

    def view(self) -> View:
        """HTML page: figure, table of our numbers and the published ones, and parameters."""
        about = named(self.name)
        rows: list[list[Any]] = []
        for _, claim, number, published, outcome in self._claims():
            test = "" if claim.test == "equal" else f"{claim.test} "
            where = claim.where if published is None else f"{test}{cell(published)} ({claim.where})"
            rows.append([claim.says, number.value, where, *[number.as_published] * self.as_published, outcome])
        columns = ["quantity", "ours", "published", *["with the published code"] * self.as_published, "verdict"]
        table = Table("our numbers and the published ones", columns, rows)
        agree, differ, other = (sum(row[-1].startswith(first) for row in rows) for first in VERDICTS)
        verdict = (
            about.shows,
            f"Of {plural(agree + differ, 'claim')} with a published number or bound, {agree} agree and {differ} "
            f"differ by more than three standard errors; {other} further numbers have no comparable published one.",
            f"What to expect: {about.expect}",
        )
        lead = "Points have 95% intervals. Numbers that are published only in a figure are not read off it; "
        lead += "formulas are evaluated at the parameters of this run."
        names = dict.fromkeys([*about.published, *self.parameters])
        given = [(name, *(_shown(of.get(name)) for of in (about.published, self.parameters))) for name in names]
        parameters = Table("parameters", ("parameter", "published", "here"), given)
        compared = "Parameters of the publication and of this run, and where they differ on purpose."
        sections = [
            Section("Our numbers and the published ones", lead, [self._figure(about.figure), table]),
            Section("Parameters", compared, [Text(about.deviations, listed=True), parameters]),
        ]
        if self.details:
            columns = [name.replace("_", " ") for name in self.details[0]]
            measured = Table("all that was measured", columns, [[*row.values()] for row in self.details], shown=12)
            sections.insert(1, Section("Everything measured", "Intervals are at 95%.", [measured]))
        subtitle = f"{about.source} · {'quick' if self.quick else 'full'} size · {self.seconds:,.0f} s"
        return View(about.title, subtitle, verdict, sections, warnings=self.warnings)

    def _claims(self) -> list[tuple[str, Claim, Number, float | None, str]]:
        """Name, claim, our number, published value and verdict of every claim that the experiment has measured."""
        claims = named(self.name).claims
        return [(key, claims[key], number, *claims[key].verdict(number)) for key, number in self.numbers.items()]

    def _figure(self, about: Mapping[str, Any]) -> Figure:
        lines = [one.line for one in self.drawn]
        series = [one.series(lines[:place].count(one.line)) for place, one in enumerate(self.drawn)]
        guides = [Guide(**guide) for guide in about.get("guides", ())]
        axes = Axis(**about["x"]), Axis(**about["y"])
        return Figure(about["title"], *axes, series, guides, height=about.get("height", 320))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return ", ".join(map(_shown, value)) if listed else cell(value)


def listing() -> View:
    """Table of all published experiments that `limitlens reproduce` can run, as a page."""
    rows = [(name, one.model, one.size, one.shows, one.source, one.minutes) for name, one in catalogue().items()]
    table = Table("experiments", ("name", "model", "size here", "shows", "paper", "minutes"), rows)
    usage = "limitlens reproduce NAME; --quick for a small run, --as-published for the published code's own definitions"
    verdict = (
        "Each name runs one published experiment with its parameters.",
        "A table compares our numbers with the published ones, with a verdict on every claim.",
        "Run one with --quick first; --out DIR writes tables, figure and numbers, and limitlens report a page.",
    )
    sections = [Section("Experiments", "Minutes of processor time at full size.", [table])]
    return View("Published experiments", usage, verdict, sections)


def reproduce(
    name: str, quick: bool = False, *, as_published: bool = False, seed: int = 0,
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None, **changes: Any,
) -> Reproduction:  # fmt: skip
    """Run a published experiment again, and compare our numbers with the published ones, with a verdict on each claim.

    `quick` runs smaller sizes. `as_published` also computes the numbers by the definitions of the published code, where
    these differ from ours. `changes` replace parameters of the experiment by name, such as `replicates=50`, or
    `corpus="wikipedia.txt"` for an experiment that reads a text. With a `checkpoint` the experiments in `RESUMABLE`
    are saved as they run, and resumed by the same call.

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
    started, work = time.perf_counter(), Work(seed, as_published, progress, checkpoint)
    module = next(module for module, names in HOME.items() if name in names.split())
    getattr(import_module(f"limitlens.published.{module}"), name.replace("-", "_"))(work, **parameters)
    used = {**parameters, "seed": seed}
    if (model := parameters.get("model")) is not None:
        used["model"] = getattr(model, "name", model)  # of a loaded model
    seconds = time.perf_counter() - started
    found = (work.numbers, tuple(work.drawn), seconds, tuple(work.warnings), tuple(work.details), work.interrupted)
    return Reproduction(name, quick, as_published, used, *found)
