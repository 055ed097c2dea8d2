"""`limitlens hardmax`: the hardmax law, measured and predicted, and the way to it from softmax."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Every, Json, Out, Overwrite, Quiet, Resume, Seed, Yes, begin, kept, progress, show


def hardmax(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:1000000:9",
    measure: Annotated[str, typer.Option(help="gaussian, mixture, sphere, vmf, ball or cube.")] = "gaussian",
    dim: Annotated[int, typer.Option(help="Dimension of the tokens; a formula is known for gaussian, 1.")] = 1,
    horizons: Annotated[str, typer.Option(metavar="LO:HI:K", help="Of softmax beside it (gaussian, dim 1).")] = "0.5",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 400,
    queries: Annotated[int, typer.Option(help="Queries per sample, except for gaussian, dim 1.")] = 2048,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or hardmax.png here).")] = False,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    yes: Yes = False,
    checkpoint_every: Every = None,
    resume: Resume = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """E|mean output| with softmax replaced by argmax, and which law it follows: power or logarithm.

    Example: limitlens hardmax --sizes 100:1000000:9 --horizons 0.5:16:6 --plot
    """
    from limitlens.experiments import hardmax as experiment

    started, checkpoint = begin(context), kept(out, checkpoint_every, resume)
    with progress("attending", quiet) as report:
        result = experiment.hardmax(
            sizes, measure=measure, dim=dim, horizons=horizons, replicates=replicates, queries=queries, seed=seed,
            yes=yes, progress=report, checkpoint=checkpoint,
        )  # fmt: skip
    show(
        context, "hardmax", result, started=started, out=out, json=json, quiet=quiet,
        plot="hardmax" if plot else None, checkpoint=checkpoint,
    )  # fmt: skip
