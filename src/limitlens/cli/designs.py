"""`limitlens designs`: sparse attention designs in every head of a model."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, Special, command


@command("designs in {model}", "layers", runs="interventions.designs", shares="seed device")
def designs(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of keys per query.")] = "16:512:6",
    designs: Annotated[
        str | None, typer.Option("--only", metavar="A,B,...", help="Designs to compare; all by default.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a document.")] = 512,
    documents: Annotated[int, typer.Option(help="Number of documents.")] = 32,
    queries: Annotated[int, typer.Option(help="Queries per document.")] = 4,
    special: Special = "auto",
) -> None:
    """Compare sparse designs (windows, strides, blocks, random keys, projections) at equal numbers of keys.

    Prints error, bias floor and rate of every design. Example: limitlens designs minilm --keys 16:512:6 --out runs/d
    """
