"""`limitlens downstream`: a task when each query sees n keys."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("reading documents", "documents", runs="interventions.downstream", shares="seed device", kept=True)
def downstream(
    model: Annotated[str, typer.Argument(help="An encoder, or the folder of a classifier of your own.")],
    data: Annotated[str, typer.Option(help="Labelled documents: a folder of folders, .zip, .jsonl, .csv, .tsv.")],
    keys: Annotated[str, typer.Option(help="Keys that each query sees: lo:hi:k, or some numbers.")] = "16:256:5",
    way: Annotated[str, typer.Option(metavar="shared|own", help="Keys of a document's queries.")] = "shared",
    test: Annotated[int, typer.Option(min=6, help="Documents that are asked.")] = 500,
    train: Annotated[int | None, typer.Option(min=2, help="Documents that are learned; all others.")] = None,
    window: Annotated[int | None, typer.Option(min=2, help="Tokens that are read; up to 512 when left out.")] = None,
) -> None:
    """Whether attention over n keys shows in a task: accuracy, agreement with the whole model, margins.

    Example: limitlens downstream minilm --data reviews --keys 16:256:5 --out runs/reviews
    """
