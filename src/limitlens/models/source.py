"""Models and texts that a saved result names, from whatever folder it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from limitlens.models.catalog import ALIASES
from limitlens.models.corpora import BUILT_IN


def resolve_source(name: str, made: Mapping[str, Any]) -> str:
    """A model or a text by the name that a result gives it, as a whole path where it was a path when it was `made`."""
    if name in ALIASES or name in BUILT_IN or "folder" not in made:
        return name
    there = Path(made["folder"], name)
    return str(there) if there.exists() else name
