"""Command line of limitlens; its modules import nothing slow at the top, so that fast commands answer at once."""

import os
import sys
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperGroup

from limitlens.cli import laws, models, other
from limitlens.errors import InputError, in_options

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of all usage errors; typer exports only this child

PANELS = {  # headings of `limitlens --help` and the commands under them
    "Laws of tokens": (
        laws.theory, laws.study, laws.hardmax, laws.tails, laws.scaling, laws.schedules, laws.heat_flow,
    ),
    "Models": (models.probe, models.predict, other.compare),
    "KV cache": (models.plan, models.trial, models.generate, models.certify),
    "Long context": (models.temper,),
    "Lab": (models.depth, models.downstream, models.designs, models.stability, other.reproduce),
    "Other": (other.report, other.doctor),
}  # fmt: skip


class Panels(TyperGroup):
    """All commands of limitlens, listed in `--help` under the headings of `PANELS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands for `--help`, with the first paragraph of each command's help."""
        for panel, functions in PANELS.items():
            with formatter.section(panel):
                commands = [self.commands[function.__name__.replace("_", "-")] for function in functions]
                formatter.write_dl([(one.name, (one.help or "").split("\n\n")[0]) for one in commands])


app = typer.Typer(
    name="limitlens",
    cls=Panels,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for functions in PANELS.values():
    for function in functions:
        app.command(function.__name__.replace("_", "-"))(function)


def print_version(show: bool) -> None:
    """Print the version of limitlens and exit, if `show` (option --version) is set."""
    if show:
        print(f"limitlens {version('limitlens')}")
        raise typer.Exit


@app.callback()
def options(
    show: bool = typer.Option(False, "--version", help="Print the version.", callback=print_version, is_eager=True),
) -> None:
    """How far is softmax attention over n tokens from its infinite-token limit, and how many tokens does it need?"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 2 bad usage or bad input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # so that a character that the encoding lacks does not end the command
    arguments = sys.argv[1:] if arguments is None else arguments
    code: Any = 2
    message = ""
    try:
        code = app(args=arguments or ["--help"], standalone_mode=False, obj=arguments)
        sys.stdout.flush()
    except InputError as error:
        message = in_options(str(error))
    except MemoryError:
        message = "memory ran out; ask for fewer tokens, replicates, queries or dimensions"
    except UsageError as error:
        context = getattr(error, "ctx", None)
        command = "limitlens" if context is None else context.command_path
        message = f"{error.format_message().rstrip('.')}; see {command} --help"  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of our output is gone, as in `limitlens ... | head`
        sys.stderr.close()
        code = 0
    except OSError as error:  # only from stdout: code that reads or writes files raises InputError
        message = f"the output could not be written ({error.strerror}); send it to a disk with space"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python writes it once more at its end
    if message or code == 130:
        print(f"limitlens: {message or 'interrupted'}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
