"""`limitlens reproduce`: published experiments by name."""

from typing import Annotated, Any

import typer

from limitlens.cli import common


@common.command("reproducing {name}", shares="seed", draws="{name}")
def reproduce(
    call: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of the experiment; --list shows all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all experiments and exit.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, about a minute.")] = False,
    as_published: Annotated[bool, typer.Option("--as-published", help="Also use the published code's rules.")] = False,
    corpus: Annotated[str | None, typer.Option(help="Text or labelled documents to read.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to use.")] = None,
    **shared: Any,
) -> common.Result:
    """Reproduce a published experiment: our numbers and the published ones, with a verdict on every claim.

    Example: limitlens reproduce gaussian-horizon --quick --out runs/gaussian
    """
    from limitlens.errors import InputError
    from limitlens.published.catalogue import catalogue
    from limitlens.published.reproduction import listing
    from limitlens.published.reproduction import reproduce as run
    from limitlens.report import terminal

    if listed:
        common.print_json(catalogue()) if call.params["json"] else terminal.show(listing())
        raise typer.Exit
    if name is None:
        raise InputError(f"no experiment was given; expected one of {', '.join(catalogue())}, or --list")
    changes: dict[str, Any] = {key: value for key, value in (("corpus", corpus), ("model", model)) if value is not None}
    return run(name, quick, as_published=as_published, **changes, **shared)
