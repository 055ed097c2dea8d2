"""`limitlens trial`: a cache plan in a live model."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("reading documents", "documents", runs="cache.trial", shares="device", kept=True)
def trial(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Folder that limitlens plan --out wrote.")],
    documents: Annotated[int, typer.Option(min=2, help="Documents to read.")] = 24,
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help="Another text than that of the plan.")] = None,
) -> None:
    """Measure a model's predictions with the cache of a plan: KL, agreement and likelihood, against baselines.

    Example: limitlens trial runs/plan --documents 24
    """
