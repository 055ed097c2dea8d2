"""`limitlens study`: error curves of a synthetic law, or of anybody's tokens, and their rates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli.common import (
    Device,
    Json,
    Out,
    Progress,
    Quiet,
    Seed,
    print_json,
    print_table,
    progress,
    save_figure,
    warn,
)

if TYPE_CHECKING:
    from pathlib import Path

    from limitlens.experiments.study_result import Curve
    from limitlens.experiments.sweeps import RadiusSweep
    from limitlens.measures.base import Measure


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
    radius: Annotated[
        str | None,
        typer.Option(
            metavar="R or LO:HI:K", help="Uniform error over |x| <= R; a range scales compact tokens to each R."
        ),
    ] = None,
    concentration: Annotated[float, typer.Option(help="Of vmf.")] = 5.0,
    components: Annotated[int, typer.Option(help="Of mixture.")] = 2,
    separation: Annotated[float, typer.Option(help="Of mixture: its means lie between plus and minus this.")] = 2.0,
    plot: Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or study.png here).")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Error curves of attention over n tokens and their rates, against theory.

    Example: limitlens study --measure gaussian --dim 1 --horizon 1.5 --sizes 1000:100000:9 --replicates 400
    """
    from limitlens.attention.design import designed_head
    from limitlens.errors import InputError
    from limitlens.experiments.study import study as run_study
    from limitlens.measures.named import named_measure, sample_from_file
    from limitlens.record import open_folder
    from limitlens.sampling.cells import parse_grid

    started = datetime.now(UTC)
    law: Measure
    if sample is not None:
        law = sample_from_file(sample)
    else:
        law = named_measure(measure, dim, concentration=concentration, components=components, separation=separation)
    shape: Any = (
        spectrum if spectrum in ("flat", "1/k") else parse_grid(spectrum, "the spectrum, where neither flat nor 1/k,")
    )
    radii = parse_grid(radius, "the radius") if radius is not None else []
    if horizons is not None and len(radii) > 1:
        raise InputError("both --horizons and a range of --radius were given; expected one sweep at a time")
    folder = open_folder(out) if out is not None else None
    common: dict[str, Any] = {"replicates": replicates, "queries": queries, "seed": seed}
    writer = _Writer(context, started, folder, json, quiet, plot)
    with progress("attending", quiet) as report:
        if horizons is not None:
            swept = _horizons(
                law, parse_grid(horizons, "horizons"), shape, sizes, mask_self, radii, device, common, report
            )
        elif len(radii) > 1:
            from limitlens.experiments.sweeps import radius_sweep

            head = designed_head(law.covariance, horizon, spectrum=shape, seed=seed)
            grown = radius_sweep(law, head, radii, sizes, progress=report, **common)
        else:
            head = designed_head(law.covariance, horizon, spectrum=shape, seed=seed)
            curve = run_study(
                law, head, sizes, mask_self=mask_self, radius=radii[0] if radii else None, device=device,
                progress=report, **common,
            )  # fmt: skip
    if horizons is not None:
        writer.horizons(swept)
    elif len(radii) > 1:
        writer.radii(grown)
    else:
        writer.curve(curve)


def _horizons(
    law: Measure,
    grid: list[float],
    shape: Any,
    sizes: str,
    mask_self: bool,
    radii: list[float],
    device: str,
    common: dict[str, Any],
    report: Progress,
) -> list[tuple[float, Curve]]:
    from limitlens.attention.design import designed_head
    from limitlens.experiments.study import study as run_study
    from limitlens.experiments.sweeps import sweep

    def at(horizon: float) -> Any:
        head = designed_head(law.covariance, horizon, spectrum=shape, seed=common["seed"])
        ball = radii[0] if radii else None
        return lambda tell: run_study(
            law, head, sizes, mask_self=mask_self, radius=ball, device=device, progress=tell, **common
        )

    return sweep([(horizon, at(horizon)) for horizon in grid], report)


