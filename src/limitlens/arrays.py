"""Lazy imports of pandas and torch, which take seconds, and functions for NumPy arrays and torch tensors alike."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray


class Lazy(ModuleType):
    """Module that is imported only when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure as Drawing
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    pd, torch = Lazy("pandas"), Lazy("torch")
    Drawing = PreTrainedModel = Tensor = Any  # used in type annotations only

__all__ = [
    "Drawing", "PreTrainedModel", "Tensor", "array_like", "library", "native", "pd", "to_device", "to_numpy", "torch",
]  # fmt: skip


def library(x: Any) -> Any:
    """Module whose functions accept x: torch if x is a tensor, NumPy if x is an array."""
    return torch if hasattr(x, "detach") else np


def native(tensor: Tensor) -> Any:
    """Convert a tensor on the CPU to a NumPy array; return a tensor on a GPU unchanged."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def array_like(x: Any, array: NDArray[Any]) -> Any:
    """Convert an array to the type of x: a tensor on the device of x if x is a tensor, else the array itself."""
    if library(x) is np:
        return array
    return to_device(np.ascontiguousarray(array), x.device)


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy a NumPy array to a device as a tensor; copies to a GPU run while it computes."""
    tensor = torch.from_numpy(array)
    if str(device) == "cpu":
        return tensor
    with torch.cuda.stream(_copy_stream(device)):
        copy = tensor.to(device)
    torch.cuda.current_stream(device).wait_stream(_copy_stream(device))
    copy.record_stream(torch.cuda.current_stream(device))
    return copy


@cache
def _copy_stream(device: torch.device | str) -> torch.cuda.Stream:
    """CUDA stream in which all copies to a GPU run, beside its computations."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_numpy(*parts: Any) -> list[NDArray[np.float64]]:
    """Convert arrays or tensors to float64 NumPy arrays; tensors on a GPU are copied in one transfer."""
    if any(library(part) is np for part in parts):
        return [np.asarray(part, np.float64) for part in parts]
    flat = torch.cat([part.double().flatten() for part in parts]).cpu().numpy()
    rows = np.split(flat, np.cumsum([part.numel() for part in parts])[:-1])
    return [row.reshape(part.shape) for row, part in zip(rows, parts, strict=True)]
