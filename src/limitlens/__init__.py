"""limitlens measures how softmax attention over n tokens approaches its infinite-token limit."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

# The stub lists all public names. Each is imported when first used, so that theory does not wait for torch.
_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("limitlens")
    if name not in _MODULES:
        raise AttributeError(f"module 'limitlens' has no attribute {name!r}")
    module = _MODULES[name]
    return import_module(f"{module}.{name}") if module == __name__ else getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
