"""Choice of the device on which kernels run."""

import torch

from limitlens.errors import InputError


def choose_device(name: str) -> torch.device:
    """The torch device for the name auto, cpu or cuda; auto is cuda where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"the device is {name!r}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("the device is cuda, but torch finds no CUDA device; expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
