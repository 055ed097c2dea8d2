"""Renderer for notebooks: sentences, tables and maps of heads as an HTML fragment without scripts."""

from base64 import b64encode
from html import escape

from limitlens.report.paper import draw
from limitlens.report.text import cell, numeric
from limitlens.report.view import Figure, Table, View

ROWS = 12  # most rows of a table, unless the table says how many


def as_html(view: View) -> str:
    """HTML fragment that shows a view in a notebook: title, verdict, tables and maps."""
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in view.verdict if sentence)
    parts = [f"<h4>{escape(view.title)}</h4>", f"<p>{escape(view.subtitle)}</p>" if view.subtitle else "", verdict]
    for part in view.sections:
        shown = []
        for block in part.flat if part.only in ("", "notebook") else ():
            if isinstance(block, Table):
                shown.append(_table(block))
            elif isinstance(block, Figure) and any(series.kind == "map" for series in block.series):
                image = b64encode(draw([block])._repr_png_()).decode()
                shown.append(f'<img alt="{escape(block.title)}" src="data:image/png;base64,{image}">')
        if shown:
            parts += [f"<h5>{escape(part.title)}</h5>", *shown]
    return "".join(parts)


def _table(table: Table) -> str:
    styles = [f"text-align:{'right' if number else 'left'};padding:1px 8px" for number in numeric(table)]
    head = (f'<th style="{style}">{escape(name)}</th>' for name, style in zip(table.columns, styles, strict=True))
    limit = table.shown or ROWS
    body = ""
    for index, row in enumerate(table.rows[:limit]):
        bold = ";font-weight:bold" if index in table.marked else ""
        cells = [f'<td style="{s}{bold}">{escape(cell(value))}</td>' for value, s in zip(row, styles, strict=True)]
        body += f"<tr>{''.join(cells)}</tr>"
    left = len(table.rows) - limit
    caption = f'<caption style="text-align:left;white-space:nowrap">{escape(table.title)}</caption>'
    shown = f"<table>{caption}<thead><tr>{''.join(head)}</tr></thead><tbody>{body}</tbody></table>"
    return shown + (f"<p>… and {left:,} more rows.</p>" if left > 0 else "")
