"""`limitlens tails`: are these tokens sub-Gaussian, and what attention does where its limit ends."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Json, Out, Overwrite, Seed, begin, show


def tails(
    context: typer.Context,
    sample: Annotated[str | None, typer.Option(metavar="FILE.npy", help="Tokens (n, dim) to judge.")] = None,
    law: Annotated[str, typer.Option(help="Without --sample: gaussian, laplace (scale 1) or student.")] = "laplace",
    tilts: Annotated[str, typer.Option(metavar="LO:HI:K", help="Tilts t of the query; scores are t x.")] = "0.4,0.75,2",
    degrees: Annotated[float, typer.Option(help="Of student: degrees of freedom.")] = 3.0,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:100000:4",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or tails.png here).")] = False,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Judge the tails of a file of tokens, or show attention over a law where its infinite-token limit ends.

    Example: limitlens tails --law laplace --tilts 0.4,0.75,2 --plot
    """
    from limitlens.experiments import heavy_tails
    from limitlens.measures.named import sample_from_file

    started = begin(context)
    tokens = None if sample is None else sample_from_file(sample)
    result = heavy_tails.tails(
        tokens, law=law, tilts=tilts, degrees=degrees, sizes=sizes, replicates=replicates, seed=seed
    )
    show(context, "tails", result, started=started, out=out, json=json, plot="tails" if plot else None)
