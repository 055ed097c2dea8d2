"""The pieces that pages are made of: sections, tables and figures, with everything from outside escaped.

A figure travels as a plain description that assets/chart.js draws; its table and its CSV come from the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

DIGITS = 5  # kept of every number in a page: more than anybody reads, few enough to mail


@dataclass(frozen=True)
class View:
    """What one kind of run has to show.

    Attributes
    ----------
    title, subtitle : str
    verdict : (measured, found, do)
        Three plain sentences.
    below : str
        HTML under the verdict.
    sections : list of str
        HTML, in order.
    data : dict
        What the scripts of the page read: `figures`, `budget`, `heads`, ...
    warnings, trust : list of str
        Warnings of the run, and what else a reader must know before believing the numbers.
    """

    title: str
    subtitle: str
    verdict: tuple[str, str, str]
    sections: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    below: str = ""
    warnings: list[str] = field(default_factory=list)
    trust: list[str] = field(default_factory=list)


class Figures(list[dict[str, Any]]):
    """The figures of a page, in order."""

    def place(self, title: str, x: Mapping[str, Any], y: Mapping[str, Any], series: Iterable[Any], **more: Any) -> str:
        """Keep a figure and return the HTML of its place."""
        self.append({"title": title, "x": dict(x), "y": dict(y), "series": list(series), **more})
        return f'<figure data-figure="{len(self) - 1}"></figure>'


def log_axis(label: str, **more: Any) -> dict[str, Any]:
    """A logarithmic axis."""
    return {"label": label, "log": True, **more}


def line(name: str, x: Sequence[float], y: Sequence[float | None], colour: str, dash: str = "") -> dict[str, Any]:
    """A line of a figure; `dash` is "", "dashed" or "dotted"."""
    return {"name": name, "kind": "line", "colour": colour, "dash": dash, "x": list(x), "y": list(y)}


def points(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    colour: str,
    stderr: Sequence[float | None] | None = None,
    *,
    joined: bool = False,
) -> dict[str, Any]:
    """Points of a figure, with 95% bars where standard errors are given; `joined` by a thin line."""
    found: dict[str, Any] = {
        "name": name,
        "kind": "points",
        "colour": colour,
        "x": list(x),
        "y": list(y),
        "joined": joined,
    }
    if stderr is not None:
        low, high = zip(*(_bar(value, error) for value, error in zip(y, stderr, strict=True)), strict=True)
        found |= {"low": list(low), "high": list(high)}
    return found


def _bar(value: float | None, stderr: float | None) -> tuple[float | None, float | None]:
    if value is None or stderr is None:
        return None, None
    low = value - 1.96 * stderr
    return (low if low > 0.05 * value or value <= 0 else 0.05 * value), value + 1.96 * stderr


def section(title: str, lead: str, *blocks: str, name: str = "") -> str:
    """A section with its heading and one sentence of introduction."""
    mark = f' id="{escape(name)}"' if name else ""
    introduction = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section class="card"{mark}><h2>{escape(title)}</h2>{introduction}{"".join(blocks)}</section>'


def paragraph(text: str, kind: str = "note") -> str:
    """A paragraph of plain text."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>'


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], marked: Iterable[int] = ()) -> str:
    """A table with a CSV download; rows whose index is in `marked` stand out."""
    bold = set(marked)
    kinds = [' class="number"' if any(_is_number(row[i]) for row in rows) else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        f"<tr{' class=marked' if index in bold else ''}>{''.join(map(_cell, row, kinds))}</tr>"
        for index, row in enumerate(rows)
    )
    label = escape(name)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table data-csv="{label}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any, kind: str) -> str:
    if _is_number(value):
        return f'<td{kind} data-value="{value:.6g}">{escape(short(value))}</td>'
    return f"<td{kind}>{escape('–' if value is None else str(value))}</td>"


def details(title: str, body: str) -> str:
    """HTML that is folded away under a title."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def short(value: float | None, digits: int = 3) -> str:
    """A number for people: three digits, thousands apart, a power of ten where it is very large or small."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        power = math.floor(math.log10(size) + 1e-12)
        front = f"{value / 10**power:.2g}"
        exponent = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return ("" if front == "1" else f"{front}·") + f"10{exponent}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def falling(rate: float) -> str:
    """n to the power −rate, as in n⁻⁰·⁴⁷."""
    return "n" + f"{-rate:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def compact(value: Any) -> Any:
    """A document with its numbers cut to `DIGITS` significant digits, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): compact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [compact(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.{DIGITS}g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value


def join(parts: Sequence[str]) -> str:
    """Words in a row: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(text: str) -> str:
    """Words as a sentence: a capital at the front, a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def plural(count: int, word: str) -> str:
    """A count and its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
