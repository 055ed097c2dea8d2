"""Options, progress and output that commands share: progress on stderr, a JSON document or text on stdout."""

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
from limitlens.cli.threads import limited_threads
from limitlens.errors import InputError, Progress
from limitlens.results import Result as Result

if TYPE_CHECKING:
    from limitlens.sampling.checkpoint import Checkpoint

Model = Annotated[str, typer.Argument(help="minilm, smollm2, a folder, a GGUF file or a hub id.")]
Corpus = Annotated[str, typer.Option("--corpus", help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")]
Special = Annotated[str, typer.Option("--special", metavar="auto|none|bos", help="Special tokens around each text.")]
Law = Annotated[str, typer.Option("--measure", help="gaussian, mixture, sphere, vmf, ball or cube.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random choice.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Device that computes.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; when left out, fewer on a busy machine.")
]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Write run.json and tables to this folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run of another command in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no warnings on stderr.")]

CHECKPOINT = ("checkpoint_every", "resume")  # options of a command that can be resumed
EVERY = "Write a checkpoint to --out after so many tokens or seconds."
PRECISION = "Precision of attention on a GPU: 1e-3, 1e-6 or float32."
SHARED: dict[str, tuple[Any, Any]] = {  # options that several commands have, with their defaults
    "seed": (Seed, 0),
    "device": (Device, "auto"),
    "threads": (Threads, None),
    "precision": (Annotated[str, typer.Option(metavar="fast|accurate|exact", help=PRECISION)], "accurate"),
    "memory": (Annotated[str | None, typer.Option(metavar="SIZE", help="Most memory to use, such as 4GB.")], None),
    "ray": (Annotated[str | None, typer.Option(metavar="auto|HOST:PORT", help="Run on a Ray cluster.")], None),
    "plot": (Annotated[bool, typer.Option("--plot", help="Save a figure in --out, or in this folder.")], False),
    "out": (Out, None),
    "overwrite": (Overwrite, False),
    "yes": (Annotated[bool, typer.Option("--yes", help="Start even if it takes long or much memory.")], False),
    "checkpoint_every": (Annotated[str | None, typer.Option(metavar="TOKENS|60s", help=EVERY)], None),
    "resume": (Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")], False),
    "json": (Json, False),
    "quiet": (Quiet, False),
}


def command(
    title: str = "", unit: str = "steps", *, runs: str = "", shares: str = "", draws: str = "", kept: bool = False,
    keeps: bool = False, page: bool = False, computes: bool = True,
) -> Callable[[Callable[..., Result | None]], Callable[..., None]]:  # fmt: skip
    """Decorator that turns a function from options to a result into a command that saves, draws and prints it.

    The command gets the function's options, those that every command has, and those of `SHARED` that are named here.

    Parameters
    ----------
    title, unit : title of the progress bar, which may name options in braces, and the unit that it counts; with a title
        the function is passed a `progress`.
    runs : module of limitlens whose function of the same name does the work; the decorated function then only declares
        the options.
    shares : options of `SHARED` that are passed to the function, separated by spaces.
    draws : name of a figure, with options in braces, that is saved in --out.
    kept : whether the work can be resumed; the function is then passed a `checkpoint`.
    keeps : whether the function is passed `keep`, a function that saves an intermediate result in --out.
    page : whether the HTML page is written to --out too.
    computes : whether the command has --threads.
    """
    passed = [name for name in shares.split() if name != "plot"]
    options = {"out", "overwrite", "json", "quiet", *(CHECKPOINT if kept else ()), *shares.split()}
    options |= {"threads"} if computes else set()

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        name = function.__name__
        parameters = {one.name: one for one in signature(function, eval_str=True).parameters.values()}
        own = [one for one in parameters.values() if one.kind is not one.VAR_KEYWORD and one.name != "call"]
        more = [
            Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in SHARED.items()
            if option in options
        ]

        @wraps(function)
        def run(call: typer.Context, **given: Any) -> None:
            started = begin(call, name)
            arguments = {one.name: given[one.name] for one in own} | {option: given[option] for option in passed}
            if "call" in parameters:
                arguments["call"] = call
            if "memory" in passed:
                arguments["memory"] = size("--memory", given["memory"])
            checkpoint = make_checkpoint(*(given[option] for option in ("out", *CHECKPOINT))) if kept else None
            if kept:
                arguments["checkpoint"] = checkpoint
            if keeps:
                arguments["keep"] = lambda result: given["out"] and result.save(given["out"], given["overwrite"])
            with limited_threads(given.get("threads")):
                with progress(title.format(**given), given["quiet"], unit) if title else nullcontext() as report:
                    work = getattr(import_module(f"limitlens.{runs}"), name) if runs else function
                    result = work(**arguments, **({"progress": report} if title else {}))
                result = replace(result, made=record.provenance(name, call.params, started))
            plot = draws.format(**given) if draws and given["out"] else name if given.get("plot") else None
            show(call, result, plot, checkpoint)
            if page and given["out"] is not None:
                result.report(given["out"])

        first = Parameter("call", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        run.__signature__ = Signature([first, *own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (first, *own, *more)}
        return run

    return decorate


def progress_text(unit: str, done: float, total: float) -> str:
    """How far the work is, with its unit: "window 3 of 12"."""
    return f"{unit.removesuffix('s')} {done:,.0f} of {total:,.0f}" + (", finishing" if done >= total else "")


@contextmanager
def progress(title: str, quiet: bool, unit: str = "steps") -> Iterator[Progress]:
    """Progress bar on stderr with unit, speed and time left; none if stderr is not a terminal or `quiet` is set."""
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

        def report(done: float, total: float) -> None:
            # Work may go on after the last unit: a bar without a total moves, where one at 100% would stand.
            moving = None if done >= total else total
            bar.update(task, completed=done, total=moving, description=f"{title}: {progress_text(unit, done, total)}")

        yield report


def begin(context: typer.Context, name: str) -> datetime:
    """Set up messages on stderr and check the folder --out before the work; return the time."""
    handler = logging.StreamHandler()  # on stderr
    handler.setFormatter(logging.Formatter("limitlens: %(message)s"))
    logger = logging.getLogger("limitlens")
    logger.handlers = [] if context.params["quiet"] else [handler]
    logger.level = logging.INFO
    if context.params["out"] is not None:
        with record.open_folder(context.params["out"], name, context.params["overwrite"]):
            pass
    return datetime.now(UTC)


def make_checkpoint(out: str | None, every: str | None, resume: bool) -> Checkpoint | None:
    """The checkpoint of a run folder, written every so often if asked for, and whenever the work is interrupted."""
    from limitlens.sampling.checkpoint import Checkpoint

    if out is None and (every is not None or resume):
        option = "--resume" if resume else "--checkpoint-every"
        raise InputError(f"{option} was given without --out; expected the folder of the checkpoint, --out DIR")
    return None if out is None else Checkpoint(out, every, resume=resume)


def first_given(context: typer.Context, names: Sequence[str]) -> str | None:
    """The first of these options that the user gave, such as --mask-self; None if all were left out."""
    given = (name for name in names if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT")
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def whole_number(option: str, given: float, example: str) -> int:
    """A number of at least 1 that may be written as 1e5."""
    if not (given >= 1 and float(given).is_integer()):
        raise InputError(f"{option} is {given:g}; expected a whole number of at least 1, such as {example}")
    return int(given)


def size(option: str, text: str | None, expected: str = "a size such as 16MB or 4GiB") -> int | None:
    """Bytes from "4GB" or "512MiB": kB, MB and GB are powers of 1,000; KiB, MiB and GiB of 1,024."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]?)(i?)b\s*", text or "", re.IGNORECASE)
    if text is not None and match is None:
        raise InputError(f"{option} is {text!r}; expected {expected}")
    return match and int(float(match[1]) * (1024 if match[3] else 1000) ** " kmg".index(match[2].lower() or " "))


def spectrum_of(text: str) -> str | list[float]:
    """The name of a spectrum, or its numbers."""
    from limitlens.sampling.cells import parse_grid

    return text if text in ("flat", "1/k") else parse_grid(text, "the spectrum, where neither flat nor 1/k,")


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(record.json_text(document))


def show(context: typer.Context, result: Result, plot: str | None, checkpoint: Checkpoint | None) -> None:
    """Save, draw (as `plot`.png) and print a result with its warnings; exit with 130 if it was interrupted.

    The checkpoint of a finished result is removed.
    """
    from limitlens.report import terminal

    out = context.params["out"]
    drawing = None if plot is None else result.plot()  # first: if it fails, no folder that looks complete is left
    if out is not None:
        result.save(out, context.params["overwrite"])
    if drawing is not None:
        endings = ("png",) if out is None else ("png", "pdf")
        record.write_files({Path(out or ".") / f"{plot}.{ending}": drawing.savefig for ending in endings})
    if context.params["json"]:
        print_json(result.document())
    else:
        terminal.show(result.view())
    warn(getattr(result, "warnings", ()), context.params["quiet"])
    if getattr(result, "interrupted", False):
        raise typer.Exit(130)
    if checkpoint is not None:
        checkpoint.remove()


def warn(warnings: Sequence[str], quiet: bool) -> None:
    """Print warnings on stderr, one line each."""
    for warning in () if quiet else warnings:
        print(f"warning: {in_options(warning)}", file=sys.stderr)


def in_options(message: str) -> str:
    """A message with Python arguments as options: mask_self=True as --mask-self, special='bos' as --special bos."""

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')}{' ' * bool(match[2])}{match[2] or ''}"

    return re.sub(r"\b([a-z_]+)=(?:True\b|'(\w+)')", option, message)
