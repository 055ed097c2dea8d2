"""`limitlens designs`: sparse designs in every head of a live model."""

from typing import Annotated, Any

import typer

from limitlens.cli.common import Corpus, Model, Result, Special, command


@command("designs in {model}", "layers", shares="seed device")
def designs(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of keys.")] = "16:512:6",
    only: Annotated[str | None, typer.Option(metavar="A,B,...", help="These designs; all when left out.")] = None,
    tokens: Annotated[int, typer.Option("--context", help="Tokens a document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents that are read.")] = 32,
    queries: Annotated[int, typer.Option(help="Places of a document whose queries are asked.")] = 4,
    special: Special = "auto",
    **shared: Any,
) -> Result:
    """Windows, strides, blocks, random keys, projections: error, bias floor and rate at equal number of keys.

    Example: limitlens designs minilm --keys 16:512:6 --out runs/designs
    """
    from limitlens.live.designs import designs as run
    from limitlens.live.designs_result import DESIGNS

    names = tuple(DESIGNS) if only is None else tuple(only.split(","))
    options: dict[str, Any] = {"context": tokens, "documents": documents, "queries": queries, "special": special}
    return run(model, corpus, keys, designs=names, **options, **shared)
