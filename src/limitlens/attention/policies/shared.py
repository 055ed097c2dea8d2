"""Base class of rules that divide a cache among heads by the keys of the prompt itself, as baselines of trials."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SharedPolicy(Protocol):
    """Rule that keeps `total` keys of a prompt in all heads together, by the priorities of one key policy."""

    name: str  # as tables show it
    label: str
    policy: str  # name of the key policy whose priorities are compared across heads

    def masks(self, priorities: Sequence[Tensor], total: int) -> list[Tensor]:
        """Masks (heads, n) of kept keys for each layer, from the priorities (heads, n) of each layer."""
