"""`limitlens study`: error curves of a synthetic law, or of anybody's tokens, and their rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli import common

if TYPE_CHECKING:
    from limitlens.experiments.study_result import Curve
    from limitlens.experiments.sweeps import HorizonSweep, RadiusSweep

OF_A_LAW = ("measure", "dim", "concentration", "components", "separation")  # options that a sample has no use for

RADIUS = "Uniform error over |x| <= R; a range scales compact tokens to each R."


def study(
    context: typer.Context,
    measure: Annotated[str, typer.Option(help="gaussian, mixture, sphere, vmf, ball or cube.")] = "gaussian",
    sample: Annotated[str | None, typer.Option(metavar="FILE.npy", help="Tokens (n, dim) instead of a law.")] = None,
    dim: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 1,
    horizon: Annotated[float, typer.Option(help="Two-sided horizon H of the head.")] = 1.0,
    horizons: Annotated[str | None, typer.Option(metavar="LO:HI:K", help="A sweep of the horizon.")] = None,
    spectrum: Annotated[str, typer.Option(help="flat, 1/k or dim comma-separated numbers.")] = "flat",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "1000:30000:12",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    queries: Annotated[int | None, typer.Option(help="Queries per sample; chosen by a pilot when left out.")] = None,
    mask_self: Annotated[bool, typer.Option("--mask-self", help="Leave a query's own token out.")] = False,
    radius: Annotated[str | None, typer.Option(metavar="R or LO:HI:K", help=RADIUS)] = None,
    concentration: Annotated[float, typer.Option(help="Of vmf.")] = 5.0,
    components: Annotated[int, typer.Option(help="Of mixture.")] = 2,
    separation: Annotated[float, typer.Option(help="Of mixture: its means lie between plus and minus this.")] = 2.0,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or study.png here).")] = False,
    seed: common.Seed = 0,
    device: common.Device = "auto",
    precision: common.Precision = "accurate",
    memory: common.Memory = None,
    ray: common.Ray = None,
    out: common.Out = None,
    overwrite: common.Overwrite = False,
    yes: common.Yes = False,
    checkpoint_every: common.Every = None,
    resume: common.Resume = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Error curves of attention over n tokens and their rates, against theory.

    Example: limitlens study --measure gaussian --dim 1 --horizon 1.5 --sizes 1000:100000:9 --replicates 400
    """
    from limitlens.attention.design import designed_head
    from limitlens.errors import InputError
    from limitlens.experiments.study import study as run_study
    from limitlens.experiments.sweeps import sweep
    from limitlens.measures.base import Measure
    from limitlens.measures.named import named_measure, sample_from_file
    from limitlens.sampling.cells import parse_grid

    law: Measure
    if sample is not None:
        for name in OF_A_LAW:
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                raise InputError(f"both --sample and --{name} were given; expected --sample alone, which is the law")
        law = sample_from_file(sample)
    else:
        law = named_measure(measure, dim, concentration=concentration, components=components, separation=separation)
    shape: Any = spectrum
    if spectrum not in ("flat", "1/k"):
        shape = parse_grid(spectrum, "the spectrum, where neither flat nor 1/k,")
    radii = parse_grid(radius, "the radius") if radius is not None else []
    if horizons is not None and len(radii) > 1:
        raise InputError("both --horizons and a range of --radius were given; expected one sweep at a time")
    started, checkpoint = common.begin(context), common.kept(out, checkpoint_every, resume)
    options: dict[str, Any] = {"sizes": sizes, "replicates": replicates, "queries": queries, "mask_self": mask_self}
    options |= {
        "seed": seed,
        "device": device,
        "precision": precision,
        "ray": ray,
        "yes": yes,
        "checkpoint": checkpoint,
    }
    options |= {"memory": common.size("--memory", memory), "radius": radii[0] if len(radii) == 1 else None}
    result: Curve | HorizonSweep | RadiusSweep
    with common.progress("attending", quiet) as options["progress"]:
        if horizons is not None:
            result = sweep(law, horizons=parse_grid(horizons, "horizons"), spectrum=shape, **options)
        elif len(radii) > 1:
            result = sweep(law, radii=radii, horizon=horizon, spectrum=shape, **options)
        else:
            result = run_study(law, designed_head(law.covariance, horizon, spectrum=shape, seed=seed), **options)
    drawn = "study" if plot else None
    common.show(
        context, "study", result, started=started, out=out, json=json, quiet=quiet, plot=drawn, checkpoint=checkpoint
    )
