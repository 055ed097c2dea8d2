"""pandas and torch, imported when first used: a question to the theory has no time for them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor
else:
    pd, torch = _Lazy("pandas"), _Lazy("torch")
    Tensor = Any  # of annotations alone

__all__ = ["Tensor", "pd", "torch"]
