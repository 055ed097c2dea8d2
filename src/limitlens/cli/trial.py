"""`limitlens trial`: a plan of the cache in a live model."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Result, command


@command("reading documents", "documents", shares="device", kept=True)
def trial(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The folder that limitlens plan --keep ... --out wrote.")],
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 24,
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help="Another text than the plan's.")] = None,
    **shared: Any,
) -> Result:
    """What a model predicts after its cache was cut as a plan says: divergence, agreement, likelihood.

    Example: limitlens trial runs/plan --documents 24
    """
    from limitlens.live.cache_trial import trial as run

    return run(plan, documents=documents, corpus=corpus, **shared)
