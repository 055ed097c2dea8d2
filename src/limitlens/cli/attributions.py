"""`limitlens attributions`: which heads attend to the same keys behind another text."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Corpus, Model, Result, command


@command("attributions in {model}", "documents", shares="seed device")
def attributions(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[int, typer.Option(help="Tokens of context that are replaced.")] = 256,
    top: Annotated[int, typer.Option(help="Keys of largest weight that should stay.")] = 5,
    contexts: Annotated[int, typer.Option(help="Texts that stand before each document.")] = 8,
    documents: Annotated[int, typer.Option(help="Documents whose last tokens stay.")] = 8,
    trust: Annotated[float, typer.Option(help="Share of the top keys that must stay for a head to be trusted.")] = 0.8,
    **shared: Any,
) -> Result:
    """How the top keys of every head change when the text before them is another one.

    Example: limitlens attributions minilm --keys 256 --out runs/attributions
    """
    from limitlens.live.attributions import attributions as run

    return run(model, corpus, keys, top=top, contexts=contexts, documents=documents, trust=trust, **shared)
