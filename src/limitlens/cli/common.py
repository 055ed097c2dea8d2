"""Options and output that the commands share: progress goes to stderr, and results to stdout as text or JSON."""

import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from limitlens import record
from limitlens.cli.threads import limited_threads
from limitlens.errors import InputError, Progress, in_options
from limitlens.results import Result as Result

Sizes = Annotated[str, Option(metavar="LO:HI:K", help="Numbers of tokens n.")]
Replicates = Annotated[int, Option(help="Independent samples behind every point.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress and no warnings on stderr.")]

SHARED: dict[str, tuple[Any, Any]] = {  # options that several commands have, with their defaults
    "corpus": (Annotated[str, Option(help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")], "stdlib-docs"),
    "special": (Annotated[str, Option(metavar="auto|none|bos", help="Special tokens around each text.")], "auto"),
    "seed": (Annotated[int, Option(min=0, help="Seed of every random choice.")], 0),
    "device": (Annotated[str, Option(metavar="auto|cpu|cuda", help="Device that computes.")], "auto"),
    "threads": (Annotated[int | None, Option(min=1, max=1024, help="CPU threads; by default all idle cores.")], None),
    "precision": (Annotated[str, Option(metavar="fast|accurate|exact", help="Precision on a GPU. fast: error 1e-3; "
                                        "accurate: 1e-6; exact: float32, slow.")], "accurate"),
    "memory": (Annotated[str | None, Option(metavar="SIZE", help="Most memory to use, such as 4GB.")], None),
    "ray": (Annotated[str | None, Option(metavar="auto|HOST:PORT", help="Run on a Ray cluster.")], None),
    "plot": (Annotated[bool, Option("--plot", help="Save a figure in --out, or in this folder.")], False),
    "out": (Annotated[str | None, Option(metavar="DIR", help="Write run.json and tables to this folder.")], None),
    "overwrite": (Annotated[bool, Option("--overwrite", help="Write to --out even if it holds the result of another "
                                         "command; results of the same command are always replaced.")], False),
    "yes": (Annotated[bool, Option("--yes", help="Start even if it takes long or much memory.")], False),
    "checkpoint_every": (Annotated[str | None, Option(metavar="TOKENS|60s", help="How often to save in --out.")], None),
    "resume": (Annotated[bool, Option("--resume", help="Continue from the checkpoint in --out.")], False),
    "json": (Json, False),
    "quiet": (Quiet, False),
}  # fmt: skip


def command(
    title: str = "", unit: str = "steps", *, runs: str = "", shares: str = "", also: Callable[..., None] | None = None,
    kept: bool = False, keeps: bool = False, page: bool = False, computes: bool = True,
) -> Callable[[Callable[..., Result | None]], Callable[..., None]]:  # fmt: skip
    """Decorator that makes a command of a function: its parameters become options, and its result is saved and printed.

    title, unit : title of a progress bar, such as "probing {model}", and what it counts; the function gets `progress`
    runs : module whose function of the same name does the work; the decorated function then only declares options
    shares : names of further options, from `SHARED`, separated by spaces
    also : another function whose parameters become options too
    kept : the work can be resumed, and the function gets a `checkpoint`
    keeps : the function gets `keep`, which saves an intermediate result in --out
    page : write an HTML page of the result to --out
    computes : add --seed, --device and --threads
    """
    passed = [name for name in shares.split() if name != "plot"]
    options = {"out", "overwrite", "json", "quiet", *shares.split()}
    options |= {"checkpoint_every", "resume"} if kept else set()
    options |= {"seed", "device", "threads"} if computes else set()

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        name = function.__name__
        declared = [one for each in (also, function) if each for one in signature(each).parameters.values()]
        own = [one for one in declared if one.kind is not one.VAR_KEYWORD and one.name not in ("call", *passed)]
        more = [
            Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in SHARED.items()
            if option in options
        ]

        @wraps(function)
        def run(call: typer.Context, **given: Any) -> None:
            started = begin(call, name)
            wanted = {option: given[option] for option in (*(one.name for one in own), *passed)}
            arguments = wanted | {option: CONVERTED[option](wanted[option]) for option in wanted.keys() & CONVERTED}
            if any(one.name == "call" for one in declared):
                arguments["call"] = call
            device = given.get("device", "auto")
            ignored = device not in ("auto", "cpu") and "device" not in passed
            noted = [f"--device {device} was ignored: {call.info_name} computes on the CPU only"] * ignored
            warn(noted, given["quiet"])
            chosen = {option: value for option, value in call.params.items() if value is not None}
            checkpoint = make_checkpoint(given["out"], given["checkpoint_every"], given["resume"]) if kept else None
            if kept:
                arguments["checkpoint"] = checkpoint
            if keeps:
                arguments["keep"] = lambda result: given["out"] and result.save(given["out"], given["overwrite"])
            with limited_threads(given.get("threads")):
                with progress(title.format(**given), given["quiet"], unit) if title else nullcontext() as report:
                    work = getattr(import_module(f"limitlens.{runs}"), name) if runs else function
                    result = work(**arguments, **({"progress": report} if title else {}))
                made = {**record.provenance(name, chosen, started), "warnings": noted}
                result = replace(result, made={**made, "typed": shlex.join(["limitlens", *(call.obj or [name])])})
            show(call, result, name if given.get("plot") else None)
            if checkpoint is not None:
                checkpoint.remove()
            if page and given["out"] is not None:
                result.report(given["out"])

        first = Parameter("call", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        run.__signature__ = Signature([first, *own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (first, *own, *more)}
        return run

    return decorate


def progress_text(unit: str, done: float, total: float) -> str:
    """Text of the progress of a command, such as "window 3 of 12" where `unit` is "windows"."""
    return f"{unit.removesuffix('s')} {done:,.0f} of {total:,.0f}" + (", finishing" if done >= total else "")


@contextmanager
def progress(title: str, quiet: bool, unit: str = "steps") -> Iterator[Progress]:
    """Show a progress bar if stderr is a terminal, unless `quiet`; yields the function (done, total) that moves it."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    # One unit of work may take seconds, so the time left is estimated from the last five minutes.
    with Bar(console=Console(stderr=True), transient=True, speed_estimate_period=300) as bar:
        task = bar.add_task(title, total=None)

        def report(done: float, total: float) -> None:
            # Work may go on after the last unit. A bar without a total shows this; a bar at 100% would look finished.
            moving = None if done >= total else total
            bar.update(task, completed=done, total=moving, description=f"{title}: {progress_text(unit, done, total)}")

        yield report


def begin(context: typer.Context, name: str) -> datetime:
    """Prepare a command: set up messages on stderr, check the folder --out, and return the present time."""
    handler = logging.StreamHandler()  # on stderr
    handler.setFormatter(logging.Formatter("limitlens: %(message)s"))
    logger = logging.getLogger("limitlens")
    logger.handlers = [] if context.params["quiet"] else [handler]
    logger.level = logging.INFO
    if context.params["out"] is not None:
        with record.open_folder(context.params["out"], name, context.params["overwrite"]):
            pass
    return datetime.now(UTC)


def make_checkpoint(out: str | None, every: str | None, resume: bool) -> Any:
    """Checkpoint of a command in its folder `out`, saved as often as `every` says; None if `out` is None."""
    from limitlens.sampling.checkpoint import Checkpoint

    if out is None and (every is not None or resume):
        option = "--resume" if resume else "--checkpoint-every"
        raise InputError(f"{option} was given without --out; expected the folder of the checkpoint, --out DIR")
    return None if out is None else Checkpoint(out, every, resume=resume)


def whole_number(given: float | None) -> int | None:
    """Convert the value of --tokens to an int; it must be a whole number of at least 1 and may be written as 1e5."""
    if given is None:
        return None
    if not (given >= 1 and float(given).is_integer()):
        raise InputError(f"--tokens is {given:g}; expected a whole number of at least 1, such as 3072 or 1e5")
    return int(given)


def size(text: str | None, option: str = "--memory", expected: str = "a size such as 16MB or 4GiB") -> int | None:
    """Convert a size such as "4GB" or "512MiB" to bytes; MB is 1,000² and MiB is 1,024² bytes."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]?)(i?)b\s*", text or "", re.IGNORECASE)
    if text is not None and match is None:
        raise InputError(f"{option} is {text!r}; expected {expected}")
    return match and int(float(match[1]) * (1024 if match[3] else 1000) ** " kmg".index(match[2].lower() or " "))


def share_or_size(text: str | None) -> float | int | None:
    """Convert the value of --total: "0.25" is a share of the cache (float), "16MB" a size in bytes (int)."""
    if text is not None and re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", text):
        return float(text)
    return size(text, "--total", "a share such as 0.25, or a size such as 16MB")


def names_in(text: str | None) -> list[str] | None:
    """Convert a comma-separated list of names, such as "text,needle1", to a list; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",")]


def weights_in(text: str | None) -> dict[str, float] | None:
    """Convert weights such as "text=1,recall=1" to a dictionary of numbers; None stays None."""
    try:
        return None if text is None else {name.strip(): float(value) for name, value in
                                          (part.split("=") for part in text.split(","))}  # fmt: skip
    except ValueError:
        raise InputError(f"--for is {text!r}; expected weights such as text=1,recall=1") from None


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "tokens": whole_number, "memory": size, "total": share_or_size, "tasks": names_in, "policies": names_in,
    "rules": names_in, "weights": weights_in,
}  # fmt: skip


def spectrum_of(text: str) -> str | list[float]:
    """Convert the value of --spectrum, singular values of a head: "flat" and "1/k" stay, "3,2,1" becomes a list."""
    from limitlens.sampling.cells import parse_grid

    if text in ("flat", "1/k"):
        return text
    with suppress(ValueError):
        if "," in text:
            return [float(part) for part in text.split(",")]  # zeros are fine; `designed_head` checks the numbers
    return parse_grid(text, "the spectrum, where neither flat nor 1/k,")


def print_json(document: Any) -> None:
    """Print a document as JSON on stdout."""
    print(record.json_text(document))


def show(context: typer.Context, result: Result, plot: str | None) -> None:
    """Save a command's result in --out, draw it as `plot`.png and print it; exit with 130 if it was interrupted."""
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
        if out is None and context.info_name in ("plan", "trial") and not context.params["quiet"]:
            print("\nNothing was saved; --out DIR keeps the result.")
    warn(getattr(result, "warnings", ()), context.params["quiet"])
    if getattr(result, "interrupted", False):
        raise typer.Exit(130)


def warn(warnings: Sequence[str], quiet: bool) -> None:
    """Print warnings on stderr, one line each."""
    for warning in () if quiet else warnings:
        print(f"warning: {in_options(warning)}", file=sys.stderr)
