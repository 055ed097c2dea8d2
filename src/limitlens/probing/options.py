"""Constants of a probe that trade speed, memory and detail."""

from __future__ import annotations

from dataclasses import dataclass, field

from limitlens.probing.memory_plan import MemoryCosts
from limitlens.probing.pilot import CLUSTERS
from limitlens.sampling.assignment import KEPT_STEP, WHOLE_REPLICATES


@dataclass(frozen=True)
class ProbeOptions:
    """Constants of a probe; the defaults are fast for every model and machine tried."""

    block: int = 1 << 14  # tokens assigned together: every large cell gets some, and they fit in memory while they wait
    # Tokens of a block on a GPU, at most, where launches cost the same for few tokens as for many and states are merged
    # once a block: from 32 small blocks on, a sixth of the pool.
    device_block: int = 1 << 19
    device_forward: int = 1 << 18  # tokens of a forward on a GPU, at most
    kept_step: int = KEPT_STEP  # largest step whose cells keep their tokens
    whole_replicates: int = WHOLE_REPLICATES  # largest number of replicates that keep all their tokens
    clusters: int = CLUSTERS  # clusters of queries, about
    memory_costs: MemoryCosts = field(default_factory=MemoryCosts)