class _Writer:
    """Prints a result, and leaves it in the run folder where one was asked for."""

    def __init__(
        self, context: typer.Context, started: datetime, folder: Path | None, json: bool, quiet: bool, plot: bool
    ) -> None:
        self.arguments, self.started, self.folder = dict(context.params), started, folder
        self.json, self.quiet, self.plot = json, quiet, plot

    def curve(self, curve: Curve) -> None:
        tables = {"curve": curve.table, "replicates": curve.replicate_table}
        self._keep(curve.document(), tables, curve.plot)
        if not self.json:
            print_curve(curve)
        self._end(curve.warnings, curve.interrupted)

    def horizons(self, swept: list[tuple[float, Curve]]) -> None:
        import pandas as pd

        from limitlens.report.curve_figures import plot_horizons

        document = {
            "horizons": [horizon for horizon, _ in swept],
            "studies": [curve.document() for _, curve in swept],
        }
        table = pd.concat([curve.table.assign(horizon=horizon) for horizon, curve in swept], ignore_index=True)
        self._keep(document, {"curve": table}, lambda path: plot_horizons(swept, path))
        if not self.json:
            print_horizons(swept)
        self._end(_distinct(swept), any(curve.interrupted for _, curve in swept))

    def radii(self, grown: RadiusSweep) -> None:
        from limitlens.report.curve_figures import plot_radii

        self._keep(grown.document(), {"constants": grown.table}, lambda path: plot_radii(grown, path))
        if not self.json:
            rows = []
            for name in ("uniform", "mean", "covariance"):
                value, stderr = grown.constants(name)
                cells = [f"{v:.3g} ± {s:.1g}" for v, s in zip(value, stderr, strict=True)]
                growth = grown.growth(name)
                shape = (
                    f"e^({growth.exponential_rate:.2f} R)"
                    if growth.law == "exponential"
                    else f"R^{growth.polynomial_degree:.2f}"
                )
                rows.append([name, *cells, f"{growth.law} {shape}"])
            title = f"√n × error at n = {grown.curves[0].sizes[-1]} as tokens and queries spread to radius R"
            print_table(title, ["error", *(f"R = {radius:.3g}" for radius in grown.radii), "growth"], rows)
        swept = list(zip(grown.radii, grown.curves, strict=True))
        self._end(_distinct(swept), any(curve.interrupted for _, curve in swept))

    def _keep(self, document: dict[str, Any], tables: dict[str, Any], draw: Any) -> None:
        from limitlens.record import provenance, write_run

        if self.folder is not None:
            write_run(self.folder, provenance("study", self.arguments, self.started), document, tables)
        if self.plot:
            save_figure(draw, self.folder, "study")
        if self.json:
            print_json(document)

    def _end(self, warnings: list[str], interrupted: bool) -> None:
        warn(warnings, self.quiet)
        if interrupted:
            raise typer.Exit(130)


def print_curve(curve: Curve) -> None:
    """The study as a page for people: errors, rates against theory, tokens for an error."""
    from limitlens.curves.crossing import LINE_SIZES

    shown = [name for name in curve.names if name != "covariance_operator"]
    rows = [
        [f"{n:,}", *(f"{curve.error(name)[j]:.4g} ± {curve.stderr(name)[j]:.1g}" for name in shown)]
        for j, n in enumerate(curve.sizes)
    ]
    print_table(
        f"{curve.measure!r}: E|error| over {curve.replicates} replicates, {curve.queries} queries on {curve.device}",
        ["n", *shown],
        rows,
    )
    theory = curve.rates_in_theory()
    rows = []
    for name in shown:
        rate = curve.rate(name)
        if rate is None:
            rows.append([name, "too few sizes", "", "", "", ""])
            continue
        rows.append(
            [
                name,
                f"{rate.slope:.3f} ± {rate.stderr:.3f}",
                f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}",
                f"{curve.asymptotic_rate(name):.3f}",
                f"{theory['rate_proved']:.3g}" if name in ("mean", "covariance") else "",
                f"{rate.verdict} ({rate.evidence:+.1f})",
            ]
        )
    print_table(
        f"Rates: horizon {theory['horizon']:.3g}, one-sided {theory['horizon_one_sided']:.3g}, "
        f"coupling {theory['coupling']:.3g}",
        ["error", "fitted rate", "95% interval", "asymptotic", "proved at least", "law (evidence for a power)"],
        rows,
    )
    for error in (0.1, 0.05, 0.01):
        found = curve.tokens_for(error)
        if curve.scale[0] == 0:
            print(f"  {error:.0%} relative output error: not defined, since the limit is 0")
        elif len(curve.sizes) < LINE_SIZES:
            print(f"  {error:.0%} relative output error: {LINE_SIZES} sizes or more are needed to tell")
        elif found is None:
            print(f"  {error:.0%} relative output error: beyond {10 * curve.sizes[-1]:,} tokens")
        else:
            low, high = found.interval
            upper = "more" if high is None else f"{high:,}"
            note = ", extrapolated" if found.extrapolated else ""
            print(f"  {error:.0%} relative output error: {found.n:,} tokens (95%: {low:,} to {upper}{note})")


def print_horizons(swept: list[tuple[float, Curve]]) -> None:
    """Rates over horizons as a table for people."""
    rows = []
    for horizon, curve in swept:
        theory = curve.rates_in_theory()
        cells = [f"{horizon:.3g}"]
        for name in ("mean", "covariance", "output"):
            rate = curve.rate(name)
            cells.append("–" if rate is None else f"{rate.slope:.3f} ± {rate.stderr:.3f}")
        rows.append([*cells, *(f"{theory[k]:.3f}" for k in ("rate_sharp", "rate_rms_output", "rate_drawn"))])
    columns = ["H", "mean", "covariance", "output", "sharp", "sharp, output (rms)", "1/(2(1+H²))"]
    print_table("Fitted rates over the horizon, and what theory draws", columns, rows)


def _distinct(swept: list[tuple[float, Curve]]) -> list[str]:
    return list(dict.fromkeys(warning for _, curve in swept for warning in curve.warnings))
