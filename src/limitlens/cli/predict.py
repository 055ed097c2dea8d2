"""`limitlens predict`: predict every head's error curve from a pilot of a few thousand tokens."""

from typing import Annotated, Any

import typer

from limitlens.cli import common


@common.command("predicting {model}", "layers", shares="seed device")
def predict(
    model: common.Model,
    corpus: common.Corpus = "stdlib-docs",
    tokens: Annotated[float, typer.Option(help="Number of tokens of the pilot.")] = 3072,
    window: Annotated[int | None, typer.Option(help="Tokens per window; 256 by default.")] = None,
    special: common.Special = "auto",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of tokens n to predict for.")] = "64:4096:7",
    queries: Annotated[int, typer.Option(help="Queries per head.")] = 48,
    **shared: Any,
) -> common.Result:
    """Predict every head's error curve, rate and tokens needed from a few thousand tokens; `probe` measures them.

    Example: limitlens predict minilm --corpus stdlib-docs --out runs/predicted
    """
    from limitlens.probing.predict import predict as run

    count = common.whole_number("tokens", tokens, "3072 or 1e4")
    return run(model, corpus, tokens=count, queries=queries, window=window, special=special, sizes=sizes, **shared)
