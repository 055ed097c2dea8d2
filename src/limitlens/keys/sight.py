"""What a choice of keys may look at, and the keys that its priorities keep."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sight:
    """Queries and the keys they may see."""

    scores: Tensor  # (..., m, n)
    seen: Tensor | None = None  # (m, n) bool: keys that each query sees; None: all
    position: Tensor | None = None  # (m,): where each query stands among the keys; None: pooled tokens have no order
    held: int = 0  # first tokens that every sample of the head holds: its sink


class Choice(Protocol):
    """A way of choosing keys: it ranks them, and as many as a budget allows are kept."""

    name: str  # as programs call it
    words: str  # as people do
    oracle: bool = False  # it looks at the scores of the queries it serves, which no cache knows beforehand
    ordered: bool = False  # it asks where queries and keys stand

    def priority(self, sight: Sight, draws: int, generator: torch.Generator) -> Tensor:
        """Higher is kept first: (draws or 1, ..., m, n) up to broadcasting; one draw where nothing is random."""


def keep(priority: Tensor, counts: Tensor | int, seen: Tensor | None = None) -> Tensor:
    """Which keys are kept, bool: as many as `counts` (one, or (..., m, 1)) of the highest priority among those seen."""
    if seen is not None:
        priority = priority.float().masked_fill(~seen, float("-inf"))
    if isinstance(counts, int):
        best = priority.topk(min(counts, priority.shape[-1]), -1, sorted=False).indices
        kept = torch.zeros_like(priority, dtype=torch.bool).scatter(-1, best, True)
    else:
        kept = priority.argsort(-1, descending=True).argsort(-1) < counts
    return kept if seen is None else kept & seen
