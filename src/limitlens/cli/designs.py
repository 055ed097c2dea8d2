"""`limitlens designs`: sparse designs in every head of a live model."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, Special, command


@command("designs in {model}", "layers", runs="interventions.designs", shares="seed device")
def designs(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of keys.")] = "16:512:6",
    designs: Annotated[str | None, typer.Option("--only", metavar="A,B,...", help="All when left out.")] = None,
    context: Annotated[int, typer.Option(help="Tokens a document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents that are read.")] = 32,
    queries: Annotated[int, typer.Option(help="Places of a document whose queries are asked.")] = 4,
    special: Special = "auto",
) -> None:
    """Windows, strides, blocks, random keys, projections: error, bias floor and rate at equal number of keys.

    Example: limitlens designs minilm --keys 16:512:6 --out runs/designs
    """
