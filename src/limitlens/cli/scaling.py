"""`limitlens scaling`: whether attention over n keys averages, selects or collapses, predicted and measured."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Device, Result, command, warn


@command(shares="plot seed yes")
def scaling(
    call: typer.Context,
    dim: Annotated[int | None, typer.Option(help="Of the sphere S^(dim-1) of keys; 5, or 2 with --heat.")] = None,
    n: Annotated[float, typer.Option(help="Number of keys; 1e10 is fine.")] = 10_000,
    theta: Annotated[float | None, typer.Option(help="Effective number of keys; 1 is the critical scale.")] = None,
    beta: Annotated[float | None, typer.Option(help="Inverse temperature, instead of --theta.")] = None,
    law: Annotated[str, typer.Option(help="uniform, vmf, subsphere or power.")] = "uniform",
    concentration: Annotated[float, typer.Option(help="Of vmf.")] = 5.0,
    cosine: Annotated[float, typer.Option(help="Of vmf: between its mean direction and the query.")] = 1.0,
    sub: Annotated[int, typer.Option(help="Of subsphere: its own dimension.")] = 2,
    power: Annotated[float, typer.Option(help="Of power: the density at the query is like |q - k|^power.")] = 1.0,
    keys: Annotated[str | None, typer.Option(metavar="FILE.npy", help="Real keys (n, dim) instead of a law.")] = None,
    queries: Annotated[str | None, typer.Option(metavar="FILE.npy", help="With --keys: queries (q, dim).")] = None,
    neighbours: Annotated[int | None, typer.Option(help="With --keys: nearest ones to fit; about sqrt(n).")] = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="With --keys: project onto the sphere.")] = False,
    schedules: Annotated[str | None, typer.Option(metavar="LO:HI:K", help="Schedules of β as a context grows.")] = None,
    heat: Annotated[bool, typer.Option("--heat", help="The backward heat flow of a density through layers.")] = False,
    layers: Annotated[int, typer.Option(help="Of --heat.")] = 400,
    amplitude: Annotated[float, typer.Option(help="Of --heat: the density is 1 + amplitude cos.")] = 0.5,
    replicates: Annotated[int, typer.Option(help="Independent sets of keys behind every measurement.")] = 2000,
    device: Device = "auto",
    **shared: Any,
) -> Result:
    """Does attention over n keys average, select a handful or collapse onto one? Predicted beside measured.

    Example: limitlens scaling --dim 5 --n 10000 --theta 1 --plot
    """
    from limitlens.experiments.scaling import scaling as run

    if device not in ("auto", "cpu"):
        told = f"--device {device} was ignored: scaling draws the nearest keys only, and runs on the CPU"
        warn([told], call.params["quiet"])
    return run(
        dim=dim, n=n, theta=theta, beta=beta, law=law, concentration=concentration, cosine=cosine, sub=sub, power=power,
        keys=keys, queries=queries, neighbours=neighbours, normalise=normalise, schedules=schedules, heat=heat,
        layers=layers, amplitude=amplitude, replicates=replicates, **shared,
    )  # fmt: skip
