"""`limitlens hardmax`: the hardmax law, measured and predicted, and the way to it from softmax."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli.common import Json, Out, Quiet, Seed, print_json, print_table, progress, save_figure

if TYPE_CHECKING:
    from limitlens.experiments.hardmax import HardmaxCurve


def hardmax(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:1000000:9",
    measure: Annotated[str, typer.Option(help="gaussian, mixture, sphere, vmf, ball or cube.")] = "gaussian",
    dim: Annotated[int, typer.Option(help="Dimension of the tokens; a formula is known for gaussian, 1.")] = 1,
    horizons: Annotated[
        str, typer.Option(metavar="LO:HI:K", help="Softmax beside it, at these horizons (gaussian, dim 1).")
    ] = "0.5",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 400,
    queries: Annotated[int, typer.Option(help="Queries per sample, except for gaussian, dim 1.")] = 2048,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or hardmax.png here).")] = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """E|mean output| with softmax replaced by argmax, and which law it follows: power or logarithm.

    Example: limitlens hardmax --sizes 100:1000000:9 --horizons 0.5:16:6 --plot
    """
    from limitlens.record import open_folder, provenance, write_run
    from limitlens.sampling.cells import parse_grid, parse_sizes

    started = datetime.now(UTC)
    counts = parse_sizes(sizes)
    grid = parse_grid(horizons, "horizons")
    folder = open_folder(out) if out is not None else None
    with progress("attending", quiet) as report:
        if measure == "gaussian" and dim == 1:
            curves = _line(counts, grid, replicates, seed, report)
        else:
            curves = [_general(measure, dim, counts, replicates, queries, seed, report)]
    document = {
        "inputs": {"measure": measure, "dim": dim, "replicates": replicates, "seed": seed},
        "hardmax": curves[-1].document(),
        "softmax": [curve.document() for curve in curves[:-1]],
    }
    if folder is not None:
        import pandas as pd

        table = pd.concat([curve.table() for curve in curves], ignore_index=True)
        write_run(folder, provenance("hardmax", dict(context.params), started), document, {"hardmax": table})
    if plot:
        from limitlens.report.tail_figures import plot_crossover

        save_figure(lambda path: plot_crossover(curves, path), folder, "hardmax")
    if json:
        print_json(document)
    else:
        print_page(curves)


def _line(sizes: tuple[int, ...], grid: list[float], replicates: int, seed: int, report: Any) -> list[HardmaxCurve]:
    from limitlens.experiments.hardmax import hardmax_line, softmax_line

    curves = []
    for done, horizon in enumerate(grid):
        curves.append(softmax_line(horizon, sizes, replicates, seed))
        report(done + 1, len(grid) + 1)
    return [*curves, hardmax_line(sizes, replicates, seed)]


def _general(
    measure: str, dim: int, sizes: tuple[int, ...], replicates: int, queries: int, seed: int, report: Any
) -> HardmaxCurve:
    from limitlens.attention.design import designed_head
    from limitlens.experiments.hardmax import hardmax_study
    from limitlens.measures.named import named_measure

    law = named_measure(measure, dim)
    head = designed_head(law.covariance, 1.0, seed=seed)
    return hardmax_study(law, head, sizes, replicates=replicates, queries=queries, seed=seed, progress=report)


def print_page(curves: list[HardmaxCurve]) -> None:
    """Every curve as a table, and the law each prefers."""
    for curve in curves:
        rows = []
        for j, n in enumerate(curve.sizes):
            predicted = [f"{value[j]:.4g} ({curve.measured[j] / value[j]:.3f})" for value in curve.predicted.values()]
            rows.append([f"{n:,}", f"{curve.measured[j]:.4g} ± {curve.stderr[j]:.1g}", *predicted])
        columns = ["n", "measured", *(f"{name}, {curve.statuses[name]} (ratio)" for name in curve.predicted)]
        print_table(f"{curve.label}: E|mean output|, {len(curve.errors)} replicates", columns, rows)
        rate = curve.rate
        if rate is not None:
            print(
                f"  {rate.law} law preferred by {abs(rate.evidence):.1f} (difference of information criteria): "
                f"n^(−{rate.slope:.3f}) against (ln n)^(−{rate.log_exponent:.3f})"
            )
