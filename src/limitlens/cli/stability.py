"""`limitlens stability`: which heads attend to the same keys behind another text."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, command


@command("stability of top keys in {model}", "documents", runs="interventions.stability", shares="seed device")
def stability(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[int, typer.Option(help="Tokens of context that are replaced.")] = 256,
    top: Annotated[int, typer.Option(help="Keys of largest weight that should stay.")] = 5,
    contexts: Annotated[int, typer.Option(help="Texts that stand before each document.")] = 8,
    documents: Annotated[int, typer.Option(help="Documents whose last tokens stay.")] = 8,
    trust: Annotated[float, typer.Option(help="Share of the top keys that must stay for a head to be trusted.")] = 0.8,
) -> None:
    """How the top keys of every head change when the text before them is another one.

    Example: limitlens stability minilm --keys 256 --out runs/stability
    """
