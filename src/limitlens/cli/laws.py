"""Commands on attention over random tokens: theory, study, hardmax, tails, scaling, schedules and heat-flow."""

from inspect import signature
from typing import Annotated, Any

from typer import Context, Option

from limitlens.cli.common import Replicates, Result, Sizes, command, spectrum_of
from limitlens.cli.matrices import Covariance, Matrix, Mean, Value, head_of, law_of, matrix_of
from limitlens.errors import InputError

Law = Annotated[str, Option("--measure", help="Law of the tokens: gaussian, mixture, sphere, vmf, ball or cube.")]
Dim = Annotated[int, Option(help="Dimension of the tokens.")]
Concentration = Annotated[float, Option(help="vmf: concentration.")]
Radius = Annotated[str | None, Option(metavar="R|LO:HI:K", help="Error over |x| <= R; a range sweeps compact laws.")]
Tokens = Annotated[str | None, Option(metavar="FILE.npy", help="File of tokens (n, dim), instead of a law.")]


def tokens_and_head(
    measure: Law = "gaussian",
    dim: Dim = 1,
    mean: Mean = None,
    covariance: Covariance = None,
    matrix: Matrix = None,
    value: Value = None,
    horizon: Annotated[float, Option(help="Two-sided horizon H of the head.")] = 1.0,
    spectrum: Annotated[str, Option(help="Singular values of the head: flat, 1/k or dim numbers a,b,c.")] = "flat",
    mask_self: Annotated[bool, Option("--mask-self", help="Leave each query's own token out of its softmax.")] = False,
    concentration: Concentration = 5.0,
    components: Annotated[int, Option(help="mixture: number of components.")] = 2,
    separation: Annotated[float, Option(help="mixture: means lie between plus and minus this.")] = 2.0,
) -> None:
    """Options of `theory` and `study`: the law of the tokens, and the head."""


@command(shares="seed", also=tokens_and_head)
def theory(
    call: Context,
    n: Annotated[float, Option(help="Number of tokens; 1e9 is fine.")] = 10_000,
    sizes: Annotated[str | None, Option(metavar="LO:HI:K", help="Sizes of the predicted error curve.")] = None,
    radius: Annotated[float | None, Option(help="Ball of the uniform bound; default: a typical token.")] = None,
    error: Annotated[float, Option(help="Relative error whose probability is bounded.")] = 0.1,
    **about: Any,
) -> Result:
    """Predict error, rate and bounds of attention over n tokens, each marked as proved, verified or heuristic.

    Example: limitlens theory --measure gaussian --dim 1 --horizon 1.5 --n 30000
    """
    from limitlens.experiments.theory_result import theory_report
    from limitlens.sampling.cells import parse_sizes

    law = law_of(call, **about)
    counts = None if sizes is None else parse_sizes(sizes)
    options = {"sizes": counts, "radius": radius, "error": error, "mask_self": about["mask_self"]}
    return theory_report(law, head_of(call, law, **about), n, **options)


@command("attending", shares="plot seed device precision memory yes", kept=True, also=tokens_and_head)
def study(
    call: Context,
    sample: Tokens = None,
    horizons: Annotated[str | None, Option(metavar="LO:HI:K", help="Sweep the horizon over these values.")] = None,
    sizes: Sizes = "1000:30000:12",
    replicates: Replicates = 200,
    queries: Annotated[int | None, Option(help="Queries per sample; by default a pilot chooses.")] = None,
    radius: Radius = None,
    **shared: Any,
) -> Result:
    """Measure the error of attention over n tokens against its infinite-token limit, and its rate.

    Example: limitlens study --measure gaussian --dim 1 --horizon 1.5 --sizes 1000:100000:9 --replicates 400
    """
    from limitlens.experiments.study import study as run
    from limitlens.experiments.sweeps import sweep
    from limitlens.sampling.cells import parse_grid

    about = {name: shared.pop(name) for name in signature(tokens_and_head).parameters}
    law = law_of(call, sample=sample, **about)
    shape = spectrum_of(about["spectrum"])
    radii = parse_grid(radius, "the radius") if radius is not None else []
    if horizons is not None and len(radii) > 1:
        raise InputError("both --horizons and a range of --radius were given; expected one sweep at a time")
    given = [name for name in ("matrix", "value") if about[name] is not None]
    if given and (horizons is not None or len(radii) > 1):
        raise InputError(f"--{given[0]} was given with a sweep; expected --horizon, since a sweep designs its heads")
    shared |= {"sizes": sizes, "replicates": replicates, "queries": queries, "mask_self": about["mask_self"]}
    if len(radii) > 1:
        return sweep(law, radii=radii, horizon=about["horizon"], spectrum=shape, **shared)
    shared["radius"] = radii[0] if radii else None
    if horizons is not None:
        return sweep(law, horizons=parse_grid(horizons, "horizons"), spectrum=shape, **shared)
    return run(law, head_of(call, law, seed=shared["seed"], **about), **shared)


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
    head = None if matrix is None else head_of(call, law, matrix=matrix)
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
