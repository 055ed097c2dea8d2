"""Memory: how much a process holds, how much is left of what it may take, and what to do when a GPU has no more."""

import os
import sys

import torch

from limitlens.errors import InputError


def resident(device: torch.device) -> int:
    """Bytes that the process holds now, on a GPU where work is done there."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if not sys.platform.startswith("linux"):
        raise InputError(f"memory can be bounded on Linux, and this is {sys.platform}; leave it out here")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def room(memory: int | None, device: torch.device, needed: int, what: str) -> float:
    """Bytes that are left for blocks beyond those that are `needed` in any case; refused where these do not fit."""
    if memory is None:
        return float("inf")
    there = resident(device)
    if there + needed > memory:
        raise InputError(
            f"memory is bounded to {memory / 1e9:.3g} GB; expected {(there + needed) / 1e9:.3g} GB at least for {what}"
            f", of which {there / 1e9:.3g} GB are held already, so allow more, or ask for fewer or smaller samples"
        )
    return memory - there - needed


def halved(count: int, what: str, warnings: list[str]) -> int:
    """Half of what a GPU had no memory for, said once for all; refused where that was one."""
    if count < 2:
        raise InputError(f"the GPU has no memory for one of the {what}; expected more, so use the CPU or shorter ones")
    torch.cuda.empty_cache()
    warnings.append(f"the GPU ran out of memory: {what} were taken {count // 2} at a time from there on")
    print(f"limitlens: {warnings[-1]}", file=sys.stderr)
    return count // 2
