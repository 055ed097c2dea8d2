"""`limitlens attributions`: which heads attend to the same keys behind another text."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Device, Json, Model, Out, Overwrite, Quiet, Seed, begin, progress, show


def attributions(
    context: typer.Context,
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[int, typer.Option(help="Tokens of context that are replaced.")] = 256,
    top: Annotated[int, typer.Option(help="Keys of largest weight that should stay.")] = 5,
    contexts: Annotated[int, typer.Option(help="Texts that stand before each document.")] = 8,
    documents: Annotated[int, typer.Option(help="Documents whose last tokens stay.")] = 8,
    trust: Annotated[float, typer.Option(help="Share of the top keys that must stay for a head to be trusted.")] = 0.8,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How the top keys of every head change when the text before them is another one.

    Example: limitlens attributions minilm --keys 256 --out runs/attributions
    """
    from limitlens.live.attributions import attributions as run

    started = begin(context)
    with progress(f"attributions in {model}", quiet, unit="documents") as report:
        made = run(
            model, corpus, keys, top=top, contexts=contexts, documents=documents, trust=trust, seed=seed, device=device,
            progress=report,
        )  # fmt: skip
    show(context, "attributions", made, started=started, out=out, json=json, quiet=quiet)
