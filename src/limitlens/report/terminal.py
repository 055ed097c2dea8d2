"""Display of results as text, in a terminal or a pipe and for `str(result)`."""

import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from textwrap import fill
from typing import Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text as Words

from limitlens.report.text import cell, numeric, sentence
from limitlens.report.view import Section, Table, Text, View

WIDTH = 160  # columns of tables if there is no terminal
NAME = 16  # letters of a name that a table shows in one line
HEADING = 12  # letters of a heading that a narrow table shows in one line


def show(view: View) -> None:
    """Print a result on stdout without its warnings, which go to stderr; bold only on a terminal without NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    text = as_text(replace(view, warnings=()), colour=sys.stdout.isatty() and not plain)
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(text if unicode else text.replace("─", "-"))


def as_text(view: View, *, width: int | None = None, colour: bool = False) -> str:
    """Text that shows a result and its warnings, in lines of `width` (the terminal's) or fewer; `colour` makes bold."""
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    sheet = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(
        file=sheet, width=width or WIDTH, force_terminal=colour, color_system=system, legacy_windows=False,
        force_jupyter=False,  # or rich would show the parts in a notebook instead of writing the text
    )  # fmt: skip
    for part in _parts(view, width or WIDTH):
        console.print(part, soft_wrap=width is None and not isinstance(part, Grid), highlight=False)
    text = "\n".join(line.rstrip() for line in sheet.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def _parts(view: View, width: int) -> Iterator[RenderableType]:
    yield Words(view.title, style="bold")
    if view.subtitle:
        yield Words(view.subtitle)
    _, found, do = view.verdict
    for heading, text in (("What to do", do), ("What it found", found)):
        if text:
            yield Words("\n" + heading, style="bold")
            yield Words(text)
    for part in view.sections:
        if part.only in ("", "terminal"):
            yield from _section(part, width)
    notes = [*(("warning", text) for text in view.warnings), *(("note", text) for text in view.trust)]
    if notes:
        yield Words("")
    for word, text in notes:
        yield Words(f"{word}: {sentence(text)}")


def _section(part: Section, width: int) -> Iterator[RenderableType]:
    blocks = [block for block in part.flat if isinstance(block, (Table, Text))]
    if not blocks:
        return
    if part.title:
        yield Words("\n" + part.title, style="bold")
    for block in blocks:
        if isinstance(block, Table):
            grid, hidden = _grid(block, "" if block.title.lower() == part.title.lower() else block.title, width)
            yield grid
            left = 0 if block.shown is None else len(block.rows) - block.shown
            more = [f"{left:,} more"] * (left > 0) + [f"the columns {', '.join(hidden)}"] * bool(hidden)
            if more:
                yield Words(f"  ... and {' and '.join(more)}: `table` in Python, or --json / --out")
        else:
            for line in block.lines:
                yield Words(f"  - {line}" if block.listed else line)


def _grid(table: Table, title: str, width: int) -> tuple[RenderableType, list[str]]:
    """Table for a terminal, and the names of the last columns, which are left out if numbers or names would break."""
    name = Words(title[:1].upper() + title[1:]) if title else None
    grid = Grid(title=name, title_justify="left", box=box.SIMPLE_HEAD, safe_box=True)
    rows = [[cell(value) for value in row] for row in table.rows[: table.shown]]
    longest = [max((len(row[k]) for row in rows), default=0) for k in range(len(table.columns))]
    narrow = 1 + sum(max(room, len(column)) + 3 for room, column in zip(longest, table.columns, strict=True)) > width
    used, hidden = 1, []
    for column, number, room in zip(table.columns, numeric(table), longest, strict=True):
        whole = narrow and (number or room <= NAME)  # a column of numbers or names, none of which may break
        least = max(room if whole else min(room, NAME), *map(len, column.split()), min(len(column), HEADING))
        used += least + 3
        if narrow and used > width and len(grid.columns) > 1:
            hidden.append(column)
            continue
        heading = fill(column, least, break_on_hyphens=False) if whole else column
        grid.add_column(Words(heading), justify="right" if number else "left", no_wrap=whole)
    for index, row in enumerate(rows):
        grid.add_row(*map(Words, row[: len(grid.columns)]), style="bold" if index in table.marked else None)
    return grid, hidden
