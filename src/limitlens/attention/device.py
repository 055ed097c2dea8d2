"""Where kernels run."""

import torch

from limitlens.errors import InputError


def choose_device(name: str) -> torch.device:
    """The device named auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"the device is {name!r}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("the device is cuda and torch finds none; expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
