"""`limitlens probe`: every head of a real transformer, in one pass over a corpus."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Device, Json, Out, Quiet, Seed, begin, progress, show


def probe(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="minilm, smollm2, a folder, a GGUF file or a hub id.")],
    corpus: Annotated[
        str, typer.Option(help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")
    ] = "stdlib-docs",
    tokens: Annotated[float, typer.Option(help="Tokens to read, such as 1e5.")] = 1e5,
    window: Annotated[int | None, typer.Option(help="Tokens a window; 256 when left out.")] = None,
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Sample sizes n.")] = "64:4096:7",
    replicates: Annotated[int, typer.Option(help="Samples behind every point.")] = 24,
    queries: Annotated[int, typer.Option(help="Queries a head.")] = 256,
    batch: Annotated[int | None, typer.Option(help="Windows a forward; about 4,000 tokens when left out.")] = None,
    averaging_power: Annotated[float, typer.Option(help="An averaging head has n^power effective tokens.")] = 0.5,
    averaging_growth: Annotated[
        float, typer.Option(help="And their number grows at least like n to this power.")
    ] = 0.75,
    frozen_weight: Annotated[float, typer.Option(help="A frozen head gives one key this weight.")] = 0.5,
    frozen_growth: Annotated[float, typer.Option(help="And its effective tokens grow at most like this.")] = 0.3,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Every head of a real transformer in one pass over a corpus: errors, rates, regimes, tokens needed.

    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """
    from limitlens.errors import InputError
    from limitlens.heads.probe import probe as run_probe
    from limitlens.heads.regimes import Thresholds

    if not (tokens >= 1 and float(tokens).is_integer()):
        raise InputError(f"tokens is {tokens:g}; expected a whole number of at least 1, such as 100000 or 1e5")
    thresholds = Thresholds(averaging_power, averaging_growth, frozen_weight, frozen_growth)
    started = begin(out)
    with progress(f"probing {model}", quiet, unit="tokens") as report:
        run = run_probe(
            model, corpus, int(tokens), window=window, sizes=sizes, replicates=replicates, queries=queries, seed=seed,
            device=device, batch=batch, thresholds=thresholds, progress=report,
        )  # fmt: skip
    show(context, "probe", run, started=started, out=out, json=json, quiet=quiet)
