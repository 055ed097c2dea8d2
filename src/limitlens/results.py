"""Base class of all results, which can be printed, saved, plotted and written as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from limitlens import record
from limitlens.errors import InputError
from limitlens.report.view import Figure, View

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Base class of all results, which can be printed, saved, plotted and written as an HTML page.

    A subclass is a frozen dataclass that defines `table` and `view`. By default its fields are saved as JSON.
    """

    kind: ClassVar[str]  # name of the kind of result in run.json
    file: ClassVar[str]  # name of the result's main table in a run folder
    held: ClassVar[tuple[str, ...]] = ()  # fields saved as arrays instead of as JSON
    # how the result was made (`record.provenance`); empty until a command or `save` fills it
    made: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def table(self) -> pd.DataFrame:
        """Main table of the result's numbers, as a pandas data frame."""
        raise NotImplementedError

    def view(self) -> View:
        """Sentences, tables and figures that terminals, notebooks and HTML pages show of the result."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Result as a JSON document: all fields except those that are saved as arrays."""
        return {name: value for name, value in record.to_json(self).items() if name not in self.held}

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables that are saved with the result, by file name without ending."""
        return {self.file: self.table}

    def arrays(self) -> dict[str, Any]:
        """Arrays that are saved with the result, by name; empty if the JSON document holds all numbers."""
        return {name: getattr(self, name) for name in self.held}

    @classmethod
    def load(cls, run: record.Run) -> Self:
        """Build the result from the contents of its folder, without `made`, the record of how it was made."""
        arrays = run.arrays() if cls.held else {}
        return record.from_json(cls, {**run.document, **arrays})  # type: ignore[no-any-return]

    def check(self) -> None:
        """Build all that the result shows, so that one read from a damaged folder fails at once."""
        self.view()
        self.tables()

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Further files to save with the result: file name -> function that writes the file to a path."""
        return {}

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Save the result in a folder for `limitlens.load`; `overwrite` replaces a result of another command."""
        files = dict(self.files())
        if arrays := self.arrays():
            from safetensors.numpy import save_file

            whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            files[record.ARRAYS] = partial(save_file, whole)
        for name, table in self.tables().items():
            files[f"{name}.parquet"] = partial(table.to_parquet, index=False)
            files[f"{name}.csv"] = partial(table.to_csv, index=False)
        made = self.made or record.provenance(self.kind, {})
        run = {"format": record.FORMAT, "kind": self.kind, **made, "result": self.document()}
        files["run.json"] = record.text_writer(record.json_text(run))
        if (outside := next((name for name in files if Path(name).name != name or name == ".."), None)) is not None:
            raise InputError(f"{outside!r} is not a file name; expected one without a folder in it")
        with record.open_folder(folder, str(made["command"]), overwrite) as path:
            record.write_files({path / name: write for name, write in files.items()})
        return path

    def report(self, path: str | Path) -> Path:
        """Write the result as an HTML page to a file, or as report.html into a folder; return the file's path."""
        return write_page(self.view(), path, self.made or record.provenance("", {}))

    def figures(self) -> list[Figure]:
        """Figures of the result, which `plot` draws."""
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
    """Draw figures side by side with matplotlib; with `path`, save them in the format of its ending."""
    from limitlens.report.paper import draw

    if not figures:
        raise InputError("this result has no figure, because it has too few numbers to draw; see its table")
    drawing = draw(figures)
    if path is not None:
        save_figure(drawing, path)
    return drawing


def write_page(view: View, path: str | Path, made: Mapping[str, Any]) -> Path:
    """Write what a result shows as an HTML page to a file, or as report.html into a folder; return the file's path."""
    from limitlens.report.page import page

    target = Path(path)
    if os.path.isdir(target):  # unlike Path.is_dir, False for a name that no file can have
        target = target / "report.html"
    html = page(view, made)
    try:
        foreign = target.exists() and not target.read_bytes().startswith(html[:15].encode())
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise record.cannot_write(target, error) from None
    if foreign:
        raise InputError(f"{str(target)!r} exists and is not an HTML page; give another name, or remove the file")
    record.write_files({target: record.text_writer(html)})
    return target


def save_figure(drawing: Any, path: str | Path) -> None:
    """Write a matplotlib figure to `path`, in the format of the path's ending."""
    endings = sorted(drawing.canvas.get_supported_filetypes())
    target = Path(path)
    if target.suffix[1:].lower() not in endings:
        raise InputError(f"cannot draw into {str(path)!r}; expected a file that ends in one of: {', '.join(endings)}")
    record.write_files({target: drawing.savefig})
