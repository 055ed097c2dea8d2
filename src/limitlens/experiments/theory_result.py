"""The result of `limitlens theory`: predictions made without sampling, as tables, figures and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limitlens.arrays import pd
from limitlens.measures import TokenLaw
from limitlens.record import Run
from limitlens.report.text import falling, join, short, ten_to
from limitlens.report.view import SHADES, Axis, Cell, Figure, Section, Table, View, points
from limitlens.results import Result
from limitlens.theory._summary import summary
from limitlens.theory.rates import WEAK
from limitlens.theory.statuses import CENTRED

# Predictions that are shown as tables: title, then the columns by their keys.
_VALUE = {"predicted": "predicted", "status": "status"}
PARTS = {
    "rates": ("Rates β of n^(−β)", _VALUE | {"formula": "formula", "note": "error it describes"}),
    "local_rates": ("Local slopes at n = {n:g}, with their powers of ln n", _VALUE | {"log_power": "power of ln n"}),
    "constants": ("Constants of the n^(−1/2) law", _VALUE | {"formula": "formula", "note": "note"}),
    "uniform": (
        "Uniform error on the ball of radius {radius:.3g}: constants C(R) of C(R)/√n",
        _VALUE | {"at_n": "C(R)/√n", "useful_from": "reaches 1 at n =", "note": "meaning"},
    ),
    "hardmax": ("Hardmax: E|mean output| at n = {n:g}", _VALUE),
}
NORMS = {"horizon": "horizon", "horizon_one_sided": "one-sided", "coupling": "coupling", "frobenius": "‖B‖_F"}
QUERY_COLUMNS = (
    "query", "tilt τ", "effective n", "rms error (CLT)", "exact", "error ε", "P(error > ε) at most", "useful from n =",
    "95% interval",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class TheoryReport(Result):
    """Result of `theory_report`: the predictions of `theory.summary`, which can be shown and saved."""

    predicted: Mapping[str, Any]  # all predictions as nested mappings by name (`theory.Summary.predicted`)
    kind = "theory"

    @classmethod
    def load(cls, run: Run) -> TheoryReport:
        """Read saved predictions from a run folder."""
        return cls(run.document)

    def document(self) -> dict[str, Any]:
        """JSON document of all predictions, for saving."""
        return dict(self.predicted)

    @property
    def warnings(self) -> Sequence[str]:
        """Reasons why the predicted slopes at this n are not yet the asymptotic rates, one sentence each."""
        return list(self.predicted["warnings"])

    @property
    def table(self) -> pd.DataFrame:
        """Table of the predicted rates of convergence: one row per rate, with formula and status."""
        return pd.DataFrame([{"rate": name, **rate} for name, rate in self.predicted["rates"].items()])

    @property
    def curves(self) -> dict[str, Any]:
        """Predicted errors by name, at the sizes under "n"; empty for token distributions without a prediction."""
        found = self.predicted.get("curve", {})
        parts = {name: part["predicted"] for name, part in found.items() if name != "n"}
        known = {name: curve for name, curve in parts.items() if curve is not None}
        return {"n": found["n"], **known} if known else {}

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by file name: predicted rates, and predicted errors against n if there are any."""
        return {"rates": self.table, **({"curve": pd.DataFrame(self.curves)} if self.curves else {})}

    def view(self) -> View:
        """Tables of all predictions; on the HTML page also figures."""
        inputs, numbers = self.predicted["inputs"], self.predicted["theory"]
        reach = ", ".join(f"{label} {short(numbers[name], 4)}" for name, label in NORMS.items())
        if (tilt := numbers.get("mean_tilt", 0.0)) > CENTRED:
            reach += f", mean tilt {short(tilt, 4)}"
        sections = [
            Section("Errors", "Predicted difference between n tokens and the limit.", self._figures(), only="page"),
            Section("Predictions", f"{reach[0].upper()}{reach[1:]}.", self._prediction_tables()),
        ]
        subtitle = f"{inputs['measure']}, n = {inputs['n']:g}: {reach}"
        return View("Theoretical predictions", subtitle, self._verdict(), sections, warnings=self.warnings)

    def _figures(self) -> list[Figure]:
        curves, queries = self.curves, self.predicted["queries"]
        x, y = Axis("tokens n", log=True), Axis("error", log=True)
        lines = [
            points(name, curves["n"], curves[name], colour, joined=True)
            for name, colour in zip(list(curves)[1:], SHADES, strict=False)
        ]
        figures = [Figure("Predicted errors", x, y, lines)] if curves else []
        spreads = [query["deviations"] for query in queries]
        kinds = {"rms_error": "by the central limit theorem", "rms_error_exact": "exact"}
        at_queries = [
            points(name, spreads, [query[key]["predicted"] for query in queries], colour, joined=True)
            for (key, name), colour in zip(kinds.items(), SHADES, strict=False)
            if key in queries[0]
        ]
        title = f"Error at one query, n = {self.predicted['inputs']['n']:g}"
        x, y = Axis("standard deviations of the query"), Axis("root mean square error", log=True)
        return [*figures, Figure(title, x, y, at_queries)]

    def _verdict(self) -> tuple[str, str, str]:
        inputs, rates = self.predicted["inputs"], self.predicted["rates"]
        names = ("rate_sharp", "rate_sharp_output")
        moments, output = (f"{falling(rates[name]['predicted'])} ({rates[name]['status']})" for name in names)
        found = f"the mean and covariance of the outputs approach their limit like {moments}, "
        found += f"the outputs of one sample like {output}."
        if "rate_compact" in rates:  # bounded tokens have one proved rate, whatever the horizon
            found = f"the proved rate n⁻⁰·⁵⁰ is that of {rates['rate_compact']['note']}."
        queries = self.predicted["queries"]
        valid = [f"{query['deviations']:g}" for query in queries if query["interval"]["validity"] == "valid"]
        intervals = f"95% intervals are valid at {join(valid)} standard deviations; for larger queries"
        remedy = f"{intervals if valid else 'No 95% interval is valid;'} use more tokens or a higher temperature."
        relative = self.curves.get("relative_output")
        horizon = self.predicted["theory"]["horizon"]
        if horizon <= WEAK and relative is not None and relative[-1] > 1:
            remedy = f"The limit itself is small, and the relative output error {short(float(relative[-1]))}: "
            remedy += "use more tokens or a lower temperature, that is a larger horizon."
        about = f"Predicted without sampling: attention over n = {inputs['n']:g} tokens of {inputs['measure']}."
        return about, f"The horizon is {short(horizon)}: {found}", remedy

    def _prediction_tables(self) -> list[Table]:
        inputs, curves = self.predicted["inputs"], self.curves
        tables = []
        for part, (title, columns) in PARTS.items():
            rows = [
                (name, *(_size(found[key]) if key == "useful_from" else found.get(key) for key in columns))
                for name, found in _rows(self.predicted.get(part) or {}, inputs["n"])
            ]
            tables.append(Table(title.format(**inputs), ["", *columns.values()], rows))
        values: list[Sequence[Cell]] = [*zip(*(map(float, column) for column in curves.values()), strict=True)]
        if curves:
            values.append(("", *(self.predicted["curve"][name]["status"] for name in list(curves)[1:])))
        queries = [_query_row(query) for query in self.predicted["queries"]]
        tables.append(Table("Predicted errors", list(curves), values))
        tables.append(Table(f"Single queries, n = {inputs['n']:g}", QUERY_COLUMNS, queries))
        return [table for table in tables if table.rows]


