"""Figures for print, drawn with matplotlib in colours that colour-blind readers can distinguish."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import ceil
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from limitlens.report.view import Axis, Figure, Guide, Series

# Okabe and Ito's palette, which stays distinct under the common colour deficiencies.
PALETTE = {
    "blue": "#0072B2", "orange": "#E69F00", "green": "#009E73", "pink": "#CC79A7", "sky": "#56B4E9", "red": "#D55E00",
    "grey": "#666666", "ink": "black",
}  # fmt: skip
WORD_COLOURS = [PALETTE[name] for name in ("blue", "green", "red", "orange", "pink", "sky", "grey")]  # of categories

SIZE = (5.2, 3.6)  # inches, of a single figure
PANEL = (3.6, 3.2)  # inches, of one figure among several
COLUMNS = 4  # most panels in a row
ROW = 0.32  # inches, height of a row of a map
TICKS = 12  # most tick labels along a map
LEGEND = 0.17  # inches, height of a row of a legend
LEGEND_INSIDE = 5  # most names of a legend inside a panel
_STROKES = {"": "-", "dashed": "--", "dotted": ":"}
_MARKS = {"": ("o", "full"), "dashed": ("o", "none"), "dotted": ("s", "full")}
_SETTINGS: dict[str, Any] = {
    "figure.figsize": SIZE, "figure.dpi": 150, "savefig.bbox": "tight", "pdf.fonttype": 42, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.5, "lines.markersize": 4,
}  # fmt: skip


def figure_style() -> AbstractContextManager[None]:
    """Context manager within which matplotlib uses limitlens's settings for fonts, lines and sizes."""
    return mpl.rc_context(_SETTINGS)  # type: ignore[arg-type]  # the stubs want literal keys


class Picture(Drawing):
    """A matplotlib figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        sheet = io.BytesIO()
        self.savefig(sheet, format="png", bbox_inches="tight")
        return sheet.getvalue()


def draw(figures: Sequence[Figure]) -> Picture:
    """Draw figures side by side with matplotlib, at most four in a row."""
    rows = ceil(len(figures) / COLUMNS)
    columns = ceil(len(figures) / rows)
    size = (columns * PANEL[0], rows * PANEL[1])
    map_rows = [len(series.y) for series in figures[0].series if series.kind == "map"]
    if len(figures) == 1:
        size = (SIZE[0], 0.9 + min(4.5, ROW * max(map_rows))) if map_rows else SIZE
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
        return drawing


def _draw(axes: Axes, figure: Figure) -> None:
    axes.set(xlabel=figure.x.label, ylabel=figure.y.label)
    for series in figure.series:
        if series.kind == "map":
            _map(axes, series)
            return  # the axes of a map are labels without a scale
        _curve(axes, series)
    _scale(axes, "x", figure.x)
    _scale(axes, "y", figure.y)
    for guide in figure.guides:
        _guide(axes, guide)


def _curve(axes: Axes, series: Series) -> None:
    x, y = (np.array(values, dtype=float) for values in (series.x, series.y))
    low, high = (None if ends is None else np.array(ends, dtype=float) for ends in (series.low, series.high))
    colour, label = PALETTE[series.colour], series.name if series.listed else "_"
    if series.kind == "band" and low is not None and high is not None:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0, label=label)
    elif series.kind == "line":
        axes.plot(x, y, _STROKES[series.dash], color=colour, label=label)
    else:
        bars = None if low is None or high is None else np.maximum([y - low, high - y], 0)
        mark, fill = _MARKS[series.dash]
        stroke = _STROKES[series.dash] if series.joined else "none"
        axes.errorbar(
            x, y, yerr=bars, color=colour, label=label, marker=mark, fillstyle=fill, linestyle=stroke, linewidth=0.8,
            elinewidth=1, markersize=4 if x.size <= 60 else 3,
        )  # fmt: skip
        for place, name in zip(zip(x, y, strict=True), series.labels if series.named else (), strict=False):
            axes.annotate(name, place, xytext=(3, 2), textcoords="offset points", fontsize=5.5, color=colour)


def _map(axes: Axes, series: Series) -> None:
    """Draw a coloured grid of numbers with a colour bar, or of categories with their names."""
    values = np.asarray(series.values, dtype=float)
    if series.words:
        count = len(series.words)
        colours = ListedColormap([WORD_COLOURS[k % len(WORD_COLOURS)] for k in range(count)])
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
    drawn = getattr(axes, f"{name}axis")
    if axis.log:
        getattr(axes, f"set_{name}scale")("log")
    if (axis.low, axis.high) != (None, None):
        getattr(axes, f"set_{name}lim")(axis.low, axis.high)
    low, high = drawn.get_view_interval()
    if axis.log and 0 < low < high < 100 * low:  # below two decades powers of ten would leave one tick or two
        fronts = (1.0, 2.0, 5.0) if high < 30 * low else (1.0, 3.0)
        drawn.set_major_locator(MaxNLocator(5) if high < 5 * low else LogLocator(subs=fronts))
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        drawn.set_minor_formatter(NullFormatter())
    elif axis.whole and not axis.log:
        drawn.get_major_locator().set_params(integer=True)


def _guide(axes: Axes, guide: Guide) -> None:
    vertical = guide.x is not None
    at = guide.x if vertical else guide.y
    low, high = sorted(axes.get_xlim() if vertical else axes.get_ylim())
    if at is None or not low <= at <= high:
        return
    (axes.axvline if vertical else axes.axhline)(at, color=PALETTE["grey"], linewidth=0.6, linestyle=":")
    label = axes.text(0.99, at, guide.label, fontsize=7, color=PALETTE["grey"], ha="right", va="bottom")
    label.set_transform(axes.get_yaxis_transform())
    if vertical:
        label.set(x=at, y=0.98, rotation=90, va="top", transform=axes.get_xaxis_transform())


def _legends(drawing: Drawing, panels: list[Axes], figures: Sequence[Figure]) -> None:
    """Add a legend to each panel, or one below all panels if they share series or a single panel has many."""
    by_panel = []
    for axes, figure in zip(panels, figures, strict=True):
        handles, names = axes.get_legend_handles_labels()
        by_name = dict(zip(names, handles, strict=True))
        by_panel.append({series.name: by_name[series.name] for series in figure.series if series.name in by_name})
    all_names = {name: handle for own in by_panel for name, handle in own.items()}
    looks = {(s.name, s.kind, s.colour, s.dash) for figure in figures for s in figure.series if s.name in all_names}
    shared = len(looks) == len(all_names) < sum(map(len, by_panel))
    if shared or (len(panels) == 1 and len(all_names) > LEGEND_INSIDE):
        name_width = 0.5 + 0.07 * max(map(len, all_names))  # inches
        columns = min(len(all_names), max(1, int(drawing.get_figwidth() / name_width)), 4)
        drawing.set_figheight(drawing.get_figheight() + LEGEND * ceil(len(all_names) / columns))
        drawing.legend(list(all_names.values()), list(all_names), loc="outside lower center", ncols=columns)
        return
    for axes, own in zip(panels, by_panel, strict=True):
        if len(own) > 1:
            axes.legend(list(own.values()), list(own))
