"""limitlens: how softmax attention over n tokens approaches its infinite-token limit.

Names are loaded when first used, so that `import limitlens` costs nothing and theory never waits for torch. Which there
are, and where they live, is said once: in the stub beside this file, which type checkers read as well.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_HOME = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("limitlens")
    if name not in _HOME:
        raise AttributeError(f"module 'limitlens' has no attribute {name!r}")
    home = _HOME[name]
    return import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
