"""`limitlens trial`: a plan of the cache in a live model."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("reading documents", "documents", runs="cache.trial", shares="device", kept=True)
def trial(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The folder that limitlens plan --keep ... --out wrote.")],
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 24,
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help="Another text than the plan's.")] = None,
) -> None:
    """What a model predicts after its cache was cut as a plan says: divergence, agreement, likelihood.

    Example: limitlens trial runs/plan --documents 24
    """
