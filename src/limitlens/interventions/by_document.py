"""Results that are means over documents: tables of them with standard errors, and what such tables show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.record import to_json
from limitlens.report.view import Series, Table, look, points
from limitlens.results import Result

Statistic = Callable[[Array], Array]  # of means over documents


@dataclass(frozen=True, eq=False, repr=False)
class ByDocument(Result):
    """A result whose arrays have the documents on their first axis."""

    def document(self) -> dict[str, Any]:
        """The result as JSON: what was asked, and the rows of its tables."""
        return super().document() | to_json({name: rows.to_dict("records") for name, rows in self.tables().items()})  # type: ignore[no-any-return]


def over_documents(statistic: Statistic, values: Array) -> tuple[Array, Array]:
    """A function of means over documents (axis 0) and its standard error, leaving out one document at a time."""
    count, total = len(values), values.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # no error over none is not known
        left = np.stack([statistic((total - one) / (count - 1)) for one in values])
        return statistic(total / count), jackknife(left, 0)


def jackknife(left: Array, axis: int) -> Array:
    """The standard error of a number from what it is without each of the documents along an axis."""
    return np.asarray(np.sqrt((left.shape[axis] - 1) * left.var(axis)))


def tabled(numbers: Mapping[str, tuple[Statistic, Array]], **axes: Any) -> pd.DataFrame:
    """A row for each place of the axes, with each number and its standard error; no rows without numbers."""
    if not numbers:
        return pd.DataFrame()
    columns: dict[str, Array] = {}
    for name, (statistic, values) in numbers.items():
        found = over_documents(statistic, values)
        columns |= {name: found[0].ravel(), f"{name}_stderr": found[1].ravel()}
    index: Any = pd.MultiIndex.from_product([list(axis) for axis in axes.values()], names=list(axes))
    return pd.DataFrame(columns, index=index).reset_index()


def curves(table: pd.DataFrame, x: str, y: str, *by: str, unit: str = "") -> list[Series]:
    """One column over another with 95% bars, a series for each group."""
    series = []
    for place, (group, rows) in enumerate(table.groupby(list(by), sort=False)):
        label = ", ".join(map(str, group)) + unit
        series.append(points(label, rows[x], rows[y], look(place)[0], rows[f"{y}_stderr"], joined=True, positive=False))
    return series


def shown(title: str, columns: Mapping[str, str], table: pd.DataFrame, most: int = 24) -> Table:
    """A table for people: numbers beside their standard errors, columns in their own words where there are any."""
    names = [str(name) for name in table if not str(name).endswith("_stderr")]
    rows = [
        [Estimate(row[name], row[f"{name}_stderr"]) if f"{name}_stderr" in row else row[name] for name in names]
        for row in table.to_dict("records")
    ]
    return Table(title, [columns.get(name, name) for name in names], rows, shown=most)
