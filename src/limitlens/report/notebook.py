"""A view in a notebook: its sentences, its tables and its maps as plain HTML, without scripts."""

import math
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np

from limitlens.report.style import viridis, word_colours
from limitlens.report.view import Figure, Series, Table, View
from limitlens.report.words import cell, numeric, short

ROWS = 12  # of a table that does not say how many it shows


def as_html(view: View) -> str:
    """A view as a fragment of HTML."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in view.verdict if sentence)
    parts = [f"<h4>{escape(view.title)}</h4>", f"<p>{escape(view.subtitle)}</p>" if view.subtitle else "", said]
    for part in view.sections:
        if part.only not in ("", "notebook"):
            continue
        shown = []
        for block in part.flat:
            if isinstance(block, Table):
                shown.append(_table(block))
            elif isinstance(block, Figure):
                shown += [_map(block, series) for series in block.series if series.kind == "map"]
        if shown:
            parts += [f"<h5>{escape(part.title)}</h5>", *shown]
    return "".join(parts)


def _table(table: Table) -> str:
    sides = ["right" if number else "left" for number in numeric(table)]
    head = "".join(
        f'<th style="text-align:{side};padding:1px 8px">{escape(name)}</th>'
        for name, side in zip(table.columns, sides, strict=True)
    )
    limit = table.shown or ROWS
    rows = ""
    for index, row in enumerate(table.rows[:limit]):
        bold = ";font-weight:bold" if index in table.marked else ""
        cells = (
            f'<td style="text-align:{side};padding:1px 8px{bold}">{escape(cell(value))}</td>'
            for value, side in zip(row, sides, strict=True)
        )
        rows += f"<tr>{''.join(cells)}</tr>"
    left = len(table.rows) - limit
    more = f"<p>… and {left:,} more rows.</p>" if left > 0 else ""
    caption = (
        f'<caption style="text-align:left;white-space:nowrap">{escape(table.title)}</caption>' if table.title else ""
    )
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _map(figure: Figure, series: Series) -> str:
    """A map as a table of coloured cells, with the key to its words."""
    values = np.asarray(series.values, dtype=float)
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    head = "".join(f"<th>{escape(str(label))}</th>" for label in series.x)
    rows = "".join(
        f"<tr><th>{escape(str(label))}</th>{''.join(_cells(series, row, low, high))}</tr>"
        for label, row in zip(series.y, values, strict=True)
    )
    caption = f"{figure.title}: {figure.y.label} by {figure.x.label}" if figure.title else series.name
    key = "".join(
        f' <span style="color:{colour}">■</span> {escape(word)}'
        for word, colour in zip(series.words, word_colours(len(series.words)), strict=True)
    )
    return (
        f'<div style="overflow-x:auto"><table><caption style="text-align:left;white-space:nowrap">{escape(caption)}'
        f"{key}</caption><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(series: Series, row: Any, low: float, high: float) -> Iterator[str]:
    colours = word_colours(len(series.words))
    for value in row.tolist():
        if math.isnan(value):
            yield '<td style="text-align:center">–</td>'
        elif series.words:
            word, colour = series.words[int(value)], colours[int(value)]
            style = f"background:{colour};color:#fff;text-align:center"
            yield f'<td style="{style}" title="{escape(word)}">{escape(word[:1])}</td>'
        else:
            fill, ink = viridis(0.5 if high == low else (value - low) / (high - low))
            yield f'<td style="background:{fill};color:{ink};text-align:center">{escape(short(value, 2))}</td>'
