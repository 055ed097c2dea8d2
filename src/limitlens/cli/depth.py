"""`limitlens depth`: error through the layers when each query sees n keys."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Model, Result, Special, command


@command("reading documents", "documents", shares="seed device yes", kept=True)
def depth(
    model: Model,
    corpus: Annotated[str, typer.Option(metavar="TEXT", help="The text.")] = "stdlib-docs",
    keys: Annotated[str, typer.Option(help="Keys that each query sees: lo:hi:k, or some numbers.")] = "16:256:5",
    ways: Annotated[str, typer.Option(metavar="shared,own", help="Keys of a document's queries.")] = "shared",
    beside: Annotated[
        str, typer.Option(metavar="fixed,single,heads", help="Run beside keys drawn anew in every layer, or none.")
    ] = "fixed,single,heads",
    replicates: Annotated[int, typer.Option(min=1, help="Draws of each document.")] = 1,
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 16,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of a document; up to 512 when left out.")] = None,
    special: Special = "auto",
    **shared: Any,
) -> Result:
    """What a model's layers make of attention over n keys: errors, what they add up to, predictions, heads together.

    Example: limitlens depth minilm --keys 16:512:6 --ways shared,own --out runs/depth
    """
    from limitlens.live.depth import depth as run

    more = [] if beside == "none" else beside.split(",")
    options: dict[str, Any] = {"replicates": replicates, "documents": documents, "window": window, "special": special}
    return run(model, corpus, keys, ways=ways.split(","), beside=more, **options, **shared)
