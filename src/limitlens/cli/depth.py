"""`limitlens depth`: error through the layers when each query attends to n sampled keys."""

from typing import Annotated

import typer

from limitlens.cli.common import Corpus, Model, Special, command


@command("reading documents", "documents", runs="interventions.depth", shares="seed device yes", kept=True)
def depth(
    model: Model,
    corpus: Corpus = "stdlib-docs",
    keys: Annotated[str, typer.Option(help="Keys of each query: lo:hi:k, or numbers.")] = "16:256:5",
    key_sharing: Annotated[
        str, typer.Option(metavar="shared,own", help="Whether the queries of a document share their keys.")
    ] = "shared",
    include: Annotated[
        str, typer.Option(metavar="fixed,single,heads", help="Additional runs, or none: keys fixed across layers, "
                          "single layers, sums over heads.")
    ] = "fixed,single,heads",
    replicates: Annotated[int, typer.Option(min=1, help="Random draws per document.")] = 1,
    documents: Annotated[int, typer.Option(min=2, help="Number of documents.")] = 16,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of a document; at most 512 by default.")] = None,
    special: Special = "auto",
) -> None:  # fmt: skip
    """Measure the error of attention over n sampled keys through the layers, and its effect on predictions.

    Example: limitlens depth minilm --keys 16:512:6 --key-sharing shared,own --out runs/depth
    """
