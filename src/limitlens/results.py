"""What every result can do: print itself, save itself, draw itself, and become a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from limitlens.arrays import Drawing, pd
from limitlens.record import Run, from_json, provenance, to_json, write_run
from limitlens.report.view import Figure, View

if TYPE_CHECKING:
    from limitlens.cache.cache_plan import CachePlan
    from limitlens.cache.plan import Plan as Plan
    from limitlens.probing.result import ProbeRun


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A result: what a person gets from a measurement, a prediction or a plan.

    Each kind is a frozen dataclass with a `table` and a `view` of its own. What is here serves those whose document
    mirrors their fields; others say how they become a document and arrays, and how they are read back.
    """

    kind: ClassVar[str]  # names it in `run.json`, and who reads it back
    file: ClassVar[str]  # names its table in a run folder
    held: ClassVar[tuple[str, ...]] = ()  # its fields that a run folder holds as arrays, beside the document
    # how it was made (`record.provenance`); empty until a command or `save` fills it
    made: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def table(self) -> pd.DataFrame:
        """Its numbers, one row each."""
        raise NotImplementedError

    def view(self) -> View:
        """What it shows."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """The result as a JSON document: its fields, but for those that arrays hold."""
        return {name: value for name, value in to_json(self).items() if name not in self.held}

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables that a run folder holds, by file name."""
        return {self.file: self.table}

    def arrays(self) -> dict[str, Any]:
        """The arrays that a run folder holds; empty where the document says everything."""
        return {name: getattr(self, name) for name in self.held}

    @classmethod
    def load(cls, run: Run) -> Self:
        """The result that a run folder holds; who asked for it adds how it was made."""
        return from_json(cls, {**run.document, **(run.arrays() if cls.held else {})})  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise an error where what was read from a folder cannot be shown; `record` says so in one sentence."""
        self.view()
        self.tables()

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Other files that a run folder holds, and what writes each of them."""
        return {}

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Leave it in a folder that `limitlens.load` reads back: run.json, tables, arrays and its own files.

        What another command left there is kept, and told, unless `overwrite` says so.
        """
        return write_run(folder, self, overwrite)

    def report(self, path: str | Path) -> Path:
        """Write its one-file HTML page."""
        from limitlens.report.page import write_page

        return write_page(self.view(), path, self.made or provenance("", {}))

    def figures(self) -> list[Figure]:
        """What `plot` draws: the figures of its view."""
        return [block for block in self.view().blocks if isinstance(block, Figure)]

    def plot(self, path: str | Path | None = None) -> Drawing:
        """Draw it for print, its figures side by side; saved to `path` where given, in the format of its ending."""
        return plot(self.figures(), path)

    def __str__(self) -> str:
        from limitlens.report.terminal import as_text

        return as_text(self.view())

    def _repr_html_(self) -> str:
        from limitlens.report.notebook import as_html

        return as_html(self.view())


def plot(figures: Sequence[Figure], path: str | Path | None = None) -> Drawing:
    """Draw figures side by side for print; saved to `path` where given, in the format of its ending."""
    from limitlens.report.paper import draw

    return draw(figures, path)


def plan(run: ProbeRun, error: float = 0.05, context: int | None = None, **options: Any) -> Plan | CachePlan:
    """KV entries per head of a probe for an error, checked on the reserved windows; see `limitlens.plan`."""
    from limitlens.cache.plan import plan as make  # heads know nothing of budgets, which read them

    return make(run, error, context, **options)
