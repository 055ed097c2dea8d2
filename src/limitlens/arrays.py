"""pandas and torch, imported when first used, and types that annotations name: a question to the theory cannot wait.

With them what lets one formula read arrays and tensors alike: NumPy is faster on a CPU, and a GPU has torch alone.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray


class Lazy(ModuleType):
    """A module that is imported when something of it is asked for."""

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
    Drawing = PreTrainedModel = Tensor = Any  # of annotations alone

__all__ = [
    "Drawing",
    "PreTrainedModel",
    "Tensor",
    "array_like",
    "library",
    "native",
    "pd",
    "to_device",
    "to_numpy",
    "torch",
]


def library(x: Any) -> Any:
    """Whose functions read x: torch those of a tensor, NumPy those of an array."""
    return torch if hasattr(x, "detach") else np


def native(tensor: Tensor) -> Any:
    """What is fastest where it is: an array on a CPU, on a GPU the tensor itself."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def array_like(x: Any, array: NDArray[Any]) -> Any:
    """An array where x is: a tensor beside a tensor. A GPU does not wait for it."""
    if library(x) is np:
        return array
    return to_device(np.ascontiguousarray(array), x.device)


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An array on a device. A GPU goes on with its work meanwhile, and whoever sends it does not wait for that work."""
    here = torch.from_numpy(array)
    if str(device) == "cpu":
        return here
    with torch.cuda.stream(_beside(device)):
        there = here.to(device)
    torch.cuda.current_stream(device).wait_stream(_beside(device))
    there.record_stream(torch.cuda.current_stream(device))
    return there


@cache
def _beside(device: torch.device | str) -> torch.cuda.Stream:
    """A stream for copies alone: page-locked memory would cost more than it saves."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_numpy(*parts: Any) -> list[NDArray[np.float64]]:
    """Arrays, or tensors of one device, as float64 arrays: tensors are copied at once, and a GPU is waited for once."""
    if any(library(part) is np for part in parts):
        return [np.asarray(part, np.float64) for part in parts]
    flat = torch.cat([part.double().flatten() for part in parts]).cpu().numpy()
    rows = np.split(flat, np.cumsum([part.numel() for part in parts])[:-1])
    return [row.reshape(part.shape) for row, part in zip(rows, parts, strict=True)]
