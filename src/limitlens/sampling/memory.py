"""Memory in use, memory left below a limit, and smaller batches when a GPU runs out of memory."""

import os
import sys

import torch

from limitlens.errors import InputError, check_number


def resident(device: torch.device) -> int:
    """Bytes of memory that this process uses: on the GPU if `device` is one, otherwise in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if not sys.platform.startswith("linux"):
        raise InputError(f"a memory limit was given on {sys.platform}; expected Linux, so leave the limit out")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def room(memory: int | None, device: torch.device, needed: int, what: str) -> float:
    """Bytes left below the limit `memory` after `needed` more bytes for `what`; an InputError if they do not fit."""
    if memory is None:
        return float("inf")
    check_number("memory", memory, "a number of bytes, such as 4e9")
    used = resident(device)
    if used + needed > memory:
        given = (
            f"the memory limit is {memory / 1e9:.3g} GB; expected at least {(used + needed) / 1e9:.3g} GB for {what}"
        )
        in_use = f"{used / 1e9:.3g} GB are already in use"
        raise InputError(f"{given} ({in_use}), so raise the limit, or use fewer or smaller samples")
    return memory - used - needed


def halved(count: int, what: str, warnings: list[str]) -> int:
    """Halve the batch size `count` after a GPU ran out of memory, with a warning; an InputError if `count` is 1."""
    if count < 2:
        raise InputError(f"the GPU has no memory for one of the {what}; expected more, so use the CPU or shorter ones")
    torch.cuda.empty_cache()
    warnings.append(f"the GPU ran out of memory: from there on {what} were processed {count // 2} at a time")
    print(f"limitlens: {warnings[-1]}", file=sys.stderr)
    return count // 2
