"""What commands share: the options of the contract, progress on stderr, a JSON document or a page on stdout."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens import record
from limitlens.errors import InputError, Progress

if TYPE_CHECKING:
    from limitlens.results import Result
    from limitlens.sampling.checkpoint import Checkpoint

Model = Annotated[str, typer.Argument(help="minilm, smollm2, a folder, a GGUF file or a hub id.")]
Corpus = Annotated[str, typer.Option("--corpus", help="stdlib-docs, stdlib-code, a file or a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Leave run.json and tables in this folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what another command left in --out.")]
Yes = Annotated[bool, typer.Option("--yes", help="Begin though it takes long, or more memory than there is.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Every random choice comes from it.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where kernels run.")]
Precision = Annotated[
    str, typer.Option("--precision", metavar="fast|accurate|exact", help="Of attention on a GPU: 1e-3, 1e-6, float32.")
]
Ray = Annotated[str | None, typer.Option("--ray", metavar="auto|HOST:PORT", help="Spread work over a Ray cluster.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no warnings on stderr.")]
Every = Annotated[
    str | None,
    typer.Option("--checkpoint-every", metavar="TOKENS|60s", help="Keep the work in --out, each so many tokens or s."),
]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Hold no more than so much: 4GB.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if there is one.")]


@contextmanager
def progress(title: str, quiet: bool, unit: str = "steps") -> Iterator[Progress]:
    """A progress bar on stderr with units a second and the time left: silent when piped or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.text import Text

    class Speed(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else "")

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(), Speed(),
        rich.TimeRemainingColumn(),
    )  # fmt: skip
    # A block of tokens takes seconds: speed is averaged over minutes, or it would show nothing.
    with rich.Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=300) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Said(logging.Handler):
    """What the library says of its work, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"limitlens: {record.getMessage()}", file=sys.stderr)


def begin(context: typer.Context) -> datetime:
    """Try the run folder where one is asked for, so that a bad path is told before the work; when that began."""
    given, logger = context.params, logging.getLogger("limitlens")
    logger.handlers, logger.level = ([] if given.get("quiet") else [_Said()]), logging.INFO
    if given["out"] is not None:
        with record.open_folder(given["out"], str(context.info_name), given["overwrite"]):
            pass
    return datetime.now(UTC)


def kept(out: str | None, every: str | None, resume: bool) -> Checkpoint | None:
    """The checkpoint of a run folder: written where asked for, and in any case when the work is interrupted."""
    if out is None:
        if every is not None or resume:
            given = "--resume" if resume else "--checkpoint-every"
            raise InputError(f"{given} was given without --out; expected the folder that keeps the work, --out DIR")
        return None
    from limitlens.sampling.checkpoint import Checkpoint

    return Checkpoint(out, every, resume=resume)


def size(option: str, given: str | None, expected: str = "a size such as 16MB or 4GiB") -> int | None:
    """Bytes from "4GB" or "512MiB": kB, MB and GB are thousands, KiB, MiB and GiB 1,024s."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]?)(i?)b\s*", given or "", re.IGNORECASE)
    if given is not None and found is None:
        raise InputError(f"{option} is {given!r}; expected {expected}")
    return found and int(float(found[1]) * (1024 if found[3] else 1000) ** " kmg".index(found[2].lower() or " "))


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(record.to_json(document))


def show(
    context: typer.Context,
    command: str,
    result: Result,
    *,
    started: datetime,
    out: str | None = None,
    json: bool = False,
    quiet: bool = False,
    plot: str | None = None,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Save a result where asked, draw it as `plot`.png, print it as JSON or for people, warn; 130 where cut short.

    The checkpoint of a result that is saved whole is taken away.
    """
    from limitlens.report import terminal

    done: Result = replace(result, made=record.provenance(command, context.params, started))
    drawing = None if plot is None else done.plot()  # before anything is left that looks whole
    if out is not None:
        done.save(out, context.params["overwrite"])
    if drawing is not None:
        endings = ("png",) if out is None else ("png", "pdf")
        record.write_all({Path(out or ".") / f"{plot}.{ending}": drawing.savefig for ending in endings})
    if json:
        print_json(done.document())
    else:
        terminal.show(done.view())
    warn(getattr(done, "warnings", ()), quiet)
    if getattr(done, "interrupted", False):
        raise typer.Exit(130)
    if checkpoint is not None:
        checkpoint.remove()


def warn(warnings: Sequence[str], quiet: bool) -> None:
    """Warnings on stderr, one line each."""
    for warning in () if quiet else warnings:
        print(f"warning: {spoken(warning)}", file=sys.stderr)


def spoken(words: str) -> str:
    """Words of the library in those of the command line: mask_self=True is --mask-self, special='bos' --special bos."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}{' ' * bool(found[2])}{found[2] or ''}"

    return re.sub(r"\b([a-z_]+)=(?:True\b|'(\w+)')", flag, words)
