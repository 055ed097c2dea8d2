"""`limitlens report`: the one-file HTML page of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Json, Quiet, print_json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Where to write it; RUN/report.html when left out.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One HTML file with everything a run found: opens anywhere, without a network, and can be mailed.

    Example: limitlens report runs/demo
    """
    from limitlens.report.page import write_report

    path = write_report(run, out)
    size = path.stat().st_size
    if json:
        print_json({"run": run, "report": str(path), "bytes": size})
    elif not quiet:
        print(f"{path} ({size / 1000:,.0f} kB)")
