"""`limitlens temper`: score factors of a decoder for a longer context."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("tempering {model}", "parts", runs="interventions.temper", shares="seed device", keeps=True)
def temper(
    model: Annotated[str, typer.Argument(help="A decoder: smollm2, a folder, a GGUF file or a hub id.")],
    to: Annotated[int, typer.Option(help="Tokens of the longer context.")],
    text: Annotated[str, typer.Option(help="Text to fit on; its other documents are held out.")] = "stdlib-docs",
    other: Annotated[str | None, typer.Option(help="Second held-out text, never fitted.")] = None,
    rope_scaling: Annotated[
        str, typer.Option(metavar="none|linear|ntk|yarn", help="Scaling of the rotary positions.")
    ] = "yarn",
    retrieval_weight: Annotated[
        list[float],
        typer.Option(metavar="W", help="Weight of retrieval in the loss, 0 to 1; one fit for each that is given."),
    ] = [0.0, 0.2],  # noqa: B006 - typer only reads it
    per: Annotated[str, typer.Option(metavar="head|layer|model", help="What has an exponent of its own.")] = "head",
    constant: Annotated[bool, typer.Option("--constant", help="Fit constant factors too.")] = False,
    trained: Annotated[int | None, typer.Option(min=1, help="Trained window; the model's by default.")] = None,
    documents: Annotated[int, typer.Option(min=2, help="Held-out documents of each text, at most.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps of each fit, at most.")] = 24,
    seconds: Annotated[float, typer.Option(help="Start nothing that would end later.")] = float("inf"),
) -> None:
    """Fit score exponents of a decoder's heads for a longer context, and compare them with YaRN and truncation.

    Every schedule is measured on perplexity and on retrieval from far away.
    Example: limitlens temper smollm2 --to 32768 --text wiki.txt --retrieval-weight 0.2 --constant --out runs/temper
    """
