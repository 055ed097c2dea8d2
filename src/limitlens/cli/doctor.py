"""`limitlens doctor`: installed versions, the device, and the models and corpora that need no download."""

from typing import Any

from limitlens.cli.common import Json, print_json
from limitlens.record import installed, provenance

PACKAGES = ("limitlens", "torch", "transformers", "numpy", "scipy", "pandas", "gguf", "accelerate", "datasets")


def doctor(json: Json = False) -> None:
    """Show installed versions, the device, and the models and corpora that need no download.

    Example: limitlens doctor
    """
    import torch

    from limitlens.models.catalog import ALIASES
    from limitlens.models.corpora import BUILT_IN
    from limitlens.report.terminal import show
    from limitlens.report.view import Section, Table, Text, View

    versions: dict[str, str | None] = dict.fromkeys(PACKAGES) | installed(PACKAGES)
    models: list[dict[str, Any]] = [
        {"name": name, "is": alias.describe, "ready": alias.locate() is not None, "install": alias.command}
        for name, alias in ALIASES.items()
    ]
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    about = {"device": device, "versions": versions, "models": models, "corpora": list(BUILT_IN)}
    document = provenance("doctor", {})["host"] | about
    if json:
        print_json(document)
        return
    subtitle = "Python {python} on {system}, {cores} cores, device {device}".format_map(document)
    packages = [(name, version or "not installed") for name, version in versions.items()]
    states = [(m["name"], m["is"], "ready" if m["ready"] else f"install it: {m['install']}") for m in models]
    sections = [
        Section("Packages", "", [Table("Packages", ("package", "version"), packages)]),
        Section("Models (limitlens probe NAME)", "", [Table("", ("name", "what it is", "state"), states)]),
        Section("Corpora", "", [Text([f"Built in: {', '.join(BUILT_IN)}; or any text file or folder of text files."])]),
    ]
    show(View("limitlens doctor", subtitle, ("", "", ""), sections))
