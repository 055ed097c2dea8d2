"""`limitlens plan`: KV entries per head for an error, tried on the windows that the probe reserved."""

import re
from typing import Annotated, Any

import typer

from limitlens.cli.common import Result, command, size


@command("trying the plan", shares="device", kept=True)
def plan(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that limitlens probe --out wrote.")],
    error: Annotated[float, typer.Option(help="Relative output error that each head may make.")] = 0.05,
    context: Annotated[int | None, typer.Option(help="Tokens there are; endless when left out.")] = None,
    keep: Annotated[str | None, typer.Option(metavar="CHOICE", help="Of keys: random, sinks, ..., or best.")] = None,
    total: Annotated[str | None, typer.Option(metavar="SHARE|SIZE", help="Cache to keep: 0.25, or 16MB.")] = None,
    trial: Annotated[bool, typer.Option(help="Try the budgets on the reserved windows.")] = True,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the trial; the probe's when left out.")] = None,
    **shared: Any,
) -> Result:
    """KV entries per head for an error, in tokens and as a share of the context.

    Example: limitlens plan runs/demo --error 0.05 --context 32768 --out runs/plan; with --keep best (or --total 0.25)
    keys are chosen as caches choose them, measured in windows as long as the context, and limitlens trial proves it.
    """
    from limitlens.cache.plan import plan as make

    return make(run, error, context, keep=keep, total=_total(total), trial=trial, seed=seed, **shared)


def _total(given: str | None) -> float | int | None:
    """A share of the cache, or whole bytes where a unit follows."""
    if given is not None and re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", given):
        return float(given)
    return size("--total", given, "a share such as 0.25, or a size such as 16MB")
