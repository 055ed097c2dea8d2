"""Options of a probe that trade speed against memory, and estimates of the time and memory that a probe takes."""

from dataclasses import dataclass

import torch

from limitlens.cost import computing_threads, forward_cost
from limitlens.models import LoadedModel, Windows
from limitlens.probing.pilot import CLUSTERS, DETAIL_QUERIES, Pilot
from limitlens.sampling.assignment import KEPT_STEP, WHOLE_REPLICATES, Assignment
from limitlens.sampling.cells import Cells
from limitlens.sampling.memory import room

# Measured for one CPU thread (docs/reliability.md): operations per second in attention, seconds per head for the rest.
ATTENTION_SPEED, HEAD_SECONDS = 2.5e10, 0.08


@dataclass(frozen=True)
class ProbeOptions:
    """Advanced options of `limitlens.probe`, which trade speed against memory and the precision of diagnostics."""

    block: int = 1 << 14  # tokens that are assigned to samples together, and held in memory until all of them are read
    device_block: int = 1 << 19  # largest block on a GPU, where a long text is cut into about six blocks
    device_forward: int = 1 << 18  # most tokens in a forward pass on a GPU
    kept_step: int = KEPT_STEP  # keys and values are stored if a sample grows by at most this many tokens to a size
    whole_replicates: int = WHOLE_REPLICATES  # most replicates that store all tokens, for diagnostics of every score
    clusters: int = CLUSTERS  # approximate number of groups of queries, by window of text, that the bootstrap resamples
    activations: int = 32  # memory of a token in a forward pass, in vectors of the hidden width
    forward_share: int = 4  # a forward pass may use 1/forward_share of the memory left beside the model
    layer_copies: int = 2  # copies of a layer's stored tokens and states that exist while the layer is measured
    score_copies: int = 12  # copies of the scores that a layer's diagnostics use while the layer is measured

    def windows_at_once(self, window: int, wanted: int, device: torch.device, memory: int | None) -> int:
        """Number of windows per forward pass: the largest divisor of `wanted` that fits, at `window` bytes each."""
        share = self.forward_share
        left = room(memory, device, share * window, "a forward of one window")
        return max(few for few in range(1, wanted + 1) if wanted % few == 0 and (few - 1) * share * window <= left)

    def tokens_waiting(self, pilot: Pilot, assignment: Assignment, part: int, forward: int, memory: int | None) -> int:
        """Number of tokens whose keys and values may be stored before attention over them is computed.

        It is a multiple of `part`, the number of sampled tokens in a forward pass, and at most a block of tokens.
        `forward` is the memory that a forward pass takes, `memory` the user's limit, in bytes.
        """
        held = measured = token = 0
        threads = torch.get_num_threads()
        for layer in pilot.layers.values():
            # Every forward pass that runs at the same time holds sums of its own; a GPU runs one.
            copies = 1 + (threads if layer.query.device.type == "cpu" else 1)
            shared, groups, m, k = layer.query.shape
            kept = assignment.slots * shared * 2 * k * 4
            kept += assignment.states * shared * groups * (k + 1) * (8 * m + 4 * min(m, DETAIL_QUERIES))
            held += kept + copies * sum(8 * mean.numel() * mean.shape[-1] for mean in layer.traits.rough_mean.values())
            scores = 4 * shared * groups * min(m, DETAIL_QUERIES) * assignment.cells.sizes[-1]
            of_layer = self.layer_copies * kept + self.score_copies * scores
            measured = max(measured, threads * of_layer)
            token += shared * 2 * k * 4
        needed = max(forward + token * part, measured)  # one comes after the other
        left = room(memory, layer.query.device, held + needed, "what the samples keep, and measuring it")
        return min(max(assignment.blocks), part * int(min((left + needed - forward) / (token * part), 1e9)))

    def cost(
        self, loaded: LoadedModel, windows: Windows, cells: Cells, replicates: int, queries: int
    ) -> tuple[float, float]:
        """Estimate how many seconds and bytes of memory a probe takes, from the sizes of the model and of the run."""
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
