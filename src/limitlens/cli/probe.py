"""`limitlens probe`: every head of a real transformer, in one pass over a corpus."""

from typing import Annotated, Any

import typer

from limitlens.cli import common

# What only a run that measures needs.
MEASURING = (
    "replicates", "sampling", "score_scale", "batch", "averaging_power", "averaging_growth", "frozen_weight",
    "frozen_growth", "checkpoint_every", "resume", "memory", "ray", "precision",
)  # fmt: skip


@common.command(shares="seed device precision memory ray yes", kept=True)
def probe(
    call: typer.Context,
    model: common.Model,
    corpus: common.Corpus = "stdlib-docs",
    tokens: Annotated[float | None, typer.Option(help="Tokens to read; 1e5, or 3072 with --pilot-only.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens a window; 256 when left out.")] = None,
    special: common.Special = "auto",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Sample sizes n.")] = "64:4096:7",
    replicates: Annotated[int, typer.Option(help="Samples behind every point.")] = 24,
    queries: Annotated[int | None, typer.Option(help="Queries a head; 256, or 48 with --pilot-only.")] = None,
    sampling: Annotated[
        str, typer.Option(metavar="pooled|document|contiguous", help="Samples of all windows, or of single ones.")
    ] = "pooled",
    score_scale: Annotated[float, typer.Option(help="Multiplies every score; the forward stays as it is.")] = 1.0,
    pilot_only: Annotated[bool, typer.Option("--pilot-only", help="Foretell heads from a few tokens alone.")] = False,
    batch: Annotated[int | None, typer.Option(help="Windows a forward; about 4,000 tokens when left out.")] = None,
    averaging_power: Annotated[float, typer.Option(help="An averaging head has n^power effective tokens.")] = 0.5,
    averaging_growth: Annotated[float, typer.Option(help="And their number grows like n^this.")] = 0.75,
    frozen_weight: Annotated[float, typer.Option(help="A frozen head gives one key this weight.")] = 0.5,
    frozen_growth: Annotated[float, typer.Option(help="And its effective tokens grow at most like this.")] = 0.3,
    **shared: Any,
) -> common.Result:
    """Every head of a real transformer in one pass over a corpus: errors, rates, regimes, tokens needed.

    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """
    from limitlens.errors import InputError
    from limitlens.probing.predict import predict
    from limitlens.probing.probe import probe as run
    from limitlens.probing.regimes import Thresholds

    tokens = (3072 if pilot_only else 1e5) if tokens is None else tokens
    queries = (48 if pilot_only else 256) if queries is None else queries
    if not (tokens >= 1 and float(tokens).is_integer()):
        raise InputError(f"tokens is {tokens:g}; expected a whole number of at least 1, such as 100000 or 1e5")
    thresholds = Thresholds(averaging_power, averaging_growth, frozen_weight, frozen_growth)
    options: dict[str, Any] = {"window": window, "special": special, "sizes": sizes, "queries": queries}
    if pilot_only:
        if (name := common.first_given(call, MEASURING)) is not None:
            raise InputError(f"{name} is of no use with --pilot-only, which measures nothing")
        options |= {name: shared[name] for name in ("seed", "device")}
        with common.progress(f"foretelling {model}", call.params["quiet"], unit="layers") as report:
            return predict(model, corpus, tokens=int(tokens), progress=report, **options)
    options |= {"replicates": replicates, "score_scale": score_scale, "batch": batch, "thresholds": thresholds}
    options["sampling"] = sampling
    with common.progress(f"probing {model}", call.params["quiet"], unit="tokens") as report:
        return run(model, corpus, int(tokens), progress=report, **options, **shared)
