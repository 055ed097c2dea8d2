"""HTML page of a result: one self-contained file that needs no network; small scripts in assets/ draw its figures."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from html import escape
from importlib import metadata, resources
from string import Template
from typing import Any

from limitlens.errors import in_options
from limitlens.estimate import Estimate
from limitlens.report.text import cell, is_number, numeric, sentence
from limitlens.report.view import Block, Cell, Figure, Row, Section, Table, View, Widget

SCRIPTS = ("chart.js", "figure.js", "heads.js", "plans.js", "main.js")
DIGITS = 5  # significant digits of the numbers in a page's data, so that its file stays small
VISIBLE_ROWS = 60  # a longer table is shown in a box that scrolls
VERDICT = ("What was measured", "What it found", "What to do")


def page(view: View, made: Mapping[str, Any]) -> str:
    """HTML page that shows a result; `made` says how the result was made (`record.provenance`)."""
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{digest}'; img-src data:; base-uri 'none'"
    said = zip(VERDICT, view.verdict, strict=True)
    verdict = "".join(f"<div><dt>{word}</dt><dd>{escape(text)}</dd></div>" for word, text in said)
    data = view.data() if callable(view.data) else view.data
    figures: list[Figure] = []
    above = "".join(_block(block, figures) for block in view.above)
    shown = [part for part in view.sections if part.blocks and part.only in ("", "page")]
    body = "\n".join(_section(part, figures) for part in shown)
    year = str(made.get("finished", ""))[:4]
    version = str((made.get("versions") or {}).get("limitlens") or metadata.version("limitlens"))
    citation = Template(_asset("citation.bib")).substitute(version=version, year=year if year.isdigit() else "2026")
    parts = {
        "policy": policy, "title": escape(view.title), "subtitle": escape(view.subtitle), "style": _asset("page.css"),
        "verdict": verdict, "above": above, "body": body, "trust": _trust(view, made),
        "provenance": _provenance(view, made), "citation": escape(citation.strip()), "version": escape(version),
        "script": script, "data": embedded({**data, "figures": figures}),
    }  # fmt: skip
    return Template(_asset("page.html")).substitute(parts)


def embedded(data: Any) -> str:
    """JSON text of some data, escaped so that it is safe inside an HTML script element."""
    text = json.dumps(compact(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def compact(value: Any) -> Any:
    """Convert data to small JSON values: floats rounded to `DIGITS` digits, arrays as lists, NaN and ∞ as None."""

    def rounded(number: str) -> float:
        short = float(f"{float(number):.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short

    text = json.dumps(value, default=_json_value)
    return json.loads(text, parse_float=rounded, parse_constant=lambda _: None)


def _json_value(value: Any) -> Any:
    """Convert what `json.dumps` cannot write: arrays, enum members, ranges, and dataclasses without empty fields."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        found = {part.name: getattr(value, part.name) for part in fields(value)}
        empty = {name for name, item in found.items() if item is None or (isinstance(item, Sequence) and not item)}
        return {name: item for name, item in found.items() if name not in empty}
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _section(part: Section, figures: list[Figure]) -> str:
    mark = f' id="{escape(part.name)}"' if part.name else ""
    lead = f'<p class="lead">{escape(part.lead)}</p>' if part.lead else ""
    body = "".join(_block(block, figures, part.title) for block in part.blocks)
    return f'<section class="card"{mark}><h2>{escape(part.title)}</h2>{lead}{body}</section>'


def _block(block: Block, figures: list[Figure], heading: str = "") -> str:
    """HTML of a figure, table or text; a figure is appended to `figures`, from which a script of the page draws it."""
    if isinstance(block, Figure):
        figures.append(block)
        return f'<figure data-figure="{len(figures) - 1}"></figure>'
    if isinstance(block, Table):
        return table_html(block, heading)
    if isinstance(block, Widget):
        return widgets()[block.name]
    if isinstance(block, Row):
        return f'<div class="pair">{"".join(f"<div>{_block(b, figures, heading)}</div>" for b in block.blocks)}</div>'
    if block.listed:
        return f'<ul class="said">{"".join(f"<li>{escape(line)}</li>" for line in block.lines)}</ul>'
    return "".join(f'<p class="note">{escape(line)}</p>' for line in block.lines)


def table_html(table: Table, heading: str = "") -> str:
    """HTML of a table that can be downloaded as CSV; no caption is shown if it equals the section's `heading`."""
    kinds = [' class="number"' if number else "" for number in numeric(table)]
    head = "".join(f'<th scope="col"{k}>{escape(name)}</th>' for name, k in zip(table.columns, kinds, strict=True))
    body = "".join(
        f"<tr{' class=marked' if index in table.marked else ''}>{''.join(map(_cell, row, kinds))}</tr>"
        for index, row in enumerate(table.rows)
    )
    label = escape(table.title)
    grid = f'<table data-csv="{label}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    long = " long" if len(table.rows) > VISIBLE_ROWS else ""
    shown = f'<div class="scroll{long}" tabindex="0" role="region" aria-label="{label}">{grid}</div>'
    if long:
        shown = f'<p class="note">{len(table.rows):,} rows; scroll to see them all.</p>{shown}'
    title = escape(table.title[:1].upper() + table.title[1:])
    if table.folded:
        return f"<details><summary>{title}</summary>{shown}</details>"
    return shown if not title or table.title.lower() == heading.lower() else f'<h3 class="caption">{title}</h3>{shown}'


def _cell(value: Cell, kind: str) -> str:
    number = value.value if isinstance(value, Estimate) else value if is_number(value) else None
    exact = "" if number is None or not math.isfinite(float(number)) else f' data-value="{float(number):.6g}"'
    return f"<td{kind}{exact}>{escape(cell(value))}</td>"


def _trust(view: View, made: Mapping[str, Any]) -> str:
    noted = made.get("warnings")  # of the command line, such as an option that was ignored
    warnings = [*view.warnings, *map(str, noted if isinstance(noted, list) else ())]
    warnings = list(map(in_options, warnings)) if made.get("typed") else warnings  # as the terminal has shown them
    warned = "".join(f"<li>{escape(sentence(warning))}</li>" for warning in warnings)
    known = "".join(f'<li class="known">{escape(sentence(text))}</li>' for text in view.trust)
    return (warned or '<li class="fine">The run gave no warnings.</li>') + known


def _provenance(view: View, made: Mapping[str, Any]) -> str:
    rows: list[Sequence[Cell]] = [(key, str(made[key])) for key in ("started", "finished") if made.get(key) is not None]
    rows += [(key, str(value)) for group in ("versions", "host") for key, value in (made.get(group) or {}).items()]
    rows += [(key, str(value)) for key, value in view.details.items() if value]
    html = ""
    if made.get("typed"):
        html = '<p class="lead">The same command and versions give the same numbers on the same machine.</p>'
        html += f"<pre>{escape(str(made['typed']))}</pre>"
    table = Table("Versions, machine and times", ("name", "value"), rows, folded=True)
    return html + (table_html(table) if rows else "")


@cache
def widgets() -> dict[str, str]:
    """HTML by name of the widgets, interactive parts of a page that its scripts fill with data."""
    parts = re.split(r"<!-- (\w+) -->\n", _asset("widgets.html"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def _asset(name: str) -> str:
    return (resources.files("limitlens.report") / "assets" / name).read_text(encoding="utf-8")
