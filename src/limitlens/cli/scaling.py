"""`limitlens scaling`: whether attention over n keys averages, selects or collapses, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli.common import Device, Json, Out, Quiet, Seed, print_json, save_figure, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from limitlens.theory.scaling import GapLaw
    from limitlens.theory.schedules import Law


@dataclass(frozen=True)
class _Result:
    """What one mode of the command found, as a document and as rows of a table, how to print it and how to draw it."""

    document: dict[str, Any]
    rows: list[dict[str, Any]]
    page: Callable[[dict[str, Any]], None]
    draw: Callable[[str], Figure] | None


def scaling(
    context: typer.Context,
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
    schedules: Annotated[
        str | None, typer.Option(metavar="LO:HI:K", help="Temperature schedules for a context grown from LO to HI.")
    ] = None,
    heat: Annotated[bool, typer.Option("--heat", help="The backward heat flow of a density through layers.")] = False,
    layers: Annotated[int, typer.Option(help="Of --heat.")] = 400,
    amplitude: Annotated[float, typer.Option(help="Of --heat: the density is 1 + amplitude cos.")] = 0.5,
    replicates: Annotated[int, typer.Option(help="Independent sets of keys behind every measurement.")] = 2000,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or scaling.png here).")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Does attention over n keys average, select a handful or collapse onto one? Predicted beside measured.

    Example: limitlens scaling --dim 5 --n 10000 --theta 1 --plot
    """
    from limitlens.errors import InputError
    from limitlens.record import open_folder, provenance, write_run
    from limitlens.theory.scaling.laws import named_law

    started = datetime.now(UTC)
    if theta is not None and beta is not None:
        raise InputError("both --theta and --beta were given; expected one, since each follows from the other")
    if heat and (keys is not None or schedules is not None):
        raise InputError("--heat was given with another study; expected it alone, on uniform keys")
    if (keys is None) != (queries is None):
        raise InputError(
            "one of --keys and --queries was given; expected both, keys to look at and queries to look from"
        )
    effective = 1.0 if theta is None and beta is None else theta
    folder = open_folder(out) if out is not None else None
    if heat:
        result = _heat(2 if dim is None else dim, 2000.0 if beta is None else beta, layers, amplitude, _count(n), seed)
    elif keys is not None and queries is not None:
        result = _keys(keys, queries, beta, effective, neighbours, normalise, schedules, seed)
    else:
        dim = 5 if dim is None else dim
        gap_law = named_law(law, dim, concentration=concentration, cosine=cosine, sub=sub, power=power)
        if schedules is not None:
            result = _schedules(gap_law, schedules, effective, beta)
        else:
            result = _law(gap_law, dim, _count(n), effective, beta, replicates, seed)
        result.document["inputs"].update(law=law, dim=dim, **({"sub": sub} if law == "subsphere" else {}))
    if plot:
        if result.draw is None:
            raise InputError("--plot was given with --keys alone; expected --schedules beside it, or a law, to draw")
        save_figure(result.draw, folder, "scaling")
    if folder is not None:
        import pandas as pd

        tables = {"scaling": pd.DataFrame(result.rows)}
        write_run(folder, provenance("scaling", dict(context.params), started), result.document, tables)
    if json:
        print_json(result.document)
    else:
        result.page(result.document)
    warnings = list(result.document.get("warnings", []))
    if device not in ("auto", "cpu"):
        warnings.append(f"--device {device} was ignored: scaling draws the nearest keys only, and runs on the CPU")
    warn(warnings, quiet)


def _law(
    law: GapLaw, dim: int, n: int, effective: float | None, beta: float | None, replicates: int, seed: int
) -> _Result:
    from limitlens.cli.scaling_pages import print_law
    from limitlens.experiments.scaling import ambient_document, scaling_document

    document = scaling_document(law, n, effective=effective, beta=beta, replicates=replicates, seed=seed)
    if law.exponent < dim - 1:
        document["ambient"] = ambient_document(law, dim, n, replicates, seed)

    def draw(path: str) -> Figure:
        from limitlens.report.scaling_figures import plot_regimes

        return plot_regimes(law, n, seed, path)

    rows = [
        {"part": part, "quantity": name, **entry}
        for part in ("quantities", "averaging", "collapse")
        for name, entry in document[part].items()
        if name != "applies"
    ]
    return _Result(document, rows, print_law, draw)


def _heat(dim: int, beta: float, layers: int, amplitude: float, n: int, seed: int) -> _Result:
    from limitlens.cli.scaling_pages import print_heat
    from limitlens.experiments.heat import heat_document

    document = heat_document(dim, beta, layers, amplitude, n=n, seed=seed)

    def draw(path: str) -> Figure:
        from limitlens.report.scaling_figures import plot_heat

        return plot_heat(document, path)

    modes = document["path"]["modes"]
    rows = [
        {"layer": layer, **{f"mode_{degree}": float(value) for degree, value in enumerate(row, 1)}}
        for layer, row in enumerate(modes)
    ]
    return _Result(document, rows, print_heat, draw)


def _schedules(law: Law, sizes: str, effective: float | None, beta: float | None) -> _Result:
    from limitlens.cli.scaling_pages import print_schedules
    from limitlens.sampling.cells import parse_grid
    from limitlens.theory.scaling import GapLaw, critical_beta, critical_beta_asymptotic
    from limitlens.theory.schedules import compare_schedules, schedules_document

    grid = parse_grid(sizes, "the range of context lengths", "1024:65536:7")
    if effective is None:
        first = float(beta or 0.0)
    elif isinstance(law, GapLaw):
        first = critical_beta(grid[0], law, effective)
    else:
        first = critical_beta_asymptotic(grid[0], law, effective)
    steps = compare_schedules(grid, first, law)

    def draw(path: str) -> Figure:
        from limitlens.report.scaling_figures import plot_schedules

        return plot_schedules(steps, path)

    rows = [{"schedule": name, **asdict(step)} for name, taken in steps.items() for step in taken]
    return _Result(schedules_document(steps, law), rows, print_schedules, draw)


def _keys(
    keys: str,
    queries: str,
    beta: float | None,
    effective: float | None,
    neighbours: int | None,
    normalise: bool,
    sizes: str | None,
    seed: int,
) -> _Result:
    from limitlens.cli.scaling_pages import print_keys
    from limitlens.experiments.real_keys import keys_document, median_exponent
    from limitlens.measures.named import sample_from_file

    seen, looking = sample_from_file(keys).tokens, sample_from_file(queries).tokens
    if sizes is not None:
        return _schedules(median_exponent(looking, seen, neighbours, normalise).local, sizes, effective, beta)
    document = keys_document(
        looking, seen, beta=beta, effective=effective or 1.0, neighbours=neighbours, normalise=normalise, seed=seed
    )
    document["inputs"].update(files={"keys": keys, "queries": queries}, normalise=normalise)
    rows = [
        {"query": index, "beta": row["beta"], "regime": row["regime"]}
        | {
            name: row[name]["measured"]
            for name in ("exponent", "critical_beta", "theta", "participation", "top_weight")
        }
        | {f"{name}_stderr": row[name]["stderr"] for name in ("exponent", "critical_beta")}
        for index, row in enumerate(document["queries"])
    ]
    return _Result(document, rows, print_keys, None)


def _count(n: float) -> int:
    from limitlens.errors import InputError

    if n != n or n in (float("inf"), float("-inf")) or n != int(n):
        raise InputError(f"n is {n:g}; expected a whole number of keys")
    return int(n)
