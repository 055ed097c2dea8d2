"""Commands on attention over random tokens: theory, study, hardmax, tails, scaling, schedules and heat-flow."""

from typing import Annotated, Any

from typer import Context, Option

from limitlens.cli.common import Replicates, Result, Sizes, command, spectrum_of
from limitlens.cli.matrices import Covariance, Matrix, Mean, Value, head_of, law_of, matrix_of
from limitlens.errors import InputError

Law = Annotated[str, Option("--measure", help="Law of the tokens: gaussian, mixture, sphere, vmf, ball or cube.")]
Dim = Annotated[int, Option(help="Dimension of the tokens.")]
Horizon = Annotated[float, Option(help="Two-sided horizon H of the head.")]
Spectrum = Annotated[str, Option(help="Singular values of the head: flat, 1/k or dim numbers a,b,c.")]
MaskSelf = Annotated[bool, Option("--mask-self", help="Leave each query's own token out of its softmax.")]
Concentration = Annotated[float, Option(help="vmf: concentration.")]
Components = Annotated[int, Option(help="mixture: number of components.")]
Separation = Annotated[float, Option(help="mixture: means lie between plus and minus this.")]
Radius = Annotated[str | None, Option(metavar="R|LO:HI:K", help="Error over |x| <= R; a range sweeps compact laws.")]
Tokens = Annotated[str | None, Option(metavar="FILE.npy", help="File of tokens (n, dim), instead of a law.")]


@command(shares="seed")
def theory(
    call: Context,
    measure: Law = "gaussian",
    dim: Dim = 1,
    mean: Mean = None,
    covariance: Covariance = None,
    matrix: Matrix = None,
    value: Value = None,
    horizon: Horizon = 1.0,
    spectrum: Spectrum = "flat",
    n: Annotated[float, Option(help="Number of tokens; 1e9 is fine.")] = 10_000,
    sizes: Annotated[str | None, Option(metavar="LO:HI:K", help="Sizes of the predicted error curve.")] = None,
    radius: Annotated[float | None, Option(help="Ball of the uniform bound; default: a typical token.")] = None,
    error: Annotated[float, Option(help="Relative error whose probability is bounded.")] = 0.1,
    mask_self: MaskSelf = False,
    concentration: Concentration = 5.0,
    components: Components = 2,
    separation: Separation = 2.0,
    seed: int = 0,
) -> Result:
    """Predict error, rate and bounds of attention over n tokens, each marked as proved, verified or heuristic.

    Example: limitlens theory --measure gaussian --dim 1 --horizon 1.5 --n 30000
    """
    from limitlens.experiments.theory_result import theory_report
    from limitlens.sampling.cells import parse_sizes

    named: dict[str, Any] = {"concentration": concentration, "components": components, "separation": separation}
    law = law_of(call, measure, dim, mean=mean, covariance=covariance, matrix=matrix, **named)
    head = head_of(call, law, matrix, value, horizon=horizon, spectrum=spectrum, seed=seed)
    counts = None if sizes is None else parse_sizes(sizes)
    return theory_report(law, head, n, sizes=counts, radius=radius, error=error, mask_self=mask_self)


@command("attending", shares="plot seed device precision memory yes", kept=True)
def study(
    call: Context,
    measure: Law = "gaussian",
    sample: Tokens = None,
    dim: Dim = 1,
    mean: Mean = None,
    covariance: Covariance = None,
    matrix: Matrix = None,
    value: Value = None,
    horizon: Horizon = 1.0,
    horizons: Annotated[str | None, Option(metavar="LO:HI:K", help="Sweep the horizon over these values.")] = None,
    spectrum: Spectrum = "flat",
    sizes: Sizes = "1000:30000:12",
    replicates: Replicates = 200,
    queries: Annotated[int | None, Option(help="Queries per sample; by default a pilot chooses.")] = None,
    mask_self: MaskSelf = False,
    radius: Radius = None,
    concentration: Concentration = 5.0,
    components: Components = 2,
    separation: Separation = 2.0,
    **shared: Any,
) -> Result:
    """Measure the error of attention over n tokens against its infinite-token limit, and its rate.

    Example: limitlens study --measure gaussian --dim 1 --horizon 1.5 --sizes 1000:100000:9 --replicates 400
    """
    from limitlens.experiments.study import study as run
    from limitlens.experiments.sweeps import sweep
    from limitlens.sampling.cells import parse_grid

    named: dict[str, Any] = {"concentration": concentration, "components": components, "separation": separation}
    law = law_of(call, measure, dim, mean=mean, covariance=covariance, matrix=matrix, sample=sample, **named)
    shape = spectrum_of(spectrum)
    radii = parse_grid(radius, "the radius") if radius is not None else []
    if horizons is not None and len(radii) > 1:
        raise InputError("both --horizons and a range of --radius were given; expected one sweep at a time")
    given = "--matrix" if matrix is not None else "--value"
    if (matrix, value) != (None, None) and (horizons is not None or len(radii) > 1):
        raise InputError(f"{given} was given with a sweep; expected --horizon, since a sweep designs its heads")
    shared |= {"sizes": sizes, "replicates": replicates, "queries": queries, "mask_self": mask_self}
    if len(radii) > 1:
        return sweep(law, radii=radii, horizon=horizon, spectrum=shape, **shared)
    shared["radius"] = radii[0] if radii else None
    if horizons is not None:
        return sweep(law, horizons=parse_grid(horizons, "horizons"), spectrum=shape, **shared)
    head = head_of(call, law, matrix, value, horizon=horizon, spectrum=spectrum, seed=shared["seed"])
    return run(law, head, **shared)


