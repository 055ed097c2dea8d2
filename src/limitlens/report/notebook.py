"""Renderer for notebooks: sentences, tables and maps as an HTML fragment without scripts."""

import math
from collections.abc import Iterable
from html import escape

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex

from limitlens.report.paper import WORD_COLOURS
from limitlens.report.text import cell, numeric, short
from limitlens.report.view import Figure, Series, Table, View

ROWS = 12  # most rows of a table, unless the table says how many


def as_html(view: View) -> str:
    """HTML fragment that shows a view in a notebook: title, verdict, tables and maps."""
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in view.verdict if sentence)
    parts = [f"<h4>{escape(view.title)}</h4>", f"<p>{escape(view.subtitle)}</p>" if view.subtitle else "", verdict]
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


def _html(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """HTML of a table from a caption, header cells and rows of cells, all of them given as HTML."""
    title = f'<caption style="text-align:left;white-space:nowrap">{caption}</caption>' if caption else ""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{''.join(head)}</tr></thead><tbody>{body}</tbody></table>"


def _table(table: Table) -> str:
    styles = [f"text-align:{'right' if number else 'left'};padding:1px 8px" for number in numeric(table)]
    head = (f'<th style="{style}">{escape(name)}</th>' for name, style in zip(table.columns, styles, strict=True))
    limit = table.shown or ROWS
    rows = []
    for index, row in enumerate(table.rows[:limit]):
        bold = ";font-weight:bold" if index in table.marked else ""
        cells = zip(row, styles, strict=True)
        rows.append([f'<td style="{style}{bold}">{escape(cell(value))}</td>' for value, style in cells])
    left = len(table.rows) - limit
    return _html(escape(table.title), head, rows) + (f"<p>… and {left:,} more rows.</p>" if left > 0 else "")


def _map(figure: Figure, series: Series) -> str:
    """HTML of a map (grid of numbers or categories) as a table of coloured cells, with a legend of the categories."""
    values = np.asarray(series.values, dtype=float)
    known = values[np.isfinite(values)]
    colours = [WORD_COLOURS[k % len(WORD_COLOURS)] for k in range(len(series.words))]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)

    def shown(value: float) -> str:
        if math.isnan(value):
            return '<td style="text-align:center">–</td>'
        if series.words:
            word = escape(series.words[int(value)])
            style = f"background:{colours[int(value)]};color:#fff;text-align:center"
            return f'<td style="{style}" title="{word}">{escape(series.words[int(value)][:1])}</td>'
        fill = mpl.colormaps["viridis"](0.5 if high == low else (value - low) / (high - low))
        bright = np.dot(fill[:3], (0.299, 0.587, 0.114)) > 0.52
        ink = "#101010" if bright else "#ffffff"
        return f'<td style="background:{to_hex(fill)};color:{ink};text-align:center">{escape(short(value, 2))}</td>'

    head = ["<th></th>", *(f"<th>{escape(str(label))}</th>" for label in series.x)]
    labelled = zip(series.y, values.tolist(), strict=True)
    rows = ([f"<th>{escape(str(label))}</th>", *map(shown, row)] for label, row in labelled)
    caption = f"{figure.title}: {figure.y.label} by {figure.x.label}" if figure.title else series.name
    words = zip(series.words, colours, strict=True)
    key = "".join(f' <span style="color:{colour}">■</span> {escape(word)}' for word, colour in words)
    return f'<div style="overflow-x:auto">{_html(escape(caption) + key, head, rows)}</div>'
