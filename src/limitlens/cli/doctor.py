"""`limitlens doctor`: what is installed, which device, which models and corpora are at hand."""

from __future__ import annotations

import os
import platform
from typing import Any

from limitlens.cli.common import Json, print_json, print_table


def doctor(json: Json = False) -> None:
    """What is installed, which device kernels would run on, which models and corpora need no network.

    Example: limitlens doctor
    """
    document = examine()
    if json:
        print_json(document)
        return
    versions = [[name, version or "not installed"] for name, version in document["versions"].items()]
    print_table("Packages", ["package", "version"], versions)
    print(
        f"  Python {document['python']} on {document['system']}, {document['cores']} cores, device {document['device']}"
    )
    print_table(
        "Models at hand (limitlens probe NAME)",
        ["name", "what it is", "state"],
        [[m["name"], m["is"], "ready" if m["ready"] else f"install it: {m['install']}"] for m in document["models"]],
    )
    print(f"  corpora at hand: {', '.join(document['corpora'])}; or any text file or folder of text files")


def examine() -> dict[str, Any]:
    """The findings as a document."""
    from importlib import metadata

    from limitlens.models.catalog import ALIASES
    from limitlens.models.corpora import BUILT_IN

    versions: dict[str, str | None] = {}
    for name in ("limitlens", "torch", "transformers", "numpy", "scipy", "pandas", "gguf", "accelerate", "datasets"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    import torch

    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "versions": versions,
        "models": [
            {"name": name, "is": alias.describe, "ready": alias.locate() is not None, "install": alias.command}
            for name, alias in ALIASES.items()
        ],
        "corpora": list(BUILT_IN),
    }
