"""`limitlens compare`: runs side by side, with the differences that exceed their standard errors marked."""

from typing import Annotated

import typer

from limitlens.cli.common import Result, command


@command(page=True, computes=False)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more run folders of one command.")],
) -> Result:
    """Compare runs of one command (texts, models, settings), each with the first.

    Example: limitlens compare runs/docs runs/code --out runs/docs-code
    """
    from limitlens.comparison import compare as run

    return run(*runs)
