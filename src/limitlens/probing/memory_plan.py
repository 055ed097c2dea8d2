"""Cost of a probe, and how it fits a bound on memory: windows a forward, and tokens that wait.

What a probe keeps follows from its sizes, replicates and queries (`sampling.assignment`). A bound changes only how many
tokens are on their way to the cells at a time, and never which token goes to which cell. The costs were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from limitlens.cost import computing_threads, forward_cost
from limitlens.models import Windows
from limitlens.models.catalog import LoadedModel
from limitlens.probing.pilot import DETAIL_QUERIES, Pilot
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells
from limitlens.sampling.memory import room

# Speed of one thread, measured for two models (docs/reliability.md): operations a second in attention over queries, and
# seconds for everything else of a head.
ATTENTION_SPEED, HEAD_SECONDS = 2.5e10, 0.08


@dataclass(frozen=True)
class MemoryCosts:
    """Measured memory costs of a probe."""

    activations: int = 32  # vectors of the hidden width that a token of a forward needs, captured ones included
    forward_share: int = 4  # a forward may take one part in so many of the memory left beside the model
    copies: int = 2  # copies of what a layer keeps while it is measured
    scores: int = 12  # copies of the scores of its detail queries while it is measured


def window_bytes(loaded: LoadedModel, length: int, costs: MemoryCosts) -> int:
    """Bytes that one window of a forward needs while it runs."""
    return int(costs.activations * 4 * length * loaded.model.config.get_text_config().hidden_size)


def windows_at_once(window: int, wanted: int, device: torch.device, memory: int | None, costs: MemoryCosts) -> int:
    """Windows of a forward, each of so many bytes: as many as `wanted`, or a whole fraction of that which fits."""
    share = costs.forward_share
    left = room(memory, device, share * window, "a forward of one window")
    return max(few for few in range(1, wanted + 1) if wanted % few == 0 and (few - 1) * share * window <= left)


def tokens_waiting(
    pilot: Pilot, assignment: Assignment, part: int, forward: int, memory: int | None, costs: MemoryCosts
) -> int:
    """Tokens that may wait: a multiple of the `part` that a forward of `forward` bytes brings, or a whole block."""
    held = measured = token = 0
    for layer in pilot.layers.values():
        shared, groups, m, k = layer.query.shape
        kept = assignment.slots * shared * 2 * k * 4
        kept += assignment.states * shared * groups * (k + 1) * (8 * m + 4 * min(m, DETAIL_QUERIES))
        held += kept + sum(8 * mean.numel() * mean.shape[-1] for mean in layer.traits.rough_mean.values())
        scores = 4 * shared * groups * min(m, DETAIL_QUERIES) * assignment.cells.sizes[-1]
        measured = max(measured, torch.get_num_threads() * (costs.copies * kept + costs.scores * scores))
        token += shared * 2 * k * 4
    needed = max(forward + token * part, measured)  # one comes after the other
    left = room(memory, layer.query.device, held + needed, "what the samples keep, and measuring it")
    return min(max(assignment.blocks), part * int(min((left + needed - forward) / (token * part), 1e9)))


def probe_cost(
    loaded: LoadedModel, windows: Windows, cells: Cells, replicates: int, queries: int, kept_step: int
) -> tuple[float, float]:
    """Estimate seconds and bytes of a probe from counts alone.

    Beside the forward passes (`forward_cost`), a token takes 4 operations for each number of its keys and each query.
    """
    config = loaded.model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    width = float(getattr(config, "hidden_size", 1) * layers)
    heads = layers * getattr(config, "num_attention_heads", 1)
    measuring = 4 * queries * width * windows.tokens / ATTENTION_SPEED + HEAD_SECONDS * heads
    forward, _ = forward_cost(loaded.model, windows.tokens, windows.length)
    seconds = forward + measuring / computing_threads(loaded.model)
    kept = sum(step for step in cells.steps if step <= kept_step)  # tokens whose keys and values are kept
    states = 1 + replicates * sum(step > kept_step for step in cells.steps)
    return seconds, 8 * width * (queries * states + replicates * kept)
