"""`limitlens compare`: runs side by side, differences that exceed their errors marked."""

from typing import Annotated

import typer

from limitlens.cli.common import Json, Out, Overwrite, Quiet, begin, show


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more run folders of one command.")],
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Two or more runs side by side (domains, models, temperatures), each against the first.

    Example: limitlens compare runs/docs runs/code --out runs/docs-code
    """
    from limitlens import comparison, loading

    started = begin(context, "compare")
    show(context, "compare", comparison.compare(*runs), started)
    if out is not None:
        loading.load(out).report(out)
