"""What every result can do: print itself, save itself, draw itself, and become a page.

There is no base class. A result is whatever has the members of `Result`; the functions below are what its methods call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from limitlens.record import Run, provenance, typed, write_run
from limitlens.report.view import Figure, Row, View

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

    from limitlens.budgets.cache_plan import CachePlan
    from limitlens.budgets.plan import Plan as Plan
    from limitlens.heads.result import ProbeRun


class Result(Protocol):
    """A result: what a person gets from a measurement, a prediction or a plan.

    Attributes
    ----------
    kind : str
        Names the kind of result in `run.json`, and who reads it back.
    made : mapping
        How it was made (`record.provenance`); empty until a command or `save` fills it.
    """

    kind: ClassVar[str]

    @property
    def made(self) -> Mapping[str, Any]:
        """How it was made."""

    @property
    def table(self) -> pd.DataFrame:
        """Its numbers, one row each."""

    def document(self) -> dict[str, Any]:
        """The result as a JSON document."""

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables that a run folder holds, by file name."""

    def arrays(self) -> dict[str, Any]:
        """The arrays that a run folder holds; empty where the document says everything."""

    def view(self) -> View:
        """What it shows."""

    def save(self, folder: str | Path) -> Path:
        """Leave it in a folder that `limitlens.load` reads back."""

    def report(self, path: str | Path) -> Path:
        """Write its one-file HTML page."""

    def plot(self, path: str | Path | None = None) -> Drawing:
        """Draw it for print."""


def no_arrays(result: Result) -> dict[str, Any]:
    """None: the document says everything."""
    return {}


def table_as(name: str) -> Callable[[Result], dict[str, pd.DataFrame]]:
    """The one table of a result, under the file name that a run folder gives it."""
    return lambda result: {name: result.table}


def load(kind: type[Any], run: Run) -> Any:
    """The result that a run folder holds, for kinds whose fields mirror their document."""
    return replace(typed(kind, run.document), made=run.made)


def save(result: Result, folder: str | Path) -> Path:
    """Write run.json, tables and arrays into a folder that `limitlens.load` reads back."""
    return write_run(folder, result)


def report(result: Result, path: str | Path) -> Path:
    """Write the one-file HTML page of a result."""
    from limitlens.report.page import write_page

    return write_page(result.view(), path, result.made or provenance("", {}))


def plot(figures: Sequence[Figure], path: str | Path | None = None) -> Drawing:
    """Draw figures side by side for print; saved to `path` where given, in the format of its ending."""
    from limitlens.report.paper import draw

    return draw(figures, path)


def draw(result: Result, path: str | Path | None = None) -> Drawing:
    """Draw the figures of a view side by side for print."""
    blocks = [block for section in result.view().sections for block in section.blocks]
    parts = [part for block in blocks for part in (block.blocks if isinstance(block, Row) else [block])]
    return plot([part for part in parts if isinstance(part, Figure)], path)


def text(result: Result) -> str:
    """The result as a terminal shows it."""
    from limitlens.report.terminal import as_text

    return as_text(result.view())


def html(result: Result) -> str:
    """The result as a notebook shows it."""
    from limitlens.report.notebook import as_html

    return as_html(result.view())


def plan(
    run: ProbeRun, error: float = 0.05, context: int | None = None, **options: Any
) -> Plan | CachePlan:  # fmt: skip
    """KV entries per head of a probe for an error, checked on the reserved windows; see `limitlens.plan`."""
    from limitlens.budgets.plan import plan as make  # heads know nothing of budgets, which read them

    return make(run, error, context, **options)
