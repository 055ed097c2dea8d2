"""`limitlens depth`: error through the layers when each query sees n keys."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, Special, command


@command("reading documents", "documents", runs="interventions.depth", shares="seed device yes", kept=True)
def depth(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(help="Keys that each query sees: lo:hi:k, or some numbers.")] = "16:256:5",
    ways: Annotated[str, typer.Option(metavar="shared,own", help="Keys of a document's queries.")] = "shared",
    beside: Annotated[
        str, typer.Option(metavar="fixed,single,heads", help="Run beside keys drawn anew in every layer, or none.")
    ] = "fixed,single,heads",
    replicates: Annotated[int, typer.Option(min=1, help="Draws of each document.")] = 1,
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 16,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of a document; up to 512 when left out.")] = None,
    special: Special = "auto",
) -> None:
    """What a model's layers make of attention over n keys: errors, what they add up to, predictions, heads together.

    Example: limitlens depth minilm --keys 16:512:6 --ways shared,own --out runs/depth
    """
