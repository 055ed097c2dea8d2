"""`limitlens compare`: runs side by side, differences that exceed their errors marked."""

from typing import Annotated

import typer

from limitlens.cli.common import Result, command


@command(page=True, computes=False)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more run folders of one command.")],
) -> Result:
    """Two or more runs side by side (domains, models, temperatures), each against the first.

    Example: limitlens compare runs/docs runs/code --out runs/docs-code
    """
    from limitlens.comparison import compare as run

    return run(*runs)
