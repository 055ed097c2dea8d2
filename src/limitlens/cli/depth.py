"""`limitlens depth`: error through the layers when each query sees n keys."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli import common


def depth(
    context: typer.Context,
    model: common.Model,
    corpus: Annotated[str, typer.Option(metavar="TEXT", help="The text.")] = "stdlib-docs",
    keys: Annotated[str, typer.Option(help="Keys that each query sees: lo:hi:k, or some numbers.")] = "16:256:5",
    ways: Annotated[str, typer.Option(metavar="shared,own", help="Keys of a document's queries.")] = "shared",
    beside: Annotated[
        str, typer.Option(metavar="fixed,single,heads", help="Run beside keys drawn anew in every layer, or none.")
    ] = "fixed,single,heads",
    replicates: Annotated[int, typer.Option(min=1, help="Draws of each document.")] = 1,
    documents: Annotated[int, typer.Option(min=2, help="Documents that are read.")] = 16,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of a document; up to 512 when left out.")] = None,
    special: Annotated[str, typer.Option(metavar="auto|none|bos", help="Tokens around each document.")] = "auto",
    seed: common.Seed = 0,
    device: common.Device = "auto",
    out: common.Out = None,
    overwrite: common.Overwrite = False,
    checkpoint_every: common.Every = None,
    resume: common.Resume = False,
    yes: common.Yes = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """What a model's layers make of attention over n keys: errors, what they add up to, predictions, heads together.

    Example: limitlens depth minilm --keys 16:512:6 --ways shared,own --out runs/depth
    """
    from limitlens.live.depth import depth as run

    started, checkpoint = common.begin(context), common.kept(out, checkpoint_every, resume)
    more = [] if beside == "none" else beside.split(",")
    with common.progress("reading documents", quiet, "documents") as report:
        made = run(
            model, corpus, keys, ways=ways.split(","), beside=more, replicates=replicates, documents=documents,
            window=window, special=special, seed=seed, device=device, yes=yes, progress=report, checkpoint=checkpoint,
        )  # fmt: skip
    common.show(context, "depth", made, started=started, out=out, json=json, quiet=quiet, checkpoint=checkpoint)
