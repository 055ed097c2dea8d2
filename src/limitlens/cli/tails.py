"""`limitlens tails`: are these tokens sub-Gaussian, and what attention does where its limit ends."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli.common import Json, Out, Seed, print_json, print_table, save_figure

if TYPE_CHECKING:
    from limitlens.experiments.heavy_tails import HeavyCurve
    from limitlens.statistics.tails import TailReport


def tails(
    context: typer.Context,
    sample: Annotated[str | None, typer.Option(metavar="FILE.npy", help="Tokens (n, dim) to judge.")] = None,
    law: Annotated[str, typer.Option(help="Without --sample: gaussian, laplace (scale 1) or student.")] = "laplace",
    tilts: Annotated[str, typer.Option(metavar="LO:HI:K", help="Tilts t of the query; scores are t x.")] = "0.4,0.75,2",
    degrees: Annotated[float, typer.Option(help="Of student: degrees of freedom.")] = 3.0,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens.")] = "100:100000:4",
    replicates: Annotated[int, typer.Option(help="Independent samples behind every point.")] = 200,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or tails.png here).")] = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Judge the tails of a file of tokens, or show attention over a law where its infinite-token limit ends.

    Example: limitlens tails --law laplace --tilts 0.4,0.75,2 --plot
    """
    from limitlens.errors import InputError
    from limitlens.record import open_folder, provenance, write_run

    started = datetime.now(UTC)
    folder = open_folder(out) if out is not None else None
    tables: dict[str, Any] = {}
    if sample is not None:
        if plot:
            raise InputError("both --sample and --plot were given; expected --plot with --law, whose curves it draws")
        report = _judge(sample)
        document = report.document()
    else:
        curves = _experiment(law, tilts, degrees, sizes, replicates, seed)
        document = {"inputs": {"law": law, "seed": seed}, "tilts": [curve.document() for curve in curves]}
        if folder is not None:
            import pandas as pd

            tables["tails"] = pd.concat([curve.table() for curve in curves], ignore_index=True)
    if folder is not None:
        write_run(folder, provenance("tails", dict(context.params), started), document, tables)
    if plot:
        from limitlens.report.tail_figures import plot_heavy

        save_figure(lambda path: plot_heavy(curves, path), folder, "tails")
    if json:
        print_json(document)
    elif sample is not None:
        print_report(report)
    else:
        print_curves(curves)


def _judge(path: str) -> TailReport:
    from limitlens.measures.named import sample_from_file
    from limitlens.statistics.tails import check_tails

    return check_tails(sample_from_file(path).tokens)


def _experiment(law: str, tilts: str, degrees: float, sizes: str, replicates: int, seed: int) -> list[HeavyCurve]:
    from limitlens.experiments.heavy_tails import heavy_curve
    from limitlens.sampling.cells import parse_grid, parse_sizes

    counts = parse_sizes(sizes)
    return [
        heavy_curve(law, tilt, counts, degrees=degrees, replicates=replicates, seed=seed)
        for tilt in parse_grid(tilts, "tilts")
    ]


def print_report(report: TailReport) -> None:
    """The verdict, then the log-moment curves of the worst directions."""
    print(report)
    worst = report.excess.max(axis=1).argsort()[::-1][:5]
    rows = [
        [
            f"{direction}",
            *(
                f"{report.excess[direction, j]:+.3f} ± {report.stderr[direction, j]:.2g}"
                for j in range(len(report.tilts))
            ),
        ]
        for direction in worst
    ]
    columns = ["direction", *(f"s = {s:.2f}" for s in report.tilts)]
    print_table("K(s u)/(s²/2) − 1 along whitened directions: above 0 exceeds the Gaussian curve", columns, rows)


def print_curves(curves: list[HeavyCurve]) -> None:
    """One table per tilt: what the weights and the output do as n grows."""
    for curve in curves:
        found = curve.summary()
        rows = [
            [
                f"{n:,}",
                f"{found['median_output'][j]:.4g}",
                f"{found['top_weight'][j]:.3f} ± {found['top_weight_stderr'][j]:.1g}",
                f"{found['participation'][j]:.3g} ± {found['participation_stderr'][j]:.1g}",
            ]
            for j, n in enumerate(curve.sizes)
        ]
        limit = "" if curve.limit is None else f" ({curve.limit:.4g})"
        print(f"{curve.law}, tilt {curve.tilt:g}: {curve.existence.value}{limit}; {curve.existence.meaning}")
        print_table("", ["n", "median output", "largest weight", "Σw²"], rows)
        for prediction in () if curve.theory is None else curve.theory.predictions:
            print(f"  {prediction}: {prediction.note}")
