"""Constants of a probe, its cost, and how it fits a bound on memory: windows per forward, and tokens that wait.

A probe keeps as much as its sizes, replicates and queries need (`sampling.assignment`). A bound on memory changes only
how many tokens are on their way to the cells at a time, and never which token goes to which cell.
"""

from dataclasses import dataclass, field

import torch

from limitlens.cost import computing_threads, forward_cost
from limitlens.models import Windows
from limitlens.models.catalog import LoadedModel
from limitlens.probing.pilot import CLUSTERS, DETAIL_QUERIES, Pilot
from limitlens.sampling.assignment import KEPT_STEP, WHOLE_REPLICATES, Assignment
from limitlens.sampling.cells import Cells
from limitlens.sampling.memory import room
from limitlens.statistics.regimes import Thresholds

# Speed of one thread, measured for two models (docs/reliability.md): operations a second in attention over queries, and
# seconds for everything else of a head.
ATTENTION_SPEED, HEAD_SECONDS = 2.5e10, 0.08


@dataclass(frozen=True)
class ProbeOptions:
    """Constants of a probe that trade speed, memory and detail; memory costs were measured."""

    block: int = 1 << 14  # tokens assigned together: every large cell gets some, and they fit in memory while they wait
    # Tokens of a block on a GPU, at most, where launches cost the same for few tokens as for many and states are merged
    # once a block: from 32 small blocks on, a sixth of the pool.
    device_block: int = 1 << 19
    device_forward: int = 1 << 18  # tokens of a forward on a GPU, at most
    kept_step: int = KEPT_STEP  # largest step whose cells keep their tokens
    whole_replicates: int = WHOLE_REPLICATES  # largest number of replicates that keep all their tokens
    clusters: int = CLUSTERS  # clusters of queries, about
    thresholds: Thresholds = field(default_factory=Thresholds)  # limits between the regimes of heads
    activations: int = 32  # vectors of the hidden width that a token of a forward needs, captured ones included
    forward_share: int = 4  # a forward may take one part in so many of the memory left beside the model
    layer_copies: int = 2  # copies of the tokens and states that a layer keeps while it is measured
    score_copies: int = 12  # copies of the scores of a layer's detail queries while it is measured

    def window_bytes(self, loaded: LoadedModel, length: int) -> int:
        """Bytes that one window of `length` tokens needs while a forward runs."""
        return int(self.activations * 4 * length * loaded.model.config.get_text_config().hidden_size)

    def windows_at_once(self, window: int, wanted: int, device: torch.device, memory: int | None) -> int:
        """Windows of `window` bytes in a forward: as many as `wanted`, or a whole fraction of that which fits."""
        share = self.forward_share
        left = room(memory, device, share * window, "a forward of one window")
        return max(few for few in range(1, wanted + 1) if wanted % few == 0 and (few - 1) * share * window <= left)

    def tokens_waiting(self, pilot: Pilot, assignment: Assignment, part: int, forward: int, memory: int | None) -> int:
        """Tokens that may wait: a multiple of the `part` that a forward of `forward` bytes brings, or a whole block."""
        held = measured = token = 0
        for layer in pilot.layers.values():
            shared, groups, m, k = layer.query.shape
            kept = assignment.slots * shared * 2 * k * 4
            kept += assignment.states * shared * groups * (k + 1) * (8 * m + 4 * min(m, DETAIL_QUERIES))
            held += kept + sum(8 * mean.numel() * mean.shape[-1] for mean in layer.traits.rough_mean.values())
            scores = 4 * shared * groups * min(m, DETAIL_QUERIES) * assignment.cells.sizes[-1]
            of_layer = self.layer_copies * kept + self.score_copies * scores
            measured = max(measured, torch.get_num_threads() * of_layer)
            token += shared * 2 * k * 4
        needed = max(forward + token * part, measured)  # one comes after the other
        left = room(memory, layer.query.device, held + needed, "what the samples keep, and measuring it")
        return min(max(assignment.blocks), part * int(min((left + needed - forward) / (token * part), 1e9)))

    def cost(
        self, loaded: LoadedModel, windows: Windows, cells: Cells, replicates: int, queries: int
    ) -> tuple[float, float]:
        """Estimate seconds and bytes of a probe from counts alone.

        Besides the forward passes (`forward_cost`), a token takes 4 operations for each number of its keys and each
        query.
        """
        config = loaded.model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", 1)
        width = float(getattr(config, "hidden_size", 1) * layers)
        heads = layers * getattr(config, "num_attention_heads", 1)
        measuring = 4 * queries * width * windows.tokens / ATTENTION_SPEED + HEAD_SECONDS * heads
        forward, _ = forward_cost(loaded.model, windows.tokens, windows.length)
        seconds = forward + measuring / computing_threads(loaded.model)
        kept = sum(step for step in cells.steps if step <= self.kept_step)  # tokens whose keys and values are kept
        states = 1 + replicates * sum(step > self.kept_step for step in cells.steps)
        return seconds, 8 * width * (queries * states + replicates * kept)
