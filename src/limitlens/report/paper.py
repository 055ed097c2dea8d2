"""Figures for print: the description of a figure drawn with matplotlib."""

import io
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Drawing

from limitlens.report.style import GREY, PALETTE, figure_style, plain_log, saved, word_colours
from limitlens.report.view import Axis, Figure, Guide, Series

SIZE = (5.2, 3.6)  # inches, of one figure alone
PANEL = (3.6, 3.2)  # of one among several
ACROSS = 4  # panels in a row
ROW = 0.32  # inches, of a row of a map
TICKS = 12  # labels along a map
LEGEND = 0.17  # inches, of a row of a legend
FEW = 5  # names that find room within a panel
_STROKES = {"": "-", "dashed": "--", "dotted": ":"}
_MARKS = {"": ("o", "full"), "dashed": ("o", "none"), "dotted": ("s", "full")}


class Picture(Drawing):
    """A drawing that a notebook shows, whether pyplot was imported or not."""

    def _repr_png_(self) -> bytes:
        sheet = io.BytesIO()
        self.savefig(sheet, format="png", bbox_inches="tight")
        return sheet.getvalue()


def draw(figures: Sequence[Figure], path: str | Path | None = None) -> Drawing:
    """Draw figures side by side; saved to `path` where given, in the format of its ending."""
    rows = ceil(len(figures) / ACROSS)
    columns = ceil(len(figures) / rows)
    size, maps = (columns * PANEL[0], rows * PANEL[1]), [len(one.y) for one in figures[0].series if one.kind == "map"]
    if len(figures) == 1:
        size = (SIZE[0], 0.9 + min(4.5, ROW * max(maps))) if maps else SIZE
    with figure_style():
        drawing = Picture(figsize=size, layout="constrained")
        panels = drawing.subplots(rows, columns, squeeze=False).ravel()
        for axes, figure in zip(panels, figures, strict=False):
            _draw(axes, figure)
            if len(figures) > 1:
                axes.set_title(figure.title, wrap=True)
        for axes in panels[len(figures) :]:
            axes.set_axis_off()
        _legends(drawing, list(panels[: len(figures)]), figures)
        return saved(drawing, path)


def _draw(axes: Axes, figure: Figure) -> None:
    axes.set(xlabel=figure.x.label, ylabel=figure.y.label)
    for series in figure.series:
        if series.kind == "map":
            _map(axes, series)
            return  # its axes are labels, which have no scale
        _curve(axes, series)
    _scale(axes, "x", figure.x)
    _scale(axes, "y", figure.y)
    for guide in figure.guides:
        _guide(axes, guide)


def _curve(axes: Axes, series: Series) -> None:
    """A line, points or a band; NaN leaves a gap."""
    x, y = (np.array(values, dtype=float) for values in (series.x, series.y))
    low, high = (None if ends is None else np.array(ends, dtype=float) for ends in (series.low, series.high))
    colour, label = PALETTE[series.colour], series.name if series.listed else "_"
    if series.kind == "band" and low is not None and high is not None:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0, label=label)
    elif series.kind == "line":
        axes.plot(x, y, _STROKES[series.dash], color=colour, label=label)
    else:
        if series.sizes is not None:
            axes.scatter(x, y, np.pi * np.square(series.sizes) / 2, colour, alpha=0.6, linewidths=0, label=label)
            return
        bars = None if low is None or high is None else np.maximum([y - low, high - y], 0)
        mark, fill = _MARKS[series.dash]
        stroke = _STROKES[series.dash] if series.joined else "none"
        axes.errorbar(
            x, y, yerr=bars, color=colour, label=label, marker=mark, fillstyle=fill, linestyle=stroke, linewidth=0.8,
            elinewidth=1, markersize=4 if x.size <= 60 else 3,
        )  # fmt: skip


def _map(axes: Axes, series: Series) -> None:
    """A map of numbers with its scale, or of words with their colours."""
    values = np.asarray(series.values, dtype=float)
    if series.words:
        count = len(series.words)
        colours = ListedColormap(word_colours(count))
        image = axes.imshow(values, cmap=colours, vmin=-0.5, vmax=count - 0.5, aspect="auto", interpolation="nearest")
        bar = axes.figure.colorbar(image, ax=axes, ticks=range(count))
        bar.ax.set_yticklabels(list(series.words))
    else:
        image = axes.imshow(values, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.figure.colorbar(image, ax=axes, label=series.name)
    for place, labels in ((axes.set_xticks, series.x), (axes.set_yticks, series.y)):
        every = ceil(len(labels) / TICKS)
        place(range(0, len(labels), every), [str(label) for label in labels[::every]])
    axes.spines[:].set_visible(False)


def _scale(axes: Axes, name: str, axis: Axis) -> None:
    """Ends, logarithms and whole ticks of one axis."""
    if axis.log:
        getattr(axes, f"set_{name}scale")("log")
    if (axis.low, axis.high) != (None, None):
        getattr(axes, f"set_{name}lim")(axis.low, axis.high)
    if axis.log:
        plain_log(getattr(axes, f"{name}axis"))
    elif axis.whole:
        getattr(axes, f"{name}axis").get_major_locator().set_params(integer=True)


def _guide(axes: Axes, guide: Guide) -> None:
    """A thin line with its label, where it lies within the figure."""
    at, (low, high) = (guide.x, axes.get_xlim()) if guide.x is not None else (guide.y, axes.get_ylim())
    if at is None or not min(low, high) <= at <= max(low, high):
        return
    words: dict[str, Any] = {"fontsize": 7, "color": GREY, "ha": "right"}
    if guide.x is not None:
        axes.axvline(at, color=GREY, linewidth=0.6, linestyle=":")
        words |= {"rotation": 90, "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(at, 0.98, guide.label, **words)
    else:
        axes.axhline(at, color=GREY, linewidth=0.6, linestyle=":")
        axes.text(0.99, at, guide.label, va="bottom", transform=axes.get_yaxis_transform(), **words)


def _legends(drawing: Drawing, panels: list[Axes], figures: Sequence[Figure]) -> None:
    """A legend in each panel, in the order of its series; one below where panels share names, or one has many."""
    named = []
    for axes, figure in zip(panels, figures, strict=True):
        handles, names = axes.get_legend_handles_labels()
        found = dict(zip(names, handles, strict=True))
        named.append({series.name: found[series.name] for series in figure.series if series.name in found})
    every = {name: handle for own in named for name, handle in own.items()}
    looks = {(s.name, s.kind, s.colour, s.dash) for figure in figures for s in figure.series if s.name in every}
    shared = len(looks) == len(every) < sum(map(len, named))
    if shared or (len(panels) == 1 and len(every) > FEW):
        fit = max(1, int(drawing.get_figwidth() / (0.5 + 0.07 * max(map(len, every)))))  # inches of a name
        columns = min(len(every), fit, 4)
        drawing.set_figheight(drawing.get_figheight() + LEGEND * ceil(len(every) / columns))
        drawing.legend(list(every.values()), list(every), loc="outside lower center", ncols=columns)
        return
    for axes, own in zip(panels, named, strict=True):
        if len(own) > 1:
            axes.legend(list(own.values()), list(own))
