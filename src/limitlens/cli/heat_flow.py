"""`limitlens heat-flow`: layers of attention against the backward heat equation."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command(runs="experiments.heat_flow", shares="plot seed yes")
def heat_flow(
    dim: Annotated[int, typer.Option(help="The density and the tokens lie on the sphere S^(dim-1).")] = 2,
    beta: Annotated[float, typer.Option(help="Inverse temperature.")] = 2000.0,
    layers: Annotated[int, typer.Option(help="Number of layers of attention.")] = 400,
    amplitude: Annotated[float, typer.Option(help="The initial density is 1 + amplitude cos.")] = 0.5,
    n: Annotated[float, typer.Option(help="Number of tokens.")] = 10_000,
) -> None:
    """Compare layers of attention with the backward heat equation, on a density and on n tokens.

    Example: limitlens heat-flow --dim 2 --beta 2000 --layers 400 --plot
    """
