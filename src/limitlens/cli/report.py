"""`limitlens report`: the one-file HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from limitlens.cli.common import Json, Quiet, print_json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="RUN/report.html when left out.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the results of a run as one HTML file that needs no network.

    Example: limitlens report runs/demo
    """
    from limitlens.loading import load

    folder = Path(run).parent if Path(run).name == "run.json" else Path(run)
    path = load(folder).report(folder / "report.html" if out is None else out)
    size = path.stat().st_size
    if json:
        print_json({"run": run, "report": str(path), "bytes": size})
    elif not quiet:
        print(f"{path} ({size / 1000:,.0f} kB)")
