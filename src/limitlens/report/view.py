"""Sentences, tables and figures of a result as data, which pages, terminals, notebooks and print display."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from limitlens.estimate import Estimate

Colour = Literal["blue", "orange", "green", "pink", "sky", "red", "grey", "ink"]
Dash = Literal["", "dashed", "dotted"]
SHADES: tuple[Colour, ...] = ("blue", "orange", "green", "pink", "sky", "red", "grey", "ink")
DASHES: tuple[Dash, ...] = ("", "dashed", "dotted")
Cell: TypeAlias = str | int | float | Estimate | None


@dataclass(frozen=True)
class Table:
    """A table that a result shows: rows of values under named columns."""

    title: str  # also the name of its CSV file on a page
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # text, numbers, estimates, or None for an unknown value
    marked: frozenset[int] = frozenset()  # rows in bold
    shown: int | None = None  # most rows that a terminal prints; None for all
    folded: bool = False  # whether a page shows only the title until it is clicked


@dataclass(frozen=True)
class Axis:
    """One axis of a figure; without `low` and `high` it spans the numbers drawn."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False  # ticks at whole numbers only


@dataclass(frozen=True)
class Series:
    """Numbers drawn in a figure as a line, points, a band between two lines, or a map (coloured grid)."""

    name: str
    kind: Literal["line", "points", "band", "map"]
    x: Sequence[Any]  # for a map: the labels of its columns
    y: Sequence[Any]  # for a map: the labels of its rows
    colour: Colour = "blue"
    dash: Dash = ""  # for a line; for points, hollow or square marks
    low: Sequence[float | None] | None = None  # 95% intervals of points, or the edges of a band
    high: Sequence[float | None] | None = None
    values: Any = None  # numbers of a map (rows, columns); NaN leaves a gap
    words: Sequence[str] = ()  # for a map of categories: value k stands for words[k]
    joined: bool = False  # points joined by a thin line
    labels: Sequence[str] = ()  # tooltip of each point
    named: bool = False  # whether the labels are drawn beside the points, where they have room
    listed: bool = True  # whether the legend names the series


@dataclass(frozen=True)
class Guide:
    """A thin labelled line across a figure at a fixed x or y."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Figure:
    """A chart: lines, points, bands or a map on two axes, with a title."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    height: int = 320


@dataclass(frozen=True)
class Text:
    """Sentences that a result shows, each on its own line; with bullets if `listed`."""

    lines: Sequence[str]
    listed: bool = False


@dataclass(frozen=True)
class Widget:
    """An interactive part of an HTML page, filled with `View.data`; terminals and notebooks leave it out."""

    name: str


@dataclass(frozen=True)
class Row:
    """Figures or tables that an HTML page shows side by side if it is wide enough."""

    blocks: Sequence[Figure | Table]


Block: TypeAlias = Table | Figure | Text | Widget | Row


@dataclass(frozen=True)
class Section:
    """Tables, figures and text under a title and an introduction (`lead`), shown everywhere or in `only` one place."""

    title: str
    lead: str
    blocks: Sequence[Block]
    name: str = ""
    only: Literal["", "page", "terminal", "notebook"] = ""

    @property
    def flat(self) -> list[Block]:
        """Tables, figures and text of the section; those side by side (`Row`) follow each other."""
        return [inner for block in self.blocks for inner in (block.blocks if isinstance(block, Row) else [block])]


@dataclass(frozen=True)
class View:
    """Everything that an HTML page, a terminal or a notebook shows of one result."""

    title: str
    subtitle: str
    verdict: tuple[str, str, str]  # three sentences: what was measured, what it found, what to do
    sections: Sequence[Section]
    above: Sequence[Block] = ()  # blocks of a page directly below the verdict
    # data of the widgets, or a function that computes it, because only a page needs it
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    trust: Sequence[str] = ()  # known limits of the numbers
    details: Mapping[str, Any] = field(default_factory=dict)  # digests and the like, shown with the provenance

    def __post_init__(self) -> None:
        for text in (self.title, self.subtitle, *self.verdict, *self.warnings, *self.trust):
            if not isinstance(text, str):  # from a damaged run.json, which must fail before anything is written
                raise TypeError(f"{str(text)[:40]!r} is not a sentence")

    @property
    def blocks(self) -> list[Block]:
        """Tables, figures and text of all sections; those side by side (`Row`) follow each other."""
        return [block for part in self.sections for block in part.flat]


def frame_table(title: str, frame: Any) -> Table:
    """Convert a pandas data frame to a `Table` with its column names; NaN becomes None, an unknown value."""
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return Table(title, [str(name) for name in frame], rows)


def cells(values: Any, stderr: Any) -> list[Estimate]:
    """Pair each value with its standard error as an `Estimate`, for one column of a table."""
    columns = (np.asarray(part, dtype=float).tolist() for part in (values, stderr))  # None becomes NaN
    return [Estimate(value, error) for value, error in zip(*columns, strict=True)]


def look(index: int) -> tuple[Colour, Dash]:
    """Colour and dash style for line number `index` of a figure; the first 24 lines differ."""
    return SHADES[index % len(SHADES)], DASHES[index // len(SHADES) % len(DASHES)]


def line(name: str, x: Any, y: Any, colour: Colour = "blue", dash: Dash = "", *, listed: bool = True) -> Series:
    """Line through the points (x, y) for a figure."""
    return Series(name, "line", _plain(x), _plain(y), colour, dash, listed=listed)


def points(
    name: str, x: Any, y: Any, colour: Colour = "blue", stderr: Any = None, *, positive: bool = True, **more: Any
) -> Series:
    """Points (x, y) for a figure, with 95% intervals if standard errors are given; `more` are fields of `Series`.

    If `positive`, intervals end at 5% of the value at the lowest, because a logarithmic axis cannot show zero.
    """
    ends: dict[str, Any] = {}
    if stderr is not None:
        value, bar = (np.array(_plain(part), dtype=float) for part in (y, stderr))  # None becomes NaN
        low = value - 1.96 * bar
        low = np.where(value > 0, np.maximum(low, 0.05 * value), low) if positive else low
        ends = {"low": _plain(low), "high": _plain(value + 1.96 * bar)}
    return Series(name, "points", _plain(x), _plain(y), colour, **ends, **more)


def band(name: str, x: Any, low: Any, high: Any, colour: Colour = "blue", *, listed: bool = True) -> Series:
    """Shaded band between the lines `low` and `high` over x for a figure."""
    return Series(name, "band", _plain(x), _plain(high), colour, low=_plain(low), high=_plain(high), listed=listed)


def head_map(title: str, label: str, places: Sequence[tuple[int, int]], values: Sequence[Any], **more: Any) -> Figure:
    """Figure of all heads as a coloured grid: `values[i]` is for the (layer, head) `places[i]`, and None leaves a gap.

    `label` names the values. `more` may hold `words`, the names of categories 0, 1, ..., and fields of `Figure`.
    """
    words = more.pop("words", ())
    layers = sorted({layer for layer, _ in places})
    table = np.full((len(layers), 1 + max(head for _, head in places)), np.nan)
    for (layer, head), value in zip(places, values, strict=True):
        table[layers.index(layer), head] = np.nan if value is None else value
    drawn = Series(label, "map", list(range(table.shape[1])), layers, values=table, words=words)
    return Figure(title, Axis("head"), Axis("layer"), [drawn], **more)


def _plain(values: Any) -> list[Any]:
    """List of Python numbers from an array or sequence, with None for numbers that are not finite."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return [None if isinstance(value, float) and not np.isfinite(value) else value for value in listed]
