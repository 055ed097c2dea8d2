"""The look of every matplotlib figure: one column wide, colour-blind safe, readable in print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, RED)

_SETTINGS: dict[str, Any] = {
    "figure.figsize": (5.2, 3.6),
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw with the project's settings, off screen, and leave the user's own untouched."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):  # type: ignore[arg-type]  # the stubs want literal keys
        yield


def saved(figure: Figure, path: str | None) -> Figure:
    """The figure, written to `path` where one is given: its ending says in which format."""
    if path is not None:
        figure.savefig(path)
    return figure


def plain_log(axes: Axes, *which: str) -> None:
    """Logarithmic axes with ticks people read: 0.2, 0.5, 1 over less than two decades, powers of ten beyond."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in which:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        low, high = axis.get_view_interval()
        if 0 < low < high < 100 * low:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_formatter(NullFormatter())
