"""What a result shows, as data: sentences, tables and figures, described once and drawn by every renderer.

`page` draws a view as one HTML file, `terminal` as text, `notebook` as a fragment, and `paper` its figures for print. A
view is built in the room of its result; this room knows nobody.
"""

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
    """Rows under named columns."""

    title: str  # also the name of its CSV file on a page
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # text, numbers, `Estimate` numbers, or None for what is not known
    marked: frozenset[int] = frozenset()  # rows that stand out
    shown: int | None = None  # rows that a terminal prints before it says how many more there are; None for all
    folded: bool = False  # whether a page folds it away under its title


@dataclass(frozen=True)
class Axis:
    """One axis of a figure; its ends are those of the numbers where they are not given."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """What is drawn on two axes: a line, points, a band between two lines, or a map of numbers over a grid."""

    name: str
    kind: Literal["line", "points", "band", "map"]
    x: Sequence[Any]  # of a map: the labels of its columns
    y: Sequence[Any]  # of a map: those of its rows
    colour: Colour = "blue"
    dash: Dash = ""  # of a line; points are hollow or square in its place
    low: Sequence[float | None] | None = None  # ends of 95% bars (points) or of the band
    high: Sequence[float | None] | None = None
    values: Any = None  # (rows, columns): the numbers of a map; NaN where there is none
    words: Sequence[str] = ()  # of a map of words: value k means words[k]
    joined: bool = False  # points joined by a thin line
    labels: Sequence[str] = ()  # what a pointer is told at each point
    sizes: Sequence[float] | None = None  # radius of each point in pixels; all alike where it is None
    listed: bool = True  # whether the legend names it


@dataclass(frozen=True)
class Guide:
    """A thin labelled line across a figure, at one x or at one y."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Figure:
    """Labelled series on two axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    height: int = 320
    note: str = ""


@dataclass(frozen=True)
class Text:
    """Plain sentences, one below the other; as a list where `listed`."""

    lines: Sequence[str]
    listed: bool = False


@dataclass(frozen=True)
class Widget:
    """A part of a page that its scripts draw from `View.data` (`page.WIDGETS`); other renderers pass it over."""

    name: str


@dataclass(frozen=True)
class Row:
    """Blocks side by side where there is room."""

    blocks: Sequence[Figure | Table]


Block: TypeAlias = Table | Figure | Text | Widget | Row


@dataclass(frozen=True)
class Section:
    """Blocks under a heading and one sentence of introduction, for `only` one renderer or for all."""

    title: str
    lead: str
    blocks: Sequence[Block]
    name: str = ""
    only: Literal["", "page", "terminal", "notebook"] = ""

    @property
    def flat(self) -> list[Block]:
        """Its blocks, those side by side one by one."""
        return [inner for block in self.blocks for inner in (block.blocks if isinstance(block, Row) else [block])]


@dataclass(frozen=True)
class View:
    """What one result has to show."""

    title: str
    subtitle: str
    verdict: tuple[str, str, str]  # three plain sentences: what was measured, what it found, what to do
    sections: Sequence[Section]
    above: Sequence[Block] = ()  # blocks of a page right under the verdict
    # what the widgets of a page read, or what makes it: that may take a while, and only a page asks for it
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    # sections that take a while, made where a page is written
    later: Callable[[], Sequence[Section]] = field(default=tuple, compare=False)
    warnings: Sequence[str] = ()
    trust: Sequence[str] = ()  # what else a reader must know before believing the numbers
    details: Mapping[str, Any] = field(default_factory=dict)  # digests and the like, shown with how it was made

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all its sections, those side by side one by one."""
        return [block for part in self.sections for block in part.flat]


def cells(values: Any, stderr: Any) -> list[Estimate]:
    """Numbers with their standard errors, as a column of a table."""
    columns = (np.asarray(part, dtype=float).tolist() for part in (values, stderr))  # None becomes NaN
    return [Estimate(value, error) for value, error in zip(*columns, strict=True)]


def look(index: int) -> tuple[Colour, Dash]:
    """Colour and dash of the index-th of many series: 24 that differ."""
    return SHADES[index % len(SHADES)], DASHES[index // len(SHADES) % len(DASHES)]


def line(name: str, x: Any, y: Any, colour: Colour = "blue", dash: Dash = "", *, listed: bool = True) -> Series:
    """A line."""
    return Series(name, "line", _plain(x), _plain(y), colour, dash, listed=listed)


def points(
    name: str, x: Any, y: Any, colour: Colour = "blue", stderr: Any = None, *, positive: bool = True, **more: Any
) -> Series:
    """Points with 95% bars where standard errors are given; what is more (joined, dash, labels) is that of a `Series`.

    A bar that reaches zero has no place on a logarithmic axis: where `positive`, it ends at 5% of its value.
    """
    ends: dict[str, Any] = {}
    if stderr is not None:
        value, bar = (np.array(_plain(part), dtype=float) for part in (y, stderr))  # None becomes NaN
        low = value - 1.96 * bar
        low = np.where(value > 0, np.maximum(low, 0.05 * value), low) if positive else low
        ends = {"low": _plain(low), "high": _plain(value + 1.96 * bar)}
    return Series(name, "points", _plain(x), _plain(y), colour, **ends, **more)


def band(name: str, x: Any, low: Any, high: Any, colour: Colour = "blue", *, listed: bool = True) -> Series:
    """A band between two lines."""
    return Series(name, "band", _plain(x), _plain(high), colour, low=_plain(low), high=_plain(high), listed=listed)


def heat(name: str, rows: Sequence[Any], columns: Sequence[Any], values: Any, words: Sequence[str] = ()) -> Series:
    """A map of numbers (rows, columns), or of words that the numbers count."""
    return Series(name, "map", columns, rows, values=np.asarray(values, dtype=float), words=words)


def head_map(title: str, label: str, places: Sequence[tuple[int, int]], values: Sequence[Any], **more: Any) -> Figure:
    """A map of heads at places (layer, head), coloured by a number each, or by one of the `words`; None is a gap."""
    words, layers = more.pop("words", ()), sorted({layer for layer, _ in places})
    table = np.full((len(layers), 1 + max(head for _, head in places)), np.nan)
    for (layer, head), value in zip(places, values, strict=True):
        table[layers.index(layer), head] = np.nan if value is None else value
    drawn = heat(label, layers, list(range(table.shape[1])), table, words)
    return Figure(title, Axis("head"), Axis("layer"), [drawn], **more)


def _plain(values: Any) -> list[Any]:
    """Numbers as Python's own, None where there is none."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return [None if isinstance(value, float) and not np.isfinite(value) else value for value in listed]
