"""limitlens: how softmax attention over n tokens approaches its infinite-token limit.

Public names are imported when first used, so that `import limitlens` is fast and theory does not wait for torch. The
names and their modules are listed once, in the stub `__init__.pyi`, which type checkers read as well.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

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
