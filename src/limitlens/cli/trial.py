"""`limitlens trial`: a plan of the cache in a live model."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Device, Every, Json, Out, Overwrite, Quiet, Resume, begin, kept, progress, show


def trial(
    context: typer.Context,
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The folder that limitlens plan --keep ... --out wrote.")],
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 24,
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help="Another text than the plan's.")] = None,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    checkpoint_every: Every = None,
    resume: Resume = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What a model predicts after its cache was cut as a plan says: divergence, agreement, likelihood.

    Example: limitlens trial runs/plan --documents 24
    """
    from limitlens.live.cache_trial import trial as run_trial

    started, checkpoint = begin(context), kept(out, checkpoint_every, resume)
    with progress("reading documents", quiet, "documents") as report:
        made = run_trial(
            plan, documents=documents, corpus=corpus, device=device, progress=report, checkpoint=checkpoint
        )
    show(context, "trial", made, started=started, out=out, json=json, quiet=quiet, checkpoint=checkpoint)
