"""What a summary of the theory shows, from its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitlens.report.view import SHADES, Axis, Cell, Colour, Figure, Section, Table, View, points
from limitlens.report.words import falling, join, short

QUERY_ERRORS: dict[str, tuple[str, Colour]] = {
    "rms_error": ("by the central limit theorem", "blue"), "rms_error_exact": ("exact", "orange"),
}  # fmt: skip
QUERY_COLUMNS = (
    "query", "tilt τ", "effective n", "rms error (CLT)", "exact", "error ε", "P(error > ε) at most", "useful from n =",
    "95% interval",
)  # fmt: skip
BOUND_COLUMNS = ("constant", "C(R)", "status", "C(R)/√n", "reaches 1 at n =", "of what")


def curves_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted curves by name, with n first; empty where there is none."""
    found = document.get("curve", {})
    known = {name: part["predicted"] for name, part in found.items() if name != "n" and part["predicted"] is not None}
    return {"n": found["n"], **known} if known else {}


def figures_of(document: Mapping[str, Any]) -> list[Figure]:
    """The predicted curves where there are any, and the error query by query."""
    curves, queries = curves_of(document), document["queries"]
    spreads = [query["deviations"] for query in queries]
    at_queries = [
        points(name, spreads, [query[key]["predicted"] for query in queries], colour, joined=True)
        for key, (name, colour) in QUERY_ERRORS.items()
        if key in queries[0]
    ]
    across, up = Axis("standard deviations of the query"), Axis("root mean square error", log=True)
    figure = Figure(f"Error at one query, n = {document['inputs']['n']:g}", across, up, at_queries)
    lines = [
        points(name, curves["n"], curves[name], colour, joined=True)
        for name, colour in zip(list(curves)[1:], SHADES, strict=False)
    ]
    whole = Figure("Predicted errors", Axis("tokens n", log=True), Axis("error", log=True), lines)
    return [whole, figure] if lines else [figure]


def view_of(document: Mapping[str, Any]) -> View:
    """Every prediction, as tables."""
    given, numbers, found, queries = (document[key] for key in ("inputs", "theory", "rates", "queries"))
    n, curves = f"{given['n']:g}", curves_of(document)
    valid = [f"{query['deviations']:g}" for query in queries if query["interval"]["validity"] == "valid"]
    believed = (
        f"Believe 95% intervals at {join(valid)} standard deviations; beyond, "
        if valid
        else "Believe no 95% interval; "
    )
    verdict = (
        f"Predicted without sampling: attention over n = {n} tokens of {given['measure']}.",
        f"The horizon is {short(numbers['horizon'])}: the mean and covariance of the outputs approach their limit like "
        f"{falling(numbers['rate_sharp'])} ({found['rate_sharp']['status']}), the outputs of one sample like "
        f"{falling(numbers['rate_sharp_output'])} ({found['rate_sharp_output']['status']}).",
        believed + "use more tokens or a higher temperature.",
    )
    rows = [*zip(*(map(float, column) for column in curves.values()), strict=True)]
    standing = ("", *(document["curve"][name]["status"] for name in list(curves)[1:]))
    asked = ("predicted", "status", "formula")
    local = _rows(document.get("local_rates"), "predicted", "log_power", "status")
    bounded = _rows(document["uniform"], "predicted", "status", "at_n", "useful_from", "note")
    hardest = _rows(document.get("hardmax"), "predicted", "status")
    tables = [
        Table("Rates β of n^(−β)", ("rate", *asked, "of what"), _rows(found, *asked, "note")),
        Table(f"Local slopes at n = {n}, logarithms included", ("moment", "slope", "power of ln n", "status"), local),
        Table("Constants of the n^(−1/2) law", ("moment", *asked), _rows(document.get("constants"), *asked)),
        Table("Predicted errors", list(curves), [*rows, standing] if curves else []),
        Table(f"One query at a time, n = {n}", QUERY_COLUMNS, [_query_row(query) for query in queries]),
        Table(f"Uniform error on the ball of radius {given['radius']:.3g}", BOUND_COLUMNS, bounded),
        Table(f"Hardmax: E|mean output| at n = {n}", ("law", "predicted", "status"), hardest),
    ]
    named = {"horizon": "Horizon", "horizon_one_sided": "one-sided", "coupling": "coupling", "frobenius": "‖B‖_F"}
    lead = ", ".join(f"{word} {short(numbers[key], 4)}" for key, word in named.items())
    sections = [
        Section("Errors", "What attention over n tokens misses.", figures_of(document), only="page"),
        Section("Predictions", lead + ".", [table for table in tables if table.rows]),
    ]
    subtitle = f"{given['measure']}, n = {n}: {lead[0].lower()}{lead[1:]}"
    return View("What theory predicts", subtitle, verdict, sections, warnings=document["warnings"])


def _rows(parts: Mapping[str, Any] | None, *keys: str) -> list[tuple[Cell, ...]]:
    """A row for each part: its name and what stands under the keys."""
    return [
        (name, *(_from(part[key]) if key == "useful_from" else part.get(key) for key in keys))
        for name, part in (parts or {}).items()
    ]


def _query_row(query: Mapping[str, Any]) -> tuple[Cell, ...]:
    errors = [query.get(key, {}).get("predicted") for key in ("effective_sample_size", "rms_error", "rms_error_exact")]
    bound = query["deviation"]
    chance = (bound["error"], bound["probability_at_most"], _from(bound["useful_from"]))
    return (f"{query['deviations']:g} sd", query["tilt"], *errors, *chance, query["interval"]["validity"])


def _from(n: float | None) -> str:
    return short(n) if n is not None and n < float("inf") else "never"
