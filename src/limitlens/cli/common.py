"""What commands share: the options of the contract, progress on stderr, a JSON document or a page on stdout."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitlens import record
from limitlens.errors import InputError, Progress
from limitlens.results import Result as Result

if TYPE_CHECKING:
    from limitlens.sampling.checkpoint import Checkpoint

Model = Annotated[str, typer.Argument(help="minilm, smollm2, a folder, a GGUF file or a hub id.")]
Corpus = Annotated[str, typer.Option("--corpus", help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")]
Special = Annotated[str, typer.Option("--special", metavar="auto|none|bos", help="Tokens put around each text.")]
Law = Annotated[str, typer.Option("--measure", help="gaussian, mixture, sphere, vmf, ball or cube.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Every random choice comes from it.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where kernels run.")]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Leave run.json and tables in this folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what another command left in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no warnings on stderr.")]

KEPT = ("checkpoint_every", "resume")  # options of a command whose work can be kept on its way
EVERY, PRECISION = "Keep the work in --out, each so many tokens or s.", "Of attention on a GPU: 1e-3, 1e-6, float32."
SHARED: dict[str, tuple[Any, Any]] = {  # options that commands have in common, and what they are when left out
    "seed": (Seed, 0),
    "device": (Device, "auto"),
    "precision": (Annotated[str, typer.Option(metavar="fast|accurate|exact", help=PRECISION)], "accurate"),
    "memory": (Annotated[str | None, typer.Option(metavar="SIZE", help="Hold no more than so much: 4GB.")], None),
    "ray": (Annotated[str | None, typer.Option(metavar="auto|HOST:PORT", help="Spread over a Ray cluster.")], None),
    "plot": (Annotated[bool, typer.Option("--plot", help="Save a figure (in --out, or here).")], False),
    "out": (Out, None),
    "overwrite": (Overwrite, False),
    "yes": (Annotated[bool, typer.Option("--yes", help="Begin though it takes long, or much memory.")], False),
    "checkpoint_every": (Annotated[str | None, typer.Option(metavar="TOKENS|60s", help=EVERY)], None),
    "resume": (Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if any.")], False),
    "json": (Json, False),
    "quiet": (Quiet, False),
}


def command(
    title: str = "", unit: str = "steps", *, runs: str = "", shares: str = "", draws: str = "", kept: bool = False,
    keeps: bool = False, page: bool = False,
) -> Callable[[Callable[..., Result | None]], Callable[..., None]]:  # fmt: skip
    """A function from options to a result as a command that saves, draws and prints it.

    Beside its own options it gets those every command has and those of `SHARED` that it `shares`, as keywords; with a
    `title`, which may name options, a `progress`, with `kept` a `checkpoint`, with `keeps` a `keep` that saves what is
    known so far. Where it `runs` a module's function of its own name, whose parameters its options are, it is their
    declaration alone. What it `draws`, by a name that may name options, and its `page` are left in --out too.
    """
    passed = [name for name in shares.split() if name != "plot"]
    usual = ("out", "overwrite", "json", "quiet", *(KEPT if kept else ()), *shares.split())

    def made(function: Callable[..., Any]) -> Callable[..., None]:
        name = function.__name__
        known = {one.name: one for one in signature(function, eval_str=True).parameters.values()}
        own = [one for one in known.values() if one.kind is not one.VAR_KEYWORD and one.name != "call"]
        more = [
            Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in SHARED.items()
            if option in usual
        ]

        @wraps(function)
        def run(call: typer.Context, **given: Any) -> None:
            started, asked = begin(call, name), {one.name: given[one.name] for one in own}
            asked |= {option: given[option] for option in passed} | ({"call": call} if "call" in known else {})
            if "memory" in passed:
                asked["memory"] = size("--memory", given["memory"])
            checkpoint = kept_in(*(given[option] for option in ("out", *KEPT))) if kept else None
            asked |= {"checkpoint": checkpoint} if kept else {}
            if keeps:
                asked["keep"] = lambda made: given["out"] and made.save(given["out"], given["overwrite"])
            with progress(title.format(**given), given["quiet"], unit) if title else nullcontext() as report:
                work = getattr(import_module(f"limitlens.{runs}"), name) if runs else function
                result = work(**asked, **({"progress": report} if title else {}))
            plot = draws.format(**given) if draws and given["out"] else name if given.get("plot") else None
            shown = show(call, name, result, started, plot, checkpoint=checkpoint)
            if page and given["out"] is not None:
                shown.report(given["out"])

        first = Parameter("call", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        run.__signature__ = Signature([first, *own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (first, *own, *more)}
        return run

    return made


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


def begin(context: typer.Context, name: str) -> datetime:
    """Try the run folder where one is asked for, so that a bad path is told before the work; when that began."""
    given, logger, said = context.params, logging.getLogger("limitlens"), logging.StreamHandler()  # on stderr
    said.setFormatter(logging.Formatter("limitlens: %(message)s"))
    logger.handlers, logger.level = ([] if given["quiet"] else [said]), logging.INFO
    if given["out"] is not None:
        with record.open_folder(given["out"], name, given["overwrite"]):
            pass
    return datetime.now(UTC)


def kept_in(out: str | None, every: str | None, resume: bool) -> Checkpoint | None:
    """The checkpoint of a run folder: written where asked for, and in any case when the work is interrupted."""
    from limitlens.sampling.checkpoint import Checkpoint

    if out is None and (every is not None or resume):
        given = "--resume" if resume else "--checkpoint-every"
        raise InputError(f"{given} was given without --out; expected the folder that keeps the work, --out DIR")
    return None if out is None else Checkpoint(out, every, resume=resume)


def first_given(context: typer.Context, names: Sequence[str]) -> str | None:
    """The first of these options that was given, as it was; None where all were left out."""
    given = (name for name in names if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT")
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def whole_number(option: str, given: float, example: str) -> int:
    """A count that may be written as 1e5."""
    if not (given >= 1 and float(given).is_integer()):
        raise InputError(f"{option} is {given:g}; expected a whole number of at least 1, such as {example}")
    return int(given)


def size(option: str, given: str | None, expected: str = "a size such as 16MB or 4GiB") -> int | None:
    """Bytes from "4GB" or "512MiB": kB, MB and GB are thousands, KiB, MiB and GiB 1,024s."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]?)(i?)b\s*", given or "", re.IGNORECASE)
    if given is not None and found is None:
        raise InputError(f"{option} is {given!r}; expected {expected}")
    return found and int(float(found[1]) * (1024 if found[3] else 1000) ** " kmg".index(found[2].lower() or " "))


