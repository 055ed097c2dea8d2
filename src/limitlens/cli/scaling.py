"""`limitlens scaling`: does attention over n keys average, select or collapse? Predicted and measured."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Device, Result, command, warn

Dim = Annotated[int, typer.Option(help="The keys lie on the sphere S^(dim-1).")]
Theta = Annotated[float | None, typer.Option(help="Effective number of keys; 1 is the critical scale.")]
Beta = Annotated[float | None, typer.Option(help="Inverse temperature, instead of --theta.")]
KeyLaw = Annotated[str, typer.Option(help="Law of the keys: uniform, vmf, subsphere or power.")]
Concentration = Annotated[float, typer.Option(help="vmf: concentration.")]
Cosine = Annotated[float, typer.Option(help="vmf: cosine between mean direction and query.")]
Sub = Annotated[int, typer.Option(help="subsphere: its dimension.")]
Power = Annotated[float, typer.Option(help="power: density near the query is like |q - k|^power.")]
Keys = Annotated[str | None, typer.Option(metavar="FILE.npy", help="Real keys (n, dim) instead of a law.")]
Queries = Annotated[str | None, typer.Option(metavar="FILE.npy", help="Queries (q, dim) for --keys.")]
Neighbours = Annotated[int | None, typer.Option(help="Nearest keys used per query of --keys; about sqrt(n).")]
Normalise = Annotated[bool, typer.Option("--normalise", help="Project --keys and --queries onto the sphere.")]


@command(shares="plot seed yes")
def scaling(
    call: typer.Context,
    dim: Dim = 5,
    n: Annotated[float, typer.Option(help="Number of keys; 1e10 is fine.")] = 10_000,
    theta: Theta = None,
    beta: Beta = None,
    law: KeyLaw = "uniform",
    concentration: Concentration = 5.0,
    cosine: Cosine = 1.0,
    sub: Sub = 2,
    power: Power = 1.0,
    keys: Keys = None,
    queries: Queries = None,
    neighbours: Neighbours = None,
    normalise: Normalise = False,
    replicates: Annotated[int, typer.Option(help="Independent sets of keys behind every measurement.")] = 2000,
    device: Device = "auto",
    **shared: Any,
) -> Result:
    """Predict and measure whether attention over n keys averages, selects a few keys or collapses onto one.

    Example: limitlens scaling --dim 5 --n 10000 --theta 1 --plot
    """
    from limitlens.experiments.scaling import scaling as run

    if device not in ("auto", "cpu"):
        warning = f"--device {device} was ignored: scaling draws the nearest keys only, and runs on the CPU"
        warn([warning], call.params["quiet"])
    return run(
        dim=dim, n=n, theta=theta, beta=beta, law=law, concentration=concentration, cosine=cosine, sub=sub, power=power,
        keys=keys, queries=queries, neighbours=neighbours, normalise=normalise, replicates=replicates, **shared,
    )  # fmt: skip
