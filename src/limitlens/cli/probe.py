"""`limitlens probe`: every head of a real transformer, in one pass over a corpus."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens.cli.common import Device, Json, Out, Progress, Quiet, Seed, print_json, print_table, warn

if TYPE_CHECKING:
    from limitlens.heads.result import ProbeRun

SHOWN = 5  # of the slowest heads, and of the fastest


def probe(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="minilm, smollm2, a folder, a GGUF file or a hub id.")],
    corpus: Annotated[
        str, typer.Option(help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")
    ] = "stdlib-docs",
    tokens: Annotated[float, typer.Option(help="Tokens to read, such as 1e5.")] = 1e5,
    window: Annotated[int | None, typer.Option(help="Tokens a window; 256 when left out.")] = None,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Sample sizes n.")] = "64:4096:7",
    replicates: Annotated[int, typer.Option(help="Samples behind every point.")] = 24,
    queries: Annotated[int, typer.Option(help="Queries a head.")] = 256,
    batch: Annotated[int | None, typer.Option(help="Windows a forward; about 4,000 tokens when left out.")] = None,
    averaging_power: Annotated[float, typer.Option(help="An averaging head has n^power effective tokens.")] = 0.5,
    averaging_growth: Annotated[
        float, typer.Option(help="And their number grows at least like n to this power.")
    ] = 0.75,
    frozen_weight: Annotated[float, typer.Option(help="A frozen head gives one key this weight.")] = 0.5,
    frozen_growth: Annotated[float, typer.Option(help="And its effective tokens grow at most like this.")] = 0.3,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Every head of a real transformer in one pass over a corpus: errors, rates, regimes, tokens needed.

    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """
    from limitlens.errors import InputError
    from limitlens.heads.probe import probe as run_probe
    from limitlens.heads.regimes import Thresholds
    from limitlens.record import open_folder

    if not (tokens >= 1 and float(tokens).is_integer()):
        raise InputError(f"tokens is {tokens:g}; expected a whole number of at least 1, such as 100000 or 1e5")
    thresholds = Thresholds(averaging_power, averaging_growth, frozen_weight, frozen_growth)
    if out is not None:
        open_folder(out)
    with token_progress(f"probing {model}", quiet) as report:
        run = run_probe(
            model, corpus, int(tokens), window=window, sizes=sizes, replicates=replicates, queries=queries, seed=seed,
            device=device, batch=batch, thresholds=thresholds, progress=report,
        )  # fmt: skip
    if out is not None:
        run.save(out, arguments=context.params)
    if json:
        print_json(run.document())
    else:
        print_run(run, out)
    warn(run.result["warnings"], quiet)
    if run.result["interrupted"]:
        raise typer.Exit(130)


@contextmanager
def token_progress(title: str, quiet: bool) -> Iterator[Progress]:
    """A bar on stderr with tokens per second and the time left; silent when piped or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeRemainingColumn())
    # A block of tokens takes seconds: speed is averaged over minutes, or it would show nothing.
    with Bar(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=300) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=int(done), total=int(total))


def print_run(run: ProbeRun, folder: str | None) -> None:
    """The probe as a page for people: the slowest heads, the fastest, what to do."""
    from limitlens.heads.advice import advice

    result = run.result
    print(run.title)
    largest = result["n"][-1]
    columns = [
        "head", "rate", "95% interval", f"error at n = {largest:,}", "tokens for 10%", "for 5%", "effective tokens",
        "top weight", "sink", "Pareto k", "horizon", "regime",
    ]  # fmt: skip
    heads = {(head["layer"], head["head"]): head for head in result["heads"]}
    for title, table in (
        (f"The {SHOWN} slowest heads: the largest errors left", run.slowest(SHOWN)),
        (f"The {SHOWN} fastest: the smallest errors left", run.fastest(SHOWN)),
    ):
        print_table(title, columns, [_row(heads[row.layer, row.head]) for row in table.itertuples()])
    _print_rates(result)
    print("\nWhat to do")
    for line in advice(result):
        print(f"  - {line}")
    where = folder or "RUN"
    saved = "" if folder else " after a probe with --out RUN"
    print(f"  - `limitlens plan {where} --error 0.05` gives the KV entries of every head for an error{saved}.")
    spent = result["seconds"]
    print(f"{spent['model']:.1f} s in the model, {spent['attention']:.1f} s in attention, on {result['device']}")


def _row(head: dict[str, Any]) -> list[str]:
    rate = head["rate"]
    error, stderr = head["relative_output_error"][-1], head["relative_output_error_stderr"][-1]
    return [
        f"{head['layer']}.{head['head']}",
        "–" if rate is None else f"{rate['slope']:.2f}",
        "–" if rate is None else f"{rate['interval'][0]:.2f} to {rate['interval'][1]:.2f}",
        f"{error:.3f} ± {stderr:.3f}",
        _tokens(head["tokens_for"]["0.1"]),
        _tokens(head["tokens_for"]["0.05"]),
        f"{head['effective_tokens'][-1]:.3g}",
        f"{head['top_weight']:.2g}",
        _number(head["sink_mass"]),
        _number(head["pareto_k"]),
        f"{head['horizon']:.2f}",
        head["regime"],
    ]


def _tokens(found: dict[str, Any] | None) -> str:
    if found is None:
        return "beyond"
    return f"{found['n']:,}{'*' if found['extrapolated'] else ''}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _print_rates(result: dict[str, Any]) -> None:
    """How well the predicted rates do, the constant beside them."""
    skill, spread = result["summary"]["rates"], result["summary"]["rate"]
    print("* extrapolated; beyond: more than ten times the largest n")
    if spread is None:
        return
    print(f"Rates run from {spread['smallest']:.2f} to {spread['largest']:.2f}, median {spread['median']:.2f}.")
    misses = {name: entry["mean_absolute_miss"] for name, entry in skill["predictors"].items()}
    if misses["rate_constant"] is None:
        return
    correlation = skill["rank_correlation_score_std"]
    print(
        f"Predicted rates miss by {misses['rate_sharp']:.3f} (1/(1+H²)), {misses['rate_sharp_output']:.3f} (1/(1+2H²)) "
        f"and {misses['rate_rms_output']:.3f} ((√(1+4/H²)−1)/4), the constant 1/2 by {misses['rate_constant']:.3f}"
        + ("." if correlation is None else f"; rank correlation with the score spread {correlation:.2f}.")
    )
