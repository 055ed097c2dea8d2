"""Display of results in notebooks, as an HTML fragment without scripts."""

from base64 import b64encode
from dataclasses import replace
from html import escape

from limitlens.report.page import table_html
from limitlens.report.paper import draw
from limitlens.report.view import Figure, Table, View

ROWS = 12  # most rows of a table, unless the table says how many


def as_html(view: View) -> str:
    """HTML fragment that shows a result in a notebook: title, findings, tables, maps of heads and warnings."""
    sentences = [sentence for sentence in (view.subtitle, *view.verdict) if sentence]
    parts = [f"<h4>{escape(view.title)}</h4>", *(f"<p>{escape(sentence)}</p>" for sentence in sentences)]
    for part in view.sections:
        shown = []
        for block in part.flat if part.only in ("", "notebook") else ():
            if isinstance(block, Table):
                limit = block.shown or ROWS
                left = len(block.rows) - limit
                shown.append(table_html(replace(block, rows=block.rows[:limit], folded=False), part.title))
                shown.append(f"<p>… and {left:,} more rows.</p>" if left > 0 else "")
            elif isinstance(block, Figure) and any(series.kind == "map" for series in block.series):
                image = b64encode(draw([block])._repr_png_()).decode()
                shown.append(f'<img alt="{escape(block.title)}" src="data:image/png;base64,{image}">')
        parts += [f"<h5>{escape(part.title)}</h5>", *shown] if shown else []
    parts += [f"<p>Warning: {escape(text)}</p>" for text in view.warnings]
    return "".join(parts)
