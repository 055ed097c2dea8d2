"""`limitlens study`: error curves of attention over tokens of a law, or of a file of tokens, and their rates."""

from typing import Annotated, Any

import typer

from limitlens.cli import common

LAW_OPTIONS = ("measure", "dim", "concentration", "components", "separation")  # that contradict --sample

RADIUS = "Measure the uniform error over |x| <= R; a range scales compact tokens to each R."


@common.command("attending", shares="plot seed device precision memory ray yes", kept=True)
def study(
    call: typer.Context,
    measure: common.Law = "gaussian",
    sample: Annotated[
        str | None, typer.Option(metavar="FILE.npy", help="File of tokens (n, dim), instead of a law.")
    ] = None,
    dim: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 1,
    horizon: Annotated[float, typer.Option(help="Two-sided horizon H of the head.")] = 1.0,
    horizons: Annotated[
        str | None, typer.Option(metavar="LO:HI:K", help="Sweep the horizon over these values.")
    ] = None,
    spectrum: Annotated[str, typer.Option(help="Spectrum of the head: flat, 1/k or dim numbers a,b,c.")] = "flat",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "1000:30000:12",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    queries: Annotated[int | None, typer.Option(help="Queries per sample; by default a pilot chooses.")] = None,
    mask_self: Annotated[
        bool, typer.Option("--mask-self", help="Leave each query's own token out of its softmax.")
    ] = False,
    radius: Annotated[str | None, typer.Option(metavar="R or LO:HI:K", help=RADIUS)] = None,
    concentration: Annotated[float, typer.Option(help="vmf: concentration.")] = 5.0,
    components: Annotated[int, typer.Option(help="mixture: number of components.")] = 2,
    separation: Annotated[float, typer.Option(help="mixture: means lie between plus and minus this.")] = 2.0,
    **shared: Any,
) -> common.Result:
    """Measure the error of attention over n tokens against its infinite-token limit, and its rate.

    Example: limitlens study --measure gaussian --dim 1 --horizon 1.5 --sizes 1000:100000:9 --replicates 400
    """
    from limitlens.attention.design import designed_head
    from limitlens.errors import InputError
    from limitlens.experiments.study import study as run
    from limitlens.experiments.sweeps import sweep
    from limitlens.measures.named import named_measure, sample_from_file
    from limitlens.sampling.cells import parse_grid

    if sample is not None and (name := common.first_given(call, LAW_OPTIONS)) is not None:
        raise InputError(
            f"both --sample and {name} were given; expected --sample alone, since its tokens replace the law"
        )
    named: dict[str, Any] = {"concentration": concentration, "components": components, "separation": separation}
    law = named_measure(measure, dim, **named) if sample is None else sample_from_file(sample)
    shape = common.spectrum_of(spectrum)
    radii = parse_grid(radius, "the radius") if radius is not None else []
    if horizons is not None and len(radii) > 1:
        raise InputError("both --horizons and a range of --radius were given; expected one sweep at a time")
    shared |= {"sizes": sizes, "replicates": replicates, "queries": queries, "mask_self": mask_self}
    if len(radii) > 1:
        return sweep(law, radii=radii, horizon=horizon, spectrum=shape, **shared)
    shared["radius"] = radii[0] if radii else None
    if horizons is not None:
        return sweep(law, horizons=parse_grid(horizons, "horizons"), spectrum=shape, **shared)
    return run(law, designed_head(law.covariance, horizon, spectrum=shape, seed=shared["seed"]), **shared)
