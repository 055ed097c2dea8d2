"""`limitlens schedules`: how the inverse temperature should grow with the context length."""

from typing import Annotated

import typer

from limitlens.cli import scaling as key
from limitlens.cli.common import command


@command(runs="experiments.schedules", shares="plot yes")
def schedules(
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Context lengths.")] = "4096:1048576:5",
    theta: key.Theta = None,
    beta: key.Beta = None,
    dim: key.Dim = 5,
    law: key.KeyLaw = "uniform",
    concentration: key.Concentration = 5.0,
    cosine: key.Cosine = 1.0,
    sub: key.Sub = 2,
    power: key.Power = 1.0,
    keys: key.Keys = None,
    queries: key.Queries = None,
    neighbours: key.Neighbours = None,
    normalise: key.Normalise = False,
) -> None:
    """Compare schedules of the inverse temperature β as the context grows: constant, ln n, YaRN and critical.

    Example: limitlens schedules --sizes 4096:1e6:4 --dim 9
    """
