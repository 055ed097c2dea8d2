"""pandas and torch, imported when first used, and types that annotations name: a question to the theory cannot wait."""

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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    pd, torch = _Lazy("pandas"), _Lazy("torch")
    Axes = Drawing = PreTrainedModel = Tensor = Any  # of annotations alone

__all__ = ["Axes", "Drawing", "PreTrainedModel", "Tensor", "pd", "torch"]
