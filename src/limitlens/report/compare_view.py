"""The page of a comparison: runs side by side, differences that exceed their errors marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitlens.report.parts import Figures, View, join, plural, section, short, table

SHADES = ("blue", "orange", "green", "pink", "sky", "red")
SHOWN = 400  # rows of the long table that a page holds; the folder's CSV has them all


def compare_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Everything a comparison has to show."""
    runs, summary, rows = result["runs"], result["summary"], result["differences"]
    names = [run["name"] for run in runs]
    figures = Figures()
    tested = [row for row in rows if row["exceeds"] is not None]
    marked = [row for row in tested if row["exceeds"]]
    first, others = names[0], names[1:]
    middle = "median" if result["same_model"] or not result["regimes"] else "mean"
    in_common = plural(result["matched"], result["unit"])
    keys = list(dict.fromkeys(key for run in runs for key in run if key != "name"))
    described = [(run["name"], *(_text(run.get(key)) for key in keys)) for run in runs]
    columns = ["quantity", *(f"{middle}, {name}" for name in names), *(f"marked, {name}" for name in others)]
    table_rows = [
        (
            row["quantity"],
            *(row["medians"][name] for name in names),
            *(
                f"{row['marked'][name]} of {row['tested'][name]}" if row["tested"][name] else "no errors known"
                for name in others
            ),
        )
        for row in summary
    ]
    drawn = "".join(_scatter(figures, result, quantity) for quantity in _drawn(summary))
    ranked = sorted(rows, key=_weight, reverse=True)[:SHOWN]
    long = [
        (
            row["where"],
            row["quantity"],
            row["run"],
            row["first"],
            row["value"],
            row["difference"],
            row["difference_stderr"],
            "exceeds its error" if row["exceeds"] else "" if row["exceeds"] is False else "no error known",
        )
        for row in ranked
    ]
    by_quantity = [
        f"{quantity} in {count} of {sum(row['quantity'] == quantity for row in tested)}"
        for quantity in dict.fromkeys(row["quantity"] for row in tested)
        if (count := sum(row["quantity"] == quantity for row in marked))
    ]
    strongest = max(marked, key=_weight) if marked else None
    return View(
        title=" against ".join(names),
        subtitle=f"{plural(len(runs), 'run')} of limitlens {result['command']} · {in_common} in common",
        verdict=(
            f"{join(names)} were laid side by side on {in_common}, and every difference to {first} was held "
            "against its standard error.",
            f"Differences exceed their errors for {join(by_quantity)}."
            if by_quantity
            else "No difference exceeds its error: on these measurements the runs agree.",
            f"Look first at {strongest['where']}: its {strongest['quantity']} goes from {_text(strongest['first'])} to "
            f"{_text(strongest['value'])} in {strongest['run']}."
            if strongest
            else "More replicates or more tokens would be needed to tell them apart.",
        ),
        sections=[
            section("The runs", "", table("runs", ["run", *keys], described), _regimes(result, first)),
            section(
                "Quantity by quantity",
                "Medians, and how many differences exceed their errors.",
                table("summary", columns, table_rows),
                drawn,
            ),
            section(
                "Place by place",
                "Differences that exceed their errors stand first and in bold.",
                table(
                    "differences",
                    ("where", "quantity", "run", f"in {first}", "in run", "difference", "its error", ""),
                    long,
                    marked=[i for i, row in enumerate(ranked) if row["exceeds"]],
                ),
            ),
        ],
        data={"figures": list(figures)},
        warnings=[],
        trust=_trust(result, len(rows)),
    )


def _regimes(result: Mapping[str, Any], first: str) -> str:
    if not result.get("regimes"):
        return ""
    columns = ("run", "averaging", "selective", "frozen", f"other than in {first}")
    rows = [(name, *found.values()) for name, found in result["regimes"].items()]
    return table("regimes", columns, rows)


def _trust(result: Mapping[str, Any], rows: int) -> list[str]:
    said = [
        f"A difference is marked when it exceeds what chance explains at the level {result['level']:.0%}, shared out "
        "over all comparisons of its quantity; quantities without a standard error are never marked."
    ]
    if result["regimes"] and not result["same_model"]:
        said.append(
            "The runs probed different models, whose heads have no counterparts: means over heads are compared."
        )
    if rows > SHOWN:
        said.append(f"The table shows the {SHOWN} largest of {rows:,} differences; the CSV of the folder has all.")
    return said


def _drawn(summary: list[Mapping[str, Any]]) -> list[str]:
    """Quantities worth a picture: several places, and errors known."""
    return [row["quantity"] for row in summary if row["places"] > 5 and any(row["tested"].values())][:3]


def _scatter(figures: Figures, result: Mapping[str, Any], quantity: str) -> str:
    names = [run["name"] for run in result["runs"]]
    series = []
    for name, colour in zip(names[1:], SHADES, strict=False):
        for exceeds, label in ((False, "within errors"), (True, "exceeds its error")):
            own = [
                row
                for row in result["differences"]
                if row["quantity"] == quantity and row["run"] == name and row["exceeds"] is exceeds
            ]
            if own:
                series.append(
                    {
                        "name": f"{name}: {label}",
                        "kind": "points",
                        "colour": colour if exceeds else "grey",
                        "x": [row["first"] for row in own],
                        "y": [row["value"] for row in own],
                        "labels": [f"{row['where']}\n{_text(row['first'])} → {_text(row['value'])}" for row in own],
                    }
                )
    values = [value for entry in series for value in (*entry["x"], *entry["y"])]
    if not values:
        return ""
    log = min(values) > 0 and max(values) > 5 * min(values)
    ends = [min(values), max(values)]
    diagonal = {"name": "equal", "kind": "line", "colour": "ink", "dash": "dashed", "x": ends, "y": ends}
    x, y = f"{quantity} in {names[0]}", f"{quantity} in {names[1]}" if len(names) == 2 else f"{quantity} in the others"
    return figures.place(
        quantity.capitalize(), {"label": x, "log": log}, {"label": y, "log": log}, [diagonal, *series], height=380
    )


def _weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    if row["difference"] is None:
        return False, -1.0
    spread = row["difference_stderr"]
    return bool(row["exceeds"]), abs(row["difference"]) / spread if spread else 0.0


def _text(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return short(value)
    return "–" if value is None else str(value)
