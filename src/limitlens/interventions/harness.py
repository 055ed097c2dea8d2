"""Tools shared by the experiments on live models: reading documents with a changed model, and tables of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from limitlens.arrays import Tensor, pd
from limitlens.attention.kernels import choose_device
from limitlens.errors import Array, InputError
from limitlens.estimate import Estimate
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.record import to_json
from limitlens.report.view import Series, Table, look, points
from limitlens.results import Result
from limitlens.statistics.documents import Statistic, over_documents

WINDOW = 512  # default number of tokens of a document, where the model has that many positions
T = TypeVar("T")


def open_model(model: str | LoadedModel, device: str, *, head: bool = False) -> LoadedModel:
    """Load a model, with its language-model head if `head`; a loaded model is returned as it is."""
    return model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), head=head)


def read_documents(loaded: LoadedModel, corpus: str, length: int, most: int, least: int) -> list[Tensor]:
    """Token ids (length,) of the first documents of a corpus, at most `most`; an `InputError` if fewer than `least`."""
    windows = Windows(loaded, open_corpus(corpus), length=length, tokens=most * length, fewer=True)
    if len(windows) < least:
        given = f"the text {corpus!r} holds {len(windows)} documents of {length:,} tokens"
        raise InputError(f"{given}; expected at least {least}: give a longer text or a shorter context")
    return [ids for batch in windows.batches(1) for ids in batch]


def read_under(variants: Iterable[AbstractContextManager[Any]], read: Callable[[], T]) -> Iterator[T]:
    """Call `read` within each variant, a context manager that changes the model, and yield the results."""
    for variant in variants:
        with variant:
            changed = read()
        yield changed


@dataclass(frozen=True, eq=False, repr=False)
class DocumentResult(Result):
    """Base class of results whose JSON document also holds the rows of their tables."""

    def document(self) -> dict[str, Any]:
        """JSON document of the result: all fields except arrays, and the rows of all tables."""
        rows = {name: table.to_dict("records") for name, table in self.tables().items()}
        return super().document() | to_json(rows)  # type: ignore[no-any-return]


def estimate_table(values: Array, names: Sequence[str], statistic: Statistic = np.asarray, **axes: Any) -> pd.DataFrame:
    """Table of numbers with jackknife standard errors over documents, one row per combination of the keyword `axes`.

    `values` is (documents, *axes, k). The function `statistic` turns its mean over documents, (*axes, k), into the
    columns `names`, (*axes, len(names)). By default the columns are the k means.
    """
    value, stderr = over_documents(statistic, values)
    columns: dict[str, Array] = {}
    for at, name in enumerate(names):
        columns |= {name: value[..., at].ravel(), f"{name}_stderr": stderr[..., at].ravel()}
    index: Any = pd.MultiIndex.from_product([list(axis) for axis in axes.values()], names=list(axes))
    return pd.DataFrame(columns, index=index).reset_index()


def plus_minus(row: Any, name: str) -> str:
    """Text of the column `name` of a table's row with its standard error, such as "0.123 ± 0.004"."""
    return f"{row[name]:.3f} ± {row[f'{name}_stderr']:.3f}"


def curves(table: pd.DataFrame, x: str, y: str, by: str, unit: str = "") -> list[Series]:
    """Curves for a figure, one per value of column `by`: column `y` against column `x`, with 95% bars."""
    return [
        points(f"{group}{unit}", rows[x], rows[y], look(place)[0], rows[f"{y}_stderr"], joined=True, positive=False)
        for place, (group, rows) in enumerate(table.groupby(by, sort=False))
    ]


def shown_table(title: str, headings: Mapping[str, str], table: pd.DataFrame, most: int = 24) -> Table:
    """Table for a report, at most `most` rows; a number and its standard error (column NAME_stderr) share one cell."""
    names = [str(name) for name in table if not str(name).endswith("_stderr")]
    rows = [
        [Estimate(row[name], row[f"{name}_stderr"]) if f"{name}_stderr" in row else row[name] for name in names]
        for row in table.to_dict("records")
    ]
    return Table(title, [headings.get(name, name) for name in names], rows, shown=most)
