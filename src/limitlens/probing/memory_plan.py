"""How a probe fits into a bound on memory: windows a forward, and tokens that wait, as many as there is room for.

What a probe keeps is set by its sizes, replicates and queries (`sampling.placement`); a bound changes only how many
tokens are on their way to the cells at a time, and never which token goes to which. What things cost was measured.
"""

from __future__ import annotations

import torch

from limitlens.models.catalog import LoadedModel
from limitlens.probing.pilot import DETAIL_QUERIES, Pilot
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.memory import room

ACTIVATIONS = 32  # vectors of the hidden width that a token of a forward costs at most, captured ones included
FORWARDS = 4  # a forward may take one part in so many of what is left beside the model
COPIES, SCORES = 2, 12  # times what a layer keeps, and scores of its detail queries, that measuring it takes beside


def window_bytes(loaded: LoadedModel, length: int) -> int:
    """What a window of a forward takes while it runs."""
    return int(ACTIVATIONS * 4 * length * loaded.model.config.get_text_config().hidden_size)


def windows_at_once(window: int, wanted: int, device: torch.device, memory: int | None) -> int:
    """Windows of a forward, of so many bytes each: as many as `wanted`, or a whole part of that which fits."""
    left = room(memory, device, FORWARDS * window, "a forward of one window")
    return max(few for few in range(1, wanted + 1) if wanted % few == 0 and (few - 1) * FORWARDS * window <= left)


def waiting(pilot: Pilot, deck: Assignment, part: int, forward: int, memory: int | None) -> int:
    """Tokens that may wait, a multiple of the `part` that a forward of so many bytes brings, or all of a block."""
    held = measured = token = 0
    for layer in pilot.layers.values():
        shared, groups, m, k = layer.query.shape
        kept = deck.slots * shared * 2 * k * 4
        kept += deck.states * shared * groups * (k + 1) * (8 * m + 4 * min(m, DETAIL_QUERIES))
        held += kept + sum(8 * mean.numel() * mean.shape[-1] for mean in layer.traits.rough_mean.values())
        scores = 4 * shared * groups * min(m, DETAIL_QUERIES) * deck.cells.sizes[-1]
        measured = max(measured, torch.get_num_threads() * (COPIES * kept + SCORES * scores))
        token += shared * 2 * k * 4
    needed = max(forward + token * part, measured)  # one comes after the other
    left = room(memory, layer.query.device, held + needed, "what the samples keep, and measuring it")
    return min(max(deck.blocks), part * int(min((left + needed - forward) / (token * part), 1e9)))
