"""Colours and matplotlib settings of figures outside a page: safe for colour-blind readers, one column wide."""

from contextlib import AbstractContextManager
from typing import Any

# Okabe and Ito's palette, which stays distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666"
PALETTE = {
    "blue": BLUE, "orange": ORANGE, "green": GREEN, "pink": PINK, "sky": SKY, "red": RED, "grey": GREY, "ink": "black",
}  # fmt: skip
_WORDS = (BLUE, GREEN, RED, ORANGE, PINK, SKY, GREY)  # of the categories of a map, in their order
_VIRIDIS = (
    "440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6dcd59", "b4de2c", "fde725",
)  # fmt: skip

_SETTINGS: dict[str, Any] = {
    "figure.figsize": (5.2, 3.6), "figure.dpi": 150, "savefig.bbox": "tight", "pdf.fonttype": 42, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.5, "lines.markersize": 4,
}  # fmt: skip


def figure_style() -> AbstractContextManager[None]:
    """Context in which matplotlib draws with the settings of limitlens; the user's settings return after it."""
    import matplotlib as mpl

    return mpl.rc_context(_SETTINGS)  # type: ignore[arg-type]  # the stubs want literal keys


def set_log_ticks(axis: Any) -> None:
    """Set the ticks of a logarithmic axis: 0.2, 0.5, 1 or 0.3, 1 below two decades, powers of ten above."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    if 0 < low < high < 100 * low:
        narrow = high < 5 * low  # ticks at 1, 2, 5 would leave one or none
        fronts = (1.0, 2.0, 5.0) if high < 30 * low else (1.0, 3.0)
        axis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=fronts))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def word_colours(count: int) -> list[str]:
    """Colours of the categories of a map (`Series.words`)."""
    return [_WORDS[index % len(_WORDS)] for index in range(count)]


def viridis(position: float) -> tuple[str, str]:
    """The colour at a position in [0, 1] of matplotlib's viridis scale, and the text colour that is readable on it."""
    at = min(max(position, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    index = min(int(at), len(_VIRIDIS) - 2)
    left, right = (bytes.fromhex(_VIRIDIS[index + step]) for step in (0, 1))
    rgb = [round(a + (at - index) * (b - a)) for a, b in zip(left, right, strict=True)]
    bright = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) / 255
    return f"#{bytes(rgb).hex()}", "#101010" if bright > 0.52 else "#ffffff"
