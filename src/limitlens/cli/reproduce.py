"""`limitlens reproduce`: published experiments by name."""

from typing import Annotated, Any

import typer

from limitlens.cli import common


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="An experiment; --list names them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name every experiment, and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes: within a minute or so.")] = False,
    as_published: Annotated[bool, typer.Option("--as-published", help="By the published code's rules too.")] = False,
    corpus: Annotated[str | None, typer.Option(help="The text, or the labelled documents, that it reads.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that it reads them with.")] = None,
    seed: common.Seed = 0,
    out: common.Out = None,
    overwrite: common.Overwrite = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Run a published experiment again: ours beside theirs, with a verdict on every claim.

    Example: limitlens reproduce gaussian-horizon --quick --out runs/gaussian
    """
    from limitlens.errors import InputError
    from limitlens.published.catalogue import catalogue
    from limitlens.published.reproduction import listing
    from limitlens.published.reproduction import reproduce as run
    from limitlens.report import terminal

    if listed:
        common.print_json(catalogue()) if json else terminal.show(listing())
        raise typer.Exit
    if name is None:
        raise InputError(f"no experiment was named; expected one of {', '.join(catalogue())}, or --list")
    started = common.begin(context, "reproduce")
    changes: dict[str, Any] = {key: value for key, value in (("corpus", corpus), ("model", model)) if value is not None}
    with common.progress(f"reproducing {name}", quiet) as report:
        found = run(name, quick, as_published=as_published, seed=seed, progress=report, **changes)
    common.show(context, "reproduce", found, started, plot=None if out is None else name)