def theory_report(measure: TokenLaw, head: Any, n: float, **options: Any) -> TheoryReport:
    """Predict the error of attention over n tokens of a distribution, as a result with tables and an HTML page.

    Arguments and `options` (sizes, radius, error, mask_self) are those of `theory.summary`.

    >>> ll.theory_report(ll.Gaussian(0.0, 1.0), ll.Head(1.5), 30_000).table['rate'].tolist()[:2]
    ['rate_proved', 'rate_drawn_coupling']
    """
    return TheoryReport(summary(measure, head, n, **options).predicted)


def _query_row(query: Mapping[str, Any]) -> Sequence[Cell]:
    errors = [query.get(key, {}).get("predicted") for key in ("effective_sample_size", "rms_error", "rms_error_exact")]
    bound = query["deviation"]
    chance = (bound["error"], bound["probability_at_most"], _size(bound["useful_from"]))
    interval = query["interval"]
    shown = interval["meaning" if interval["meaning"].startswith("K ends") else "validity"]
    return (f"{query['deviations']:g} sd", query["tilt"], *errors, *chance, shown)


def _rows(part: Mapping[str, Any], n: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Predictions by name; those of `uniform` beyond the range of floats become texts, such as 10⁴³⁴²."""
    for name, found in part.items():
        log10 = found.get("log10")
        if log10 is None or not math.isfinite(log10):
            yield name, found
            continue
        powers = {"predicted": log10, "at_n": log10 - math.log10(n) / 2, "useful_from": 2 * log10}
        beyond = [key for key in powers if found[key] is None or math.isinf(found[key])]
        yield name, {**found, **{key: ten_to(round(powers[key])) for key in beyond}}


def _size(n: float | str | None) -> str:
    if isinstance(n, str):
        return n
    return short(n) if n is not None and n < float("inf") else "never"
