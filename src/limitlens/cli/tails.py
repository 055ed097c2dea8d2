"""`limitlens tails`: are tokens sub-Gaussian, and how does attention behave where its limit does not exist?"""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Result, command


@command(shares="plot seed")
def tails(
    sample: Annotated[str | None, typer.Option(metavar="FILE.npy", help="File of tokens (n, dim) to test.")] = None,
    law: Annotated[str, typer.Option(help="Instead of --sample: gaussian, laplace (scale 1) or student.")] = "laplace",
    tilts: Annotated[str, typer.Option(metavar="LO:HI:K", help="Tilts t of the query; scores are t x.")] = "0.4,0.75,2",
    degrees: Annotated[float, typer.Option(help="student: degrees of freedom.")] = 3.0,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:100000:4",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    **shared: Any,
) -> Result:
    """Test whether tokens are sub-Gaussian, or show attention over a law whose infinite-token limit may not exist.

    Example: limitlens tails --law laplace --tilts 0.4,0.75,2 --plot
    """
    from limitlens.experiments.heavy_tails import tails as run
    from limitlens.measures.named import sample_from_file

    tokens = None if sample is None else sample_from_file(sample)
    return run(tokens, law=law, tilts=tilts, degrees=degrees, sizes=sizes, replicates=replicates, **shared)
