"""`limitlens plan`: KV entries per head for an error, tried on the windows that the probe reserved."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from limitlens.cli.common import Device, Every, Json, Out, Overwrite, Quiet, Resume, begin, kept, progress, show, size


def plan(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that limitlens probe --out wrote.")],
    error: Annotated[float, typer.Option(help="Relative output error that each head may make.")] = 0.05,
    length: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", help="Tokens in the context; endless when left out.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="CHOICE", help="How keys are chosen: random, sinks, expected, ..., or best.")
    ] = None,
    total: Annotated[
        str | None, typer.Option(metavar="SHARE|SIZE", help="Cache to keep, in place of an error: 0.25, or 16MB.")
    ] = None,
    trial: Annotated[bool, typer.Option(help="Try the budgets on the reserved windows.")] = True,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the trial's draws; the probe's when left out.")
    ] = None,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    checkpoint_every: Every = None,
    resume: Resume = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """KV entries per head for an error, in tokens and as a share of the context.

    Example: limitlens plan runs/demo --error 0.05 --context 32768 --out runs/plan; with --keep best (or --total 0.25)
    keys are chosen as caches choose them, measured in windows as long as the context, and limitlens trial proves it.
    """
    from limitlens.budgets.plan import plan as make_plan

    started, checkpoint = begin(context), kept(out, checkpoint_every, resume)
    with progress("trying the plan", quiet) as report:
        made = make_plan(
            run, error, length, keep=keep, total=_total(total), trial=trial, device=device, seed=seed,
            progress=report, checkpoint=checkpoint,
        )  # fmt: skip
    show(context, "plan", made, started=started, out=out, json=json, quiet=quiet, checkpoint=checkpoint)


def _total(given: str | None) -> float | int | None:
    """A share of the cache, or whole bytes where a unit follows."""
    if given is not None and re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", given):
        return float(given)
    return size("--total", given, "a share such as 0.25, or a size such as 16MB")
