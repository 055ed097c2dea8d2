"""Commands on saved results and on the installation: compare, reproduce, report and doctor."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Exit, Option

from limitlens.cli.common import Json, Quiet, Result, command, print_json
from limitlens.errors import InputError
from limitlens.record import installed, provenance

NEEDED = ("limitlens", "torch", "transformers", "numpy", "scipy", "pandas")
OPTIONAL = {  # packages and what needs them
    "gguf": "models in GGUF files, such as smollm2 and qwen", "accelerate": "models in GGUF files",
    "datasets": "hub datasets as --corpus", "ray": "--ray: many machines", "triton": "fast kernels on a GPU",
}  # fmt: skip


@command(page=True, computes=False)
def compare(
    runs: Annotated[list[str], Argument(metavar="RUN RUN...", help="Two or more run folders of one command.")],
) -> Result:
    """Compare two or more runs of different texts, models or settings, each with the first.

    Example: limitlens compare runs/docs runs/code --out runs/docs-code
    """
    from limitlens.comparison import compare as run

    return run(*runs)


@command("reproducing {name}", shares="plot seed", kept=True)
def reproduce(
    call: Context,
    name: Annotated[str | None, Argument(help="Name of the experiment; --list shows all.")] = None,
    listed: Annotated[bool, Option("--list", help="List all experiments and exit.")] = False,
    quick: Annotated[bool, Option("--quick", help="Smaller sizes, about a minute.")] = False,
    as_published: Annotated[bool, Option("--as-published", help="Also use the published code's rules.")] = False,
    corpus: Annotated[str | None, Option(help="Text or labelled documents to read.")] = None,
    model: Annotated[str | None, Option(help="Model to use.")] = None,
    tokens: Annotated[float | None, Option(help="Tokens of text to read, such as 1e6.")] = None,
    sizes: Annotated[str | None, Option(metavar="LO:HI:K", help="Numbers of tokens n.")] = None,
    replicates: Annotated[int | None, Option(help="Independent samples behind every point.")] = None,
    documents: Annotated[int | None, Option(help="Documents to read.")] = None,
    **shared: Any,
) -> Result:
    """Reproduce a published experiment: our numbers and the published ones, with a verdict on every claim.

    Example: limitlens reproduce gaussian-horizon --quick --out runs/gaussian

    Example: limitlens reproduce bert-layers --model mpnet --tokens 1e6 --out runs/mpnet --checkpoint-every 300s
    """
    from limitlens.published.catalogue import catalogue
    from limitlens.published.reproduction import RESUMABLE, listing
    from limitlens.published.reproduction import reproduce as run
    from limitlens.report import terminal

    if listed:
        print_json(catalogue()) if call.params["json"] else terminal.show(listing())
        raise Exit
    if name is None:
        raise InputError(f"no experiment was given; expected one of {', '.join(catalogue())}, or --list")
    if (call.params["resume"] or call.params["checkpoint_every"]) and name not in RESUMABLE:
        raise InputError(f"{name!r} keeps no checkpoint; expected --resume or --checkpoint-every with {RESUMABLE[0]}")
    given = {"corpus": corpus, "model": model, "tokens": tokens, "sizes": sizes, "replicates": replicates}
    given |= {"documents": documents}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return run(name, quick, as_published=as_published, **changes, **shared)


def report(
    run: Annotated[str, Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    out: Annotated[str | None, Option("--out", metavar="FILE", help="RUN/report.html when left out.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the results of a run as one HTML file that needs no network.

    Example: limitlens report runs/demo
    """
    from limitlens.loading import load

    folder = Path(run).parent if Path(run).name == "run.json" else Path(run)
    path = load(folder).report(folder / "report.html" if out is None else out)
    size = path.stat().st_size
    if json:
        print_json({"run": run, "report": str(path), "bytes": size})
    elif not quiet:
        print(f"{path} ({size / 1000:,.0f} kB)")


def doctor(json: Json = False) -> None:
    """Show what is missing, installed versions, the device, and the models and corpora that need no download.

    Example: limitlens doctor
    """
    import torch

    from limitlens.models.catalog import ALIASES
    from limitlens.models.corpora import BUILT_IN
    from limitlens.report.terminal import show
    from limitlens.report.view import Section, Table, Text, View

    packages = (*NEEDED, *OPTIONAL)
    versions: dict[str, str | None] = dict.fromkeys(packages) | installed(packages)
    models = [
        {"name": name, "is": alias.describe, "ready": alias.locate() is not None, "install": alias.command}
        for name, alias in ALIASES.items()
    ]
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    needs = dict.fromkeys(NEEDED, "limitlens") | OPTIONAL
    lacking = [(name, needs[name], f"pip install {name}") for name in needs if not versions[name]]
    lacking += [(str(one["name"]), "the model of this name", str(one["install"])) for one in models if not one["ready"]]
    lacking += [("a GPU", "temper, long contexts and large models", "–")] if device == "cpu" else []
    missing = [dict(zip(("missing", "needed for", "install"), row, strict=True)) for row in lacking]
    about = {"device": device, "missing": missing, "versions": versions, "models": models, "corpora": list(BUILT_IN)}
    document = provenance("doctor", {})["host"] | about
    if json:
        print_json(document)
        return
    subtitle = "Python {python} on {system}, {cores} cores, device {device}".format_map(document)
    rows = [(name, version or "not installed") for name, version in versions.items()]
    sections = [
        Section("Missing", "", [Table("Missing", ("missing", "needed for", "install"), lacking)] if lacking else []),
        Section("Packages", "", [Table("Packages", ("package", "version"), rows)]),
        Section("Models", "", [Table("", list(models[0]), [list(model.values()) for model in models])]),
        Section("Corpora", "", [Text([f"Built in: {', '.join(BUILT_IN)}; or any text file or folder of text files."])]),
    ]
    show(View("limitlens doctor", subtitle, ("", "" if lacking else "Nothing is missing.", ""), sections))
