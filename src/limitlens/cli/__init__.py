"""The command line: each command parses, calls one function, prints.

One file per command, which imports nothing heavy at its top: `limitlens theory` must answer in two seconds.
"""

import os
import sys
from importlib import import_module

import typer

from limitlens.cli.ascii import write_plainly
from limitlens.cli.common import spoken
from limitlens.errors import InputError

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer exports only this child of it

app = typer.Typer(
    name="limitlens",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    "probe", "predict", "plan", "trial", "temper", "designs", "depth", "downstream", "stability", "report", "compare",
    "study", "theory", "hardmax", "tails", "scaling", "schedules", "heat-flow", "reproduce", "doctor",
):  # fmt: skip
    module = command.replace("-", "_")
    app.command(command)(getattr(import_module(f"limitlens.cli.{module}"), module))


def version(show: bool) -> None:
    """Print the version and stop."""
    if show:
        from importlib.metadata import version as installed

        print(f"limitlens {installed('limitlens')}")
        raise typer.Exit


@app.callback()
def options(
    show: bool = typer.Option(False, "--version", help="Print the version.", callback=version, is_eager=True),
) -> None:
    """How softmax attention over n tokens approaches its infinite-token limit: measured, predicted, decided."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 2 bad usage or input, 130 interrupted."""
    write_plainly()
    given, code, said = sys.argv[1:] if arguments is None else arguments, 2, ""
    try:
        code = app(args=given or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except InputError as error:
        said = spoken(str(error))
    except MemoryError:
        said = "memory ran out; ask for fewer tokens, replicates, queries or dimensions"
    except UsageError as error:
        context = getattr(error, "ctx", None)
        where = "limitlens" if context is None else context.command_path
        said = f"{error.format_message().rstrip('.')}; see {where} --help"  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of our output left; nothing to say to anybody
        sys.stderr.close()
        code = 0
    except OSError as error:  # of stdout alone: whoever reads or writes a file says which
        said = f"the output could not be written ({error.strerror}); send it to a place with room"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it is written once more at the end
    if said or code == 130:
        print(f"limitlens: {said or 'interrupted'}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
