"""`limitlens compare`: runs side by side, differences that exceed their errors marked."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from limitlens.cli.common import Json, Out, Quiet, print_json, print_table

SHOWN = 12  # of the differences that exceed their errors


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more run folders of one command.")],
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Two or more runs side by side (domains, models, temperatures), each against the first.

    Example: limitlens compare runs/docs runs/code --out runs/docs-code
    """
    from limitlens.comparison import compare as lay_side_by_side
    from limitlens.record import open_folder, provenance, write_run
    from limitlens.report.page import write_report

    started = datetime.now(UTC)
    folder = open_folder(out) if out is not None else None
    document = lay_side_by_side(runs)
    if folder is not None:
        import pandas as pd

        table = pd.DataFrame(document["differences"])
        write_run(folder, provenance("compare", dict(context.params), started), document, {"differences": table})
        write_report(folder)
    if json:
        print_json(document)
    else:
        print_comparison(document)


def print_comparison(document: dict[str, Any]) -> None:
    """The comparison as a page for people: quantity by quantity, then what differs most."""
    from limitlens.report.parts import plural, short

    names = [run["name"] for run in document["runs"]]
    rows = [
        [
            row["quantity"],
            *(short(row["medians"][name]) for name in names),
            *(f"{row['marked'][name]} of {row['tested'][name]}" if row["tested"][name] else "–" for name in names[1:]),
        ]
        for row in document["summary"]
    ]
    middle = "median" if document["same_model"] or not document["regimes"] else "mean"
    columns = ["quantity", *(f"{middle}, {name}" for name in names), *(f"differ, {name}" for name in names[1:])]
    in_common = plural(document["matched"], document["unit"])
    print_table(f"{in_common} in common, each run against {names[0]}", columns, rows)
    marked = [row for row in document["differences"] if row["exceeds"]]
    marked.sort(key=lambda row: abs(row["difference"]) / row["difference_stderr"], reverse=True)
    if not marked:
        print("No difference exceeds its error.")
        return
    rows = [
        [
            row["where"],
            row["quantity"],
            row["run"],
            f"{short(row['first'])} ± {short(row['first_stderr'], 1)}",
            f"{short(row['value'])} ± {short(row['stderr'], 1)}",
            f"{row['difference'] / row['difference_stderr']:+.1f}",
        ]
        for row in marked[:SHOWN]
    ]
    print_table(
        f"{len(marked)} differences exceed their errors; the clearest",
        ["where", "quantity", "run", names[0], "run's", "difference / error"],
        rows,
    )
