"""Find the model or the text of a saved result from any working directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from limitlens.models.catalog import ALIASES
from limitlens.models.corpora import BUILT_IN


def resolve_source(name: str, made: Mapping[str, Any]) -> str:
    """The name of a model or text as a path that exists, relative to the folder where the result was `made`."""
    if name in ALIASES or name in BUILT_IN or "folder" not in made:
        return name
    there = Path(made["folder"], name)
    return str(there) if there.exists() else name
