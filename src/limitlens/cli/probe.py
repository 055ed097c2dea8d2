"""`limitlens probe`: measure every head of a transformer in one pass over a corpus."""

from typing import Annotated, Any

import typer

from limitlens.cli import common

SAMPLING = "Draw samples from all windows, or from single ones."


@common.command("probing {model}", "tokens", shares="seed device precision memory ray yes", kept=True)
def probe(
    model: common.Model,
    corpus: common.Corpus = "stdlib-docs",
    tokens: Annotated[float, typer.Option(help="Number of tokens to read.")] = 1e5,
    window: Annotated[int | None, typer.Option(help="Tokens per window; 256 by default.")] = None,
    special: common.Special = "auto",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Sample sizes n.")] = "64:4096:7",
    replicates: Annotated[int, typer.Option(help="Disjoint samples of each size.")] = 24,
    queries: Annotated[int, typer.Option(help="Queries per head.")] = 256,
    sampling: Annotated[str, typer.Option(metavar="pooled|document|contiguous", help=SAMPLING)] = "pooled",
    score_scale: Annotated[float, typer.Option(help="Factor on every score; the forward is unchanged.")] = 1.0,
    batch: Annotated[int | None, typer.Option(help="Windows per forward; about 4,000 tokens by default.")] = None,
    averaging_power: Annotated[float, typer.Option(help="Averaging: at least n^power effective tokens.")] = 0.5,
    averaging_growth: Annotated[float, typer.Option(help="Averaging: they grow at least like n^this.")] = 0.75,
    frozen_weight: Annotated[float, typer.Option(help="Frozen: the largest weight is at least this.")] = 0.5,
    frozen_growth: Annotated[float, typer.Option(help="Frozen: effective tokens grow at most like n^this.")] = 0.3,
    **shared: Any,
) -> common.Result:
    """Measure every head of a transformer in one pass: error curves, rates, regimes, tokens needed.

    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """
    from limitlens.probing.probe import probe as run
    from limitlens.probing.regimes import Thresholds

    count = common.whole_number("tokens", tokens, "100000 or 1e5")
    thresholds = Thresholds(averaging_power, averaging_growth, frozen_weight, frozen_growth)
    return run(
        model, corpus, count, window=window, special=special, sizes=sizes, replicates=replicates, queries=queries,
        sampling=sampling, score_scale=score_scale, batch=batch, thresholds=thresholds, **shared,
    )  # fmt: skip
