"""`limitlens plan`: KV entries per head for an error, tried on the windows that the probe reserved."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from limitlens.cli.common import Device, Json, Out, Quiet, print_json, print_table, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from limitlens.budgets.head_plan import HeadPlan
    from limitlens.budgets.plan import Plan

SHOWN = 5  # heads at either end of the table


def plan(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that limitlens probe --out wrote.")],
    error: Annotated[float, typer.Option(help="Relative output error that each head may make.")] = 0.05,
    length: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", help="Tokens in the context; endless when left out.")
    ] = None,
    second: Annotated[
        str | None,
        typer.Option(metavar="RUN2", help="A probe of the same model with another --window: gives temperatures."),
    ] = None,
    trial: Annotated[bool, typer.Option(help="Try the budgets on the reserved windows.")] = True,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the trial's draws; the probe's when left out.")
    ] = None,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """KV entries per head for an error, in tokens and as a share of the context; temperatures after a second probe.

    Example: limitlens plan runs/demo --error 0.05 --context 32768 --out runs/plan
    """
    from limitlens.budgets.plan import plan as make_plan
    from limitlens.record import open_folder, provenance, write_run

    started = datetime.now(UTC)
    folder = open_folder(out) if out is not None else None
    with progress("trying the plan", quiet) as report:
        made = make_plan(run, error, length, second=second, trial=trial, device=device, seed=seed, progress=report)
    if folder is not None:
        made.save(folder)
        tables = {"heads": made.table}
        write_run(folder, provenance("plan", dict(context.params), started), made.document(), tables)
    if json:
        print_json(made.document())
    else:
        print_plan(made)


def print_plan(made: Plan) -> None:
    """The plan as a page for people: largest and smallest budgets, the trial, what to do."""
    from limitlens.budgets.plan_words import advice, headline, trial_rows

    ranked = sorted(made.heads, key=lambda head: float("inf") if head.keys.tokens is None else head.keys.tokens)
    if len(ranked) <= 2 * SHOWN:
        _print_heads("Keys per head, largest first", ranked[::-1])
    else:
        _print_heads(f"The {SHOWN} heads that need the most keys", ranked[: -SHOWN - 1 : -1])
        _print_heads(f"The {SHOWN} heads that need the fewest", ranked[:SHOWN])
    if made.trials:
        title = f"Errors that such budgets gave on the reserved windows (asked: {made.error:g})"
        print_table(title, ["keys kept", "median over heads", "10% to 90%"], trial_rows(made))
    _print_temperatures(made)
    for line in (*headline(made), *advice(made)):
        print(line)


def _print_heads(title: str, heads: Sequence[HeadPlan]) -> None:
    rows = []
    for head in heads:
        low, high = head.keys.interval
        rows.append(
            [
                f"{head.layer}.{head.head}",
                _number(head.keys.tokens),
                f"{_number(low)} to {_number(high)}",
                "" if head.ratio is None else f"{head.ratio:.1%}",
                head.mark + (", lower bound" if head.lower_bound else ""),
                head.regime.value,
                "" if head.rate is None else f"{head.rate:.2f}",
            ]
        )
    print_table(title, ["layer.head", "keys", "95%", "of context", "from", "regime", "rate"], rows)


def _print_temperatures(made: Plan) -> None:
    heated = made.temperatures
    if heated is None:
        return
    known = sorted((head for head in heated.heads if head.factor is not None), key=lambda head: head.factor or 0.0)
    chosen = known if len(known) <= 2 * SHOWN else [*known[:SHOWN], *known[-SHOWN:]]
    rows = [
        [
            f"{head.layer}.{head.head}",
            " to ".join(f"{tokens:.3g}" for tokens in head.effective_tokens or ()),
            f"{head.factor:.3g}",
            "" if head.critical is None else f"{head.critical:.3g}",
            f"{heated.log:.3g}",
            f"{heated.yarn:.3g}",
        ]
        for head in chosen
    ]
    status = "heuristic, extrapolated" if heated.extrapolated else "heuristic"
    title = f"Factors on the scores from {heated.first:,} to {heated.context:,} tokens ({status})"
    print_table(title, ["layer.head", "effective tokens", "keeps them", "critical", "log n", "YaRN"], rows)


def _number(value: int | None) -> str:
    return "beyond" if value is None else f"{value:,}"
