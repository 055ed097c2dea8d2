"""Rough time (within a factor of three, `docs/reliability.md`) and memory of a job, estimated before it starts."""

import os
from logging import getLogger
from typing import Any

from limitlens.arrays import PreTrainedModel, torch
from limitlens.errors import InputError

MAX_SECONDS = 24 * 3600.0  # longer work is refused unless the user insists
WARN_AFTER_SECONDS = 10.0  # longer work is announced
FORWARD_RATE = 6e10  # operations a second of one CPU thread in a forward pass
GPU_THREADS = 40  # a GPU computes as fast as this number of CPU threads
_TIMES = ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def machine_memory() -> float:
    """Bytes of memory that this process may use: those of the machine or of its cgroup; infinite if unknown."""
    memory = float("inf")
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(memory, float(file.read()))  # the file says "max", which is not a number, if there is no limit
    except (OSError, ValueError, AttributeError):
        return memory


def check_cost(
    work: str, seconds: float = 0.0, memory: float = 0.0, yes: bool = False,
    remedy: str = "ask for fewer tokens, replicates or queries, or pass yes=True",
) -> None:  # fmt: skip
    """Log the cost of a long job; raise an `InputError` if it needs over a day or too much memory, unless `yes`.

    `work` names the job in the message, and `remedy` says how to make it smaller.
    """
    available = machine_memory()
    parts = [f"about {_with_unit(_TIMES, seconds)}"] if seconds >= WARN_AFTER_SECONDS else []
    parts += [f"{_with_unit(_SIZES, memory)} of memory"] if memory >= 1e9 else []
    cost = " and ".join(parts)
    if not yes and memory > available:
        raise InputError(f"{work} would take {cost}, and this machine has {_with_unit(_SIZES, available)}; {remedy}")
    if not yes and seconds > MAX_SECONDS:
        raise InputError(f"{work} would take {cost}, and more than a day needs your consent; {remedy}")
    if cost:
        getLogger("limitlens").info("%s takes %s", work, cost)


def forward_cost(model: PreTrainedModel, tokens: float, window: int) -> tuple[float, float]:
    """Estimated (seconds, bytes) of forward passes over `tokens` tokens, in windows of `window` tokens one at a time.

    Operations: tokens · (2 · weights of matrices + 4 · window · hidden size · layers). Bytes: the activations of one
    window in float32, without the weights of the model.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    width = getattr(config, "hidden_size", 1)
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    weights = sum(part.numel() for part in model.parameters()) - sum(table.weight.numel() for table in tables)
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits = 0 if output is None else output.weight.shape[0]
    if output is not None and any(output.weight is table.weight for table in tables):
        weights += output.weight.numel()  # tied to a table that was left out above, yet multiplied
    operations = tokens * (2.0 * weights + 4.0 * window * width * layers)
    scores = float(window) * getattr(config, "num_attention_heads", 1)
    memory = 4.0 * window * (width * (layers + 8) + scores + logits)
    return operations / (FORWARD_RATE * computing_threads(model)), memory


def computing_threads(model: PreTrainedModel) -> int:
    """Number of CPU threads that run a model, or that would be as fast as the GPU that it is on."""
    return torch.get_num_threads() if model.device.type == "cpu" else GPU_THREADS


def _with_unit(units: tuple[tuple[float, str], ...], amount: float) -> str:
    """Text of an amount in the largest unit that fits, such as "2 hours" for 7200; `units` are (size, name)."""
    size, name = next(unit for unit in units if amount >= unit[0])
    return f"{min(amount / size, 1e9):,.3g} {name}"
