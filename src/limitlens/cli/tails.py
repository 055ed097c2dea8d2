"""`limitlens tails`: are these tokens sub-Gaussian, and what attention does where its limit ends."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Result, command


@command(shares="plot seed")
def tails(
    sample: Annotated[str | None, typer.Option(metavar="FILE.npy", help="Tokens (n, dim) to judge.")] = None,
    law: Annotated[str, typer.Option(help="Without --sample: gaussian, laplace (scale 1) or student.")] = "laplace",
    tilts: Annotated[str, typer.Option(metavar="LO:HI:K", help="Tilts t of the query; scores are t x.")] = "0.4,0.75,2",
    degrees: Annotated[float, typer.Option(help="Of student: degrees of freedom.")] = 3.0,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:100000:4",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    **shared: Any,
) -> Result:
    """Judge the tails of a file of tokens, or show attention over a law where its infinite-token limit ends.

    Example: limitlens tails --law laplace --tilts 0.4,0.75,2 --plot
    """
    from limitlens.experiments.heavy_tails import tails as run
    from limitlens.measures.named import sample_from_file

    tokens = None if sample is None else sample_from_file(sample)
    return run(tokens, law=law, tilts=tilts, degrees=degrees, sizes=sizes, replicates=replicates, **shared)
