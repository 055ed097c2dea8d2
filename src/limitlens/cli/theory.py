"""`limitlens theory`: everything predicted, without sampling."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from limitlens.cli.common import Json, Out, Quiet, Seed, print_json, print_table, warn


def theory(
    context: typer.Context,
    measure: Annotated[str, typer.Option(help="gaussian, mixture, sphere, vmf, ball or cube.")] = "gaussian",
    dim: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 1,
    horizon: Annotated[float, typer.Option(help="Two-sided horizon H of the head.")] = 1.0,
    spectrum: Annotated[str, typer.Option(help="flat, 1/k or dim comma-separated numbers.")] = "flat",
    n: Annotated[float, typer.Option(help="Number of tokens; 1e9 is fine.")] = 10_000,
    sizes: Annotated[str | None, typer.Option(metavar="LO:HI:K", help="Predict the error curve over these.")] = None,
    radius: Annotated[
        float | None, typer.Option(help="Of the ball of the uniform bound; that of a token if absent.")
    ] = None,
    error: Annotated[float, typer.Option(help="Relative error whose probability is bounded.")] = 0.1,
    mask_self: Annotated[bool, typer.Option("--mask-self", help="Leave a query's own token out.")] = False,
    concentration: Annotated[float, typer.Option(help="Of vmf.")] = 5.0,
    components: Annotated[int, typer.Option(help="Of mixture.")] = 2,
    separation: Annotated[float, typer.Option(help="Of mixture: its means lie between plus and minus this.")] = 2.0,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rates, bounds, confidence and the whole error curve of a law and a head, each with its standing.

    Example: limitlens theory --measure gaussian --dim 1 --horizon 1.5 --n 30000
    """
    from limitlens.attention.design import designed_head
    from limitlens.errors import InputError
    from limitlens.measures.named import named_measure
    from limitlens.sampling.cells import parse_grid, parse_sizes
    from limitlens.theory.summary import theory_document

    started = datetime.now(UTC)
    law = named_measure(measure, dim, concentration=concentration, components=components, separation=separation)
    if not error > 0:
        raise InputError(f"the error is {error}; expected a positive number, such as 0.1")
    shape: Any = (
        spectrum if spectrum in ("flat", "1/k") else parse_grid(spectrum, "the spectrum, where neither flat nor 1/k,")
    )
    head = designed_head(law.covariance, horizon, spectrum=shape, seed=seed)
    document = theory_document(
        law,
        head.A,
        n,
        sizes=None if sizes is None else parse_sizes(sizes),
        radius=radius,
        error=error,
        mask_self=mask_self,
    )
    if out is not None:
        from limitlens.record import open_folder, provenance, write_run

        write_run(open_folder(out), provenance("theory", dict(context.params), started), document)
    if json:
        print_json(document)
    else:
        print_page(document)
    warn(document["warnings"], quiet)


def print_page(document: dict[str, Any]) -> None:
    """The document as a page for people."""
    inputs, numbers = document["inputs"], document["theory"]
    print(
        f"{inputs['measure']}, n = {inputs['n']:g}: horizon {numbers['horizon']:.4g}, one-sided "
        f"{numbers['horizon_one_sided']:.4g}, coupling {numbers['coupling']:.4g}, ‖B‖_F {numbers['frobenius']:.4g}"
    )
    rows = [
        [name, f"{rate['predicted']:.4g}", rate["status"], rate["formula"], rate["note"]]
        for name, rate in document["rates"].items()
    ]
    print_table("Rates β of n^(−β)", ["rate", "predicted", "status", "formula", "of what"], rows)
    rows = [
        [name, f"{law['predicted']:.4g}", f"{law['log_power']:.3g}", law["status"]]
        for name, law in document.get("local_rates", {}).items()
    ]
    if rows:
        print_table(
            f"Local slopes at n = {inputs['n']:g}, logarithms included",
            ["moment", "slope", "power of ln n", "status"],
            rows,
        )
    if document.get("constants"):
        rows = [
            [name, f"{constant['predicted']:.4g}", constant["status"], constant["formula"]]
            for name, constant in document["constants"].items()
        ]
        print_table("Constants of the n^(−1/2) law", ["moment", "predicted", "status", "formula"], rows)
    if "curve" in document:
        _print_curve(document["curve"])
    _print_queries(document["queries"], inputs["n"])
    rows = [
        [name, f"{b['predicted']:.4g}", b["status"], f"{b['at_n']:.3g}", _count(b["useful_from"])]
        for name, b in document["uniform"].items()
    ]
    columns = ["constant", "C(R)", "status", "C(R)/√n", "reaches 1 at n ="]
    print_table(f"Uniform bound on the ball of radius {inputs['radius']:.3g}", columns, rows)
    if "hardmax" in document:
        rows = [[name, f"{law['predicted']:.4g}", law["status"]] for name, law in document["hardmax"].items()]
        print_table(f"Hardmax: E|mean output| at n = {inputs['n']:g}", ["law", "predicted", "status"], rows)


def _print_curve(curve: dict[str, Any]) -> None:
    names = [name for name in curve if name != "n" and curve[name]["predicted"] is not None]
    rows = [[f"{n:g}", *(f"{curve[name]['predicted'][j]:.4g}" for name in names)] for j, n in enumerate(curve["n"])]
    rows.append(["", *(curve[name]["status"] for name in names)])
    print_table("Predicted errors", ["n", *names], rows)


def _print_queries(queries: list[dict[str, Any]], n: float) -> None:
    rows = []
    for query in queries:
        exact = query.get("rms_error_exact")
        rows.append(
            [
                f"{query['deviations']:g} sd",
                f"{query['tilt']:.3g}",
                f"{query['effective_sample_size']['predicted']:.3g}",
                f"{query['rms_error']['predicted']:.3g}",
                "–" if exact is None else f"{exact['predicted']:.3g}",
                f"{query['deviation']['probability_at_most']:.2g} at {query['deviation']['error']:.2g}",
                _count(query["deviation"]["useful_from"]),
                query["interval"]["validity"],
            ]
        )
    columns = [
        "query",
        "tilt τ",
        "effective n",
        "rms error (CLT)",
        "exact",
        "P(error) at most",
        "useful from n =",
        "95% interval",
    ]
    print_table(f"One query at a time, n = {n:g}", columns, rows)


def _count(n: float) -> str:
    return f"{n:.3g}" if n < float("inf") else "never"
