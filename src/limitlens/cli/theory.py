"""`limitlens theory`: all predictions for a law and a head, without sampling."""

from typing import Annotated

import typer

from limitlens.cli.common import Law, Result, Seed, command, spectrum_of


@command()
def theory(
    measure: Law = "gaussian",
    dim: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 1,
    horizon: Annotated[float, typer.Option(help="Two-sided horizon H of the head.")] = 1.0,
    spectrum: Annotated[str, typer.Option(help="Singular values: flat, 1/k or dim comma-separated numbers.")] = "flat",
    n: Annotated[float, typer.Option(help="Number of tokens; 1e9 is fine.")] = 10_000,
    sizes: Annotated[str | None, typer.Option(metavar="LO:HI:K", help="Sizes of the predicted error curve.")] = None,
    radius: Annotated[float | None, typer.Option(help="Ball of the uniform bound; default: a typical token.")] = None,
    error: Annotated[float, typer.Option(help="Relative error whose probability is bounded.")] = 0.1,
    mask_self: Annotated[bool, typer.Option("--mask-self", help="Exclude a query's own token.")] = False,
    concentration: Annotated[float, typer.Option(help="Concentration of vmf.")] = 5.0,
    components: Annotated[int, typer.Option(help="Number of components of mixture.")] = 2,
    separation: Annotated[float, typer.Option(help="Means of mixture lie between -separation and separation.")] = 2.0,
    seed: Seed = 0,
) -> Result:
    """Predict rates, bounds, confidence and the error curve of a law and a head, each number with its status.

    Example: limitlens theory --measure gaussian --dim 1 --horizon 1.5 --n 30000
    """
    from limitlens.attention.design import designed_head
    from limitlens.experiments.theory_result import theory_report
    from limitlens.measures.named import named_measure
    from limitlens.sampling.cells import parse_sizes

    law = named_measure(measure, dim, concentration=concentration, components=components, separation=separation)
    head = designed_head(law, horizon, spectrum=spectrum_of(spectrum), seed=seed)
    counts = None if sizes is None else parse_sizes(sizes)
    return theory_report(law, head, n, sizes=counts, radius=radius, error=error, mask_self=mask_self)
