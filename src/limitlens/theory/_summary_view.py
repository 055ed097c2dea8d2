"""What a summary of the theory shows, from its document."""

from collections.abc import Mapping
from typing import Any

from limitlens.report.view import SHADES, Cell, Figure, Section, Table, View, points
from limitlens.report.words import falling, join, read_words, short, worded_figure

WORDS = read_words("theory/words.json")


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
        for key, (name, colour) in WORDS["errors at queries"].items()
        if key in queries[0]
    ]
    lines = [
        points(name, curves["n"], curves[name], colour, joined=True)
        for name, colour in zip(list(curves)[1:], SHADES, strict=False)
    ]
    one = worded_figure(WORDS["at queries"], at_queries, n=document["inputs"]["n"])
    return [worded_figure(WORDS["curves"], lines), one] if lines else [one]


def view_of(document: Mapping[str, Any]) -> View:
    """Every prediction, as tables."""
    given, numbers, found, queries = (document[key] for key in ("inputs", "theory", "rates", "queries"))
    curves = curves_of(document)
    valid = [f"{query['deviations']:g}" for query in queries if query["interval"]["validity"] == "valid"]
    # bounded tokens have their own rate, whatever the horizon
    names = ("rate_compact",) * 2 if "rate_compact" in found else ("rate_sharp", "rate_sharp_output")
    moments, output = ((falling(found[name]["predicted"]), found[name]["status"]) for name in names)
    known = {"given": given, "horizon": short(numbers["horizon"]), "moments": moments, "output": output}
    known["believed"] = WORDS["believed" if valid else "not believed"].format(valid=join(valid))
    read, told, do = (text.format(**known) for text in WORDS["verdict"])
    values = [*zip(*(map(float, column) for column in curves.values()), strict=True)]
    standing = ("", *(document["curve"][name]["status"] for name in list(curves)[1:]))
    rows = {
        "rates": _rows(found, "predicted", "status", "formula", "note"),
        "local": _rows(document.get("local_rates"), "predicted", "log_power", "status"),
        "constants": _rows(document.get("constants"), "predicted", "status", "formula"),
        "curves": [*values, standing] if curves else [],
        "queries": [_query_row(query) for query in queries],
        "uniform": _rows(document["uniform"], "predicted", "status", "at_n", "useful_from", "note"),
        "hardmax": _rows(document.get("hardmax"), "predicted", "status"),
    }
    tables = [
        Table(title.format(given=given), columns or list(curves), rows[name])
        for name, (title, columns) in WORDS["tables"].items()
        if rows[name]
    ]
    lead = ", ".join(f"{word} {short(numbers[key], 4)}" for key, word in WORDS["reach"].items())
    sections = [
        Section("Errors", "What attention over n tokens misses.", figures_of(document), only="page"),
        Section("Predictions", lead + ".", tables),
    ]
    subtitle = f"{given['measure']}, n = {given['n']:g}: {lead[0].lower()}{lead[1:]}"
    return View(WORDS["title"], subtitle, (read, told, do), sections, warnings=document["warnings"])


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
