"""`limitlens plan`: budgets and key policies of a decoder's KV cache."""

import re
from typing import Annotated, Any

import typer

from limitlens.cli.common import Result, command, size

_TEXT = "Calibration text; default: that of --run, or stdlib-docs."
_POLICY = "Key policy: best for each head, or one by name (snapkv, random, ...)."
_RUN = "Folder of a probe, whose error curves give budgets of random keys."


@command("measuring windows", "windows", shares="seed device", kept=True)
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Decoder: alias, folder, GGUF file or hub id.")],
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help=_TEXT)] = None,
    total: Annotated[
        str | None, typer.Option(metavar="SHARE|SIZE", help="Cache size: 0.25 (default), or 16MB.")
    ] = None,
    error: Annotated[float | None, typer.Option(help="Relative output error of each head, instead of --total.")] = None,
    context: Annotated[int, typer.Option(help="Prompt length at which the cache is cut.")] = 4096,
    policy: Annotated[str, typer.Option(help=_POLICY)] = "best",
    run: Annotated[str | None, typer.Option(metavar="RUN", help=_RUN)] = None,
    **shared: Any,
) -> Result:
    """Choose how many keys each key/value head keeps, and by which key policy, for a cache size or an error.

    Example: limitlens plan smollm2 --total 0.25 --context 1024 --out runs/plan; limitlens trial runs/plan then measures
    the model with the plan.
    """
    from limitlens.cache.plan import plan as make

    options = {"total": _total(total), "error": error, "context": context, "policy": policy, "run": run}
    return make(model, corpus, **options, **shared)  # type: ignore[arg-type]


def _total(given: str | None) -> float | int | None:
    """A share of the cache, or bytes if a unit follows."""
    if given is not None and re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", given):
        return float(given)
    return size("--total", given, "a share such as 0.25, or a size such as 16MB")
