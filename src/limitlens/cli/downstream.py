"""`limitlens downstream`: task accuracy when each query attends to n sampled keys."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("reading documents", "documents", runs="interventions.downstream", shares="seed device", kept=True)
def downstream(
    model: Annotated[str, typer.Argument(help="An encoder, or the folder of your own sequence classifier.")],
    data: Annotated[str, typer.Option(help="Labelled documents: a folder of folders, .zip, .jsonl, .csv, .tsv.")],
    keys: Annotated[str, typer.Option(help="Keys of each query: lo:hi:k, or numbers.")] = "16:256:5",
    key_sharing: Annotated[
        str, typer.Option(metavar="shared|own", help="Whether the queries of a document share their keys.")
    ] = "shared",
    test: Annotated[int, typer.Option(min=6, help="Held-out documents to classify.")] = 500,
    train: Annotated[int | None, typer.Option(min=2, help="Training documents; all others by default.")] = None,
    window: Annotated[int | None, typer.Option(min=2, help="Tokens of a document; at most 512 by default.")] = None,
) -> None:
    """Measure accuracy, agreement and margins of a classifier against the number of keys per query.

    Example: limitlens downstream minilm --data reviews --keys 16:256:5 --out runs/reviews
    """