def spectrum_of(given: str) -> str | list[float]:
    """A spectrum by its name, or its numbers."""
    from limitlens.sampling.cells import parse_grid

    return given if given in ("flat", "1/k") else parse_grid(given, "the spectrum, where neither flat nor 1/k,")


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(record.json_text(document))


def show(
    context: typer.Context, name: str, result: Result, started: datetime, plot: str | None = None,
    *, checkpoint: Checkpoint | None = None,
) -> Result:  # fmt: skip
    """Save a result, draw it as `plot`.png, print it, warn; exit 130 where cut short, else its checkpoint goes."""
    from limitlens.report import terminal

    given, done = context.params, replace(result, made=record.provenance(name, context.params, started))
    drawing = None if plot is None else done.plot()  # before anything is left that looks whole
    if given["out"] is not None:
        done.save(given["out"], given["overwrite"])
    if drawing is not None:
        endings = ("png",) if given["out"] is None else ("png", "pdf")
        record.write_files({Path(given["out"] or ".") / f"{plot}.{ending}": drawing.savefig for ending in endings})
    if given["json"]:
        print_json(done.document())
    else:
        terminal.show(done.view())
    warn(getattr(done, "warnings", ()), given["quiet"])
    if getattr(done, "interrupted", False):
        raise typer.Exit(130)
    if checkpoint is not None:
        checkpoint.remove()
    return done


def warn(warnings: Sequence[str], quiet: bool) -> None:
    """Warnings on stderr, one line each."""
    for warning in () if quiet else warnings:
        print(f"warning: {spoken(warning)}", file=sys.stderr)


def spoken(words: str) -> str:
    """Words of the library in those of the command line: mask_self=True is --mask-self, special='bos' --special bos."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}{' ' * bool(found[2])}{found[2] or ''}"

    return re.sub(r"\b([a-z_]+)=(?:True\b|'(\w+)')", flag, words)
