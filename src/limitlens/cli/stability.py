"""`limitlens stability`: heads whose top keys stay the same behind other texts."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, command


@command("stability of top keys in {model}", "documents", runs="interventions.stability", shares="seed device")
def stability(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[int, typer.Option(help="Tokens of the context that is exchanged.")] = 256,
    top: Annotated[int, typer.Option(help="Number of keys of largest weight to compare.")] = 5,
    contexts: Annotated[int, typer.Option(help="Other texts before each document.")] = 8,
    documents: Annotated[int, typer.Option(help="Documents whose last tokens stay.")] = 8,
    trust: Annotated[float, typer.Option(help="Share of the top keys that a trusted head keeps.")] = 0.8,
) -> None:
    """Measure whether the top keys of every head stay the same when the text before them changes.

    Example: limitlens stability minilm --keys 256 --out runs/stability
    """
