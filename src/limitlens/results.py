"""Base class of all results, with methods to print, save and plot a result and to write its HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from limitlens.errors import InputError
from limitlens.record import Run, from_json, provenance, save_figure, to_json, write_page, write_run
from limitlens.report.view import Figure, View

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Base class of the results of measurements, predictions and plans.

    Each kind of result is a frozen dataclass with its own `table` and `view`. The methods here serve a result whose
    JSON document mirrors its fields; others override `document`, `arrays` and `load`.
    """

    kind: ClassVar[str]  # name of the kind of result in run.json
    file: ClassVar[str]  # name of the result's main table in a run folder
    held: ClassVar[tuple[str, ...]] = ()  # fields that a run folder holds as arrays instead of in the document
    # how the result was made (`record.provenance`); empty until a command or `save` fills it
    made: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def table(self) -> pd.DataFrame:
        """Main table of the result's numbers, as a pandas data frame."""
        raise NotImplementedError

    def view(self) -> View:
        """View of the result: the sentences, tables and figures that every renderer shows."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """JSON document of the result: all fields except those that a run folder stores as arrays."""
        return {name: value for name, value in to_json(self).items() if name not in self.held}

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables that a run folder of the result holds, by file name without ending."""
        return {self.file: self.table}

    def arrays(self) -> dict[str, Any]:
        """Arrays that a run folder of the result holds, by name; empty if the JSON document holds all numbers."""
        return {name: getattr(self, name) for name in self.held}

    @classmethod
    def load(cls, run: Run) -> Self:
        """Build the result from the contents of a run folder, without its provenance `made` (`Run.result` adds it)."""
        return from_json(cls, {**run.document, **(run.arrays() if cls.held else {})})  # type: ignore[no-any-return]

    def check(self) -> None:
        """Build the view and the tables, so that a result read from a damaged folder fails at once."""
        self.view()
        self.tables()

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Further files of the result's run folder: name -> function that writes the file to a path."""
        return {}

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write a run folder that `limitlens.load` reads back: run.json, tables, arrays and further files.

        A folder that holds a run of another command is refused unless `overwrite` is set.
        """
        return write_run(folder, self, overwrite)

    def report(self, path: str | Path) -> Path:
        """Write the result as an HTML page in one file."""
        return write_page(self.view(), path, self.made or provenance("", {}))

    def figures(self) -> list[Figure]:
        """Figures of the result's view, which `plot` draws."""
        return [block for block in self.view().blocks if isinstance(block, Figure)]

    def plot(self, path: str | Path | None = None) -> Drawing:
        """Draw the figures of the result with matplotlib; with `path`, save them in the format of its ending."""
        return plot(self.figures(), path)

    def __repr__(self) -> str:
        view = self.view()
        return f"<{type(self).__name__}: {view.title}, {view.subtitle}>"

    def __str__(self) -> str:
        from limitlens.report.terminal import as_text

        return as_text(self.view())

    def _repr_html_(self) -> str:
        from limitlens.report.notebook import as_html

        return as_html(self.view())


def plot(figures: Sequence[Figure], path: str | Path | None = None) -> Drawing:
    """Draw figures of views side by side with matplotlib; with `path`, save them in the format of its ending."""
    from limitlens.report.paper import draw

    if not figures:
        raise InputError("this result has no figure, because it has too few numbers to draw; see its table")
    drawing = draw(figures)
    if path is not None:
        save_figure(drawing, path)
    return drawing
