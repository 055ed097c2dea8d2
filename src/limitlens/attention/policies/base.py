"""What a choice of keys may look at, and what it keeps."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from limitlens.attention.scores import scores_of


@dataclass(frozen=True, eq=False)
class PolicyInput:
    """The keys of key/value heads (leading axes `...`), and what is known of the queries that read them."""

    key: Tensor  # (..., n, k)
    value: Tensor  # (..., n, v)
    scores: Tensor | None = None  # (..., m, n): of the queries that are served, which only an oracle may look at
    seen: Tensor | None = None  # like (m, n), bool: keys that each of them sees; None: all
    position: Tensor | None = None  # (m,): where they stand among the keys; None: pooled tokens have no order
    held: int = 0  # first tokens that every sample of the head holds: its sink
    # (..., p, k): queries asked so far, the scale of the scores in them, those of the last token last; the query heads
    # that share a key/value head stand on an axis of their own before p
    past: Tensor | None = None
    softcap: float | None = None  # the bound of the scores, as in `limitlens.models.Captured`

    def score(self, query: Tensor) -> Tensor:
        """Scores (..., g, p, n) of queries (..., g, p, k) that hold the scale."""
        return scores_of(query, self.key[..., None, :, :], self.softcap)


@dataclass(frozen=True, eq=False)
class Selection:
    """What a choice keeps: attention adds `log_weights` to the scores of the keys in `mask` and leaves out the rest."""

    mask: Tensor  # (draws or 1, ..., m or 1, n) bool
    log_weights: Tensor | None = None  # of the same shape; None: zero


class KeyPolicy(Protocol):
    """A way of choosing keys: it ranks them, and as many as a budget allows are kept.

    One that samples says by log-weights for how many keys each kept one stands, so that Σ_kept e^{w_j + s_j} (1, v_j)
    has the mean Σ_j e^{s_j} (1, v_j), whatever the scores s.
    """

    name: str  # as programs call it
    words: str  # as people do
    sees_queries: bool = False  # an oracle: it looks at the queries it serves, which no cache knows beforehand
    ordered: bool = False  # it asks where queries and keys stand
    needs_past: bool = False  # it asks for queries that came before
    unbiased: bool = False  # its log-weights make sums unbiased, see above
    sampled: bool = False  # it draws at random

    def priority(self, sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Higher is kept first: (draws or 1, ..., m or 1, n) up to broadcasting; one draw where nothing is random."""

    def choose(self, sight: PolicyInput, counts: Tensor | int, draws: int, generator: torch.Generator) -> Selection:
        """Keep as many keys as `counts` says: one number, or one for each place of (..., m or 1, 1)."""
        return self.kept(sight, self.priority(sight, draws, generator), counts)

    def kept(self, sight: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """The same by priorities that are known already."""
        return Selection(keep(held_first(priority, sight.held), counts, sight.seen))


def keep(priority: Tensor, counts: Tensor | int, seen: Tensor | None = None) -> Tensor:
    """Which keys are kept, bool: as many as `counts` (one, or (..., m, 1)) of the highest priority among those seen."""
    if seen is not None:
        priority = priority.float().masked_fill(~seen, float("-inf"))
    if isinstance(counts, int):
        best = priority.topk(min(counts, priority.shape[-1]), -1, sorted=False).indices
        kept = torch.zeros_like(priority, dtype=torch.bool).scatter(-1, best, True)
    else:
        first = torch.arange(priority.shape[-1], device=priority.device) < counts
        best, first = torch.broadcast_tensors(priority.argsort(-1, descending=True), first)  # type: ignore[no-untyped-call]
        kept = torch.zeros_like(first).scatter(-1, best, first)
    return kept if seen is None else kept & seen


def held_first(priority: Tensor, held: int) -> Tensor:
    """Priorities with the first tokens before all others."""
    if not held:
        return priority
    first = torch.arange(priority.shape[-1], device=priority.device) < held
    return priority.float().masked_fill(first, float("inf"))


def uniform(sight: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
    """A number in (0, 1] for each key of each head, the same for all queries: (draws, ..., 1, n)."""
    *heads, number, _ = sight.key.shape
    return 1 - torch.rand(draws, *heads, 1, number, generator=generator).to(sight.key.device)


def norms(vectors: Tensor) -> Tensor:
    """|x| of vectors (..., d)."""
    return vectors.square().sum(-1).sqrt()
