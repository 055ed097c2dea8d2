"""What commands share: the options of the contract, progress on stderr, a JSON document or a page on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Leave run.json and tables in this folder.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Every random choice comes from it.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where kernels run.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no warnings on stderr.")]

Progress = Callable[[float, float], None]  # (done, total), in any unit


@contextmanager
def progress(title: str, quiet: bool) -> Iterator[Progress]:
    """A progress bar on stderr, shown only to a person: silent when piped or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    share = TaskProgressColumn(show_speed=True)
    columns = (TextColumn("{task.description}"), BarColumn(), share, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    from limitlens.record import to_json

    print(to_json(document))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; plain when piped or when NO_COLOR is set, ASCII when the terminal cannot do better."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, safe_box=True)
    for index, column in enumerate(columns):
        words = index == 0 or any(row[index][:1].isalpha() for row in rows)
        table.add_column(Text(column), justify="left" if words else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def save_figure(draw: Callable[[str], Figure], folder: Path | None, name: str) -> None:
    """Draw into the run folder as PNG and PDF, or as NAME.png here where there is no folder."""
    if folder is None:
        draw(f"{name}.png")
    else:
        draw(str(folder / f"{name}.png")).savefig(folder / f"{name}.pdf")


def warn(warnings: Sequence[str], quiet: bool) -> None:
    """Warnings on stderr, one line each."""
    for warning in () if quiet else warnings:
        print(f"warning: {warning}", file=sys.stderr)
