"""`limitlens hardmax`: the error of hardmax attention, measured and predicted, with softmax for comparison."""

from typing import Annotated

import typer

from limitlens.cli.common import Law, command


@command("attending", runs="experiments.hardmax", shares="plot seed yes", kept=True)
def hardmax(
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:1000000:9",
    measure: Law = "gaussian",
    dim: Annotated[int, typer.Option(help="Dimension of the tokens; theory is known for gaussian, 1.")] = 1,
    horizons: Annotated[
        str, typer.Option(metavar="LO:HI:K", help="Horizons of softmax curves (gaussian, dim 1).")
    ] = "0.5",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 400,
    queries: Annotated[int, typer.Option(help="Queries per sample (not for gaussian, dim 1).")] = 2048,
) -> None:
    """Measure E|mean output| with softmax replaced by argmax: does it follow a power law or a logarithm?

    Example: limitlens hardmax --sizes 100:1000000:9 --horizons 0.5:16:6 --plot
    """
