"""`limitlens temper`: factors on the scores of a decoder beyond its context."""

from typing import Annotated

import typer

from limitlens.cli.common import command


@command("tempering {model}", runs="interventions.temper", shares="seed device", keeps=True)
def temper(
    model: Annotated[str, typer.Argument(help="A decoder: smollm2, a folder, a GGUF file or a hub id.")],
    to: Annotated[int, typer.Option(help="Tokens of the longer context.")],
    text: Annotated[str, typer.Option(help="The text that exponents are fitted and tried on.")] = "stdlib-docs",
    other: Annotated[str | None, typer.Option(help="A text that is never fitted.")] = None,
    stretch: Annotated[str, typer.Option(metavar="none|linear|ntk|yarn", help="Of the rotary positions.")] = "yarn",
    far: Annotated[
        list[float], typer.Option(metavar="W", help="Weight of far use in a fit, 0 to 1; may be given several times.")
    ] = [0.0, 0.2],  # noqa: B006 - typer reads it and nobody writes it
    per: Annotated[str, typer.Option(metavar="head|layer|model", help="Who has an exponent of its own.")] = "head",
    constant: Annotated[bool, typer.Option("--constant", help="Fit constant factors too.")] = False,
    trained: Annotated[int | None, typer.Option(min=1, help="The trained window; the model's when left out.")] = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents of each text that are read, at most.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each fit, at most.")] = 24,
    seconds: Annotated[float, typer.Option(help="Begin nothing that would not end within.")] = float("inf"),
) -> None:
    """Exponents of a decoder's heads for a longer context: fitted, tried on both axes, held against truncation.

    Example: limitlens temper smollm2 --to 32768 --text wikipedia.txt --far 0.2 --constant --out runs/temper
    """