@command("attending", shares="plot seed yes", kept=True)
def hardmax(
    call: Context,
    sizes: Sizes = "100:1000000:9",
    measure: Law = "gaussian",
    dim: Annotated[int, Option(help="Dimension of the tokens; theory is known for gaussian, 1.")] = 1,
    mean: Mean = None,
    covariance: Covariance = None,
    matrix: Matrix = None,
    horizons: Annotated[str, Option(metavar="LO:HI:K", help="Horizons of softmax curves (gaussian, dim 1).")] = "0.5",
    replicates: Replicates = 400,
    queries: Annotated[int, Option(help="Queries per sample (not for gaussian, dim 1).")] = 2048,
    **shared: Any,
) -> Result:
    """Measure the scatter of the mean output over n tokens with argmax for softmax: is it a power of n or of log n?

    Example: limitlens hardmax --sizes 100:1000000:9 --horizons 0.5:16:6 --plot
    """
    from limitlens.experiments.hardmax import hardmax as run

    shared |= {"horizons": horizons, "replicates": replicates, "queries": queries}
    if (mean, covariance, matrix) == (None, None, None):
        return run(sizes, measure=measure, dim=dim, **shared)
    law = law_of(call, measure, dim, mean=mean, covariance=covariance, matrix=matrix)
    seed = shared["seed"]
    head = None if matrix is None else head_of(call, law, matrix, None, horizon=1.0, spectrum="flat", seed=seed)
    return run(sizes, measure=law, head=head, **shared)


@command(shares="plot seed")
def tails(
    sample: Tokens = None,
    law: Annotated[str, Option(help="Instead of --sample: gaussian, laplace (scale 1) or student.")] = "laplace",
    tilts: Annotated[str, Option(metavar="LO:HI:K", help="Tilts t of the query; scores are t x.")] = "0.4,0.75,2",
    degrees: Annotated[float, Option(help="student: degrees of freedom.")] = 3.0,
    sizes: Sizes = "100:100000:4",
    replicates: Replicates = 200,
    **shared: Any,
) -> Result:
    """Test whether the tokens of a file are sub-Gaussian, or show attention whose infinite-token limit may not exist.

    Example: limitlens tails --law laplace --tilts 0.4,0.75,2 --plot
    """
    from limitlens.experiments.heavy_tails import tails as run
    from limitlens.measures.named import sample_from_file

    tokens = None if sample is None else sample_from_file(sample)
    return run(tokens, law=law, tilts=tilts, degrees=degrees, sizes=sizes, replicates=replicates, **shared)


def key_law(
    dim: Annotated[int, Option(help="The keys lie on the sphere S^(dim-1).")] = 5,
    theta: Annotated[float | None, Option(help="Effective number of keys; 1 is the critical scale.")] = None,
    beta: Annotated[float | None, Option(help="Inverse temperature, instead of --theta.")] = None,
    law: Annotated[str, Option(help="Law of the keys: uniform, vmf or power.")] = "uniform",
    concentration: Concentration = 5.0,
    cosine: Annotated[float, Option(help="vmf: cosine between mean direction and query.")] = 1.0,
    power: Annotated[float, Option(help="power: density near the query q is like |q - k|^power.")] = 1.0,
) -> None:
    """Options of `scaling` and `schedules`: the law of the keys and the temperature."""


@command(shares="plot seed yes", also=key_law)
def scaling(
    n: Annotated[float, Option(help="Number of keys; 1e10 is fine.")] = 10_000,
    replicates: Replicates = 2000,
    value: Value = None,
    **shared: Any,
) -> Result:
    """Predict and measure whether attention over n keys averages, selects a few keys or collapses onto one.

    Example: limitlens scaling --dim 5 --n 10000 --theta 1 --plot
    """
    from limitlens.experiments.scaling import scaling as run

    matrix = None if value is None else matrix_of("--value", value, shared["dim"])
    return run(n=n, replicates=replicates, value=matrix, **shared)


@command(runs="experiments.schedules", shares="plot", also=key_law)
def schedules(sizes: Annotated[str, Option(metavar="LO:HI:K", help="Context lengths.")] = "4096:1048576:5") -> None:
    """Compare schedules of the inverse temperature β as the context grows: constant, ln n, YaRN and critical.

    Example: limitlens schedules --sizes 4096:1e6:4 --dim 9
    """


@command(runs="experiments.heat_flow", shares="plot seed yes")
def heat_flow(
    dim: Annotated[int, Option(help="The density and the tokens lie on the sphere S^(dim-1).")] = 2,
    beta: Annotated[float, Option(help="Inverse temperature.")] = 2000.0,
    layers: Annotated[int, Option(help="Number of layers of attention.")] = 400,
    amplitude: Annotated[float, Option(help="The initial density is 1 + amplitude cos.")] = 0.5,
    n: Annotated[float, Option(help="Number of tokens.")] = 10_000,
) -> None:
    """Compare layers of attention with the backward heat equation, on a density and on n tokens.

    Example: limitlens heat-flow --dim 2 --beta 2000 --layers 400 --plot
    """
