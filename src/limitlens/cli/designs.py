"""`limitlens designs`: sparse designs in every head of a live model."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Device, Json, Model, Out, Overwrite, Quiet, Seed, begin, progress, show


def designs(
    context: typer.Context,
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(metavar="LO:HI:K", help="Numbers of keys.")] = "16:512:6",
    only: Annotated[str | None, typer.Option(metavar="A,B,...", help="These designs; all when left out.")] = None,
    tokens: Annotated[int, typer.Option("--context", help="Tokens a document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents that are read.")] = 32,
    queries: Annotated[int, typer.Option(help="Places of a document whose queries are asked.")] = 4,
    special: Annotated[str, typer.Option(metavar="auto|none|bos", help="Tokens around a document.")] = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Windows, strides, blocks, random keys, projections: error, bias floor and rate at equal number of keys.

    Example: limitlens designs minilm --keys 16:512:6 --out runs/designs
    """
    from limitlens.live.designs import designs as run_designs
    from limitlens.live.designs_result import DESIGNS

    started, names = begin(context), tuple(DESIGNS) if only is None else tuple(only.split(","))
    with progress(f"designs in {model}", quiet, unit="layers") as report:
        made = run_designs(
            model, corpus, keys, designs=names, context=tokens, documents=documents, queries=queries, special=special,
            seed=seed, device=device, progress=report,
        )  # fmt: skip
    show(context, "designs", made, started=started, out=out, json=json, quiet=quiet)
