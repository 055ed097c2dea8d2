"""Base class of key policies (rules that select keys), with their input and their result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from limitlens.errors import InputError


@dataclass(frozen=True, eq=False)
class PolicyInput:
    """Input of a key policy (a rule that selects keys): keys and values of heads, and what is known of the queries."""

    key: Tensor  # (..., n, k)
    value: Tensor  # (..., n, v)
    scores: Tensor | None = None  # (..., m, n): scores of the queries that will read the keys; for oracles only
    seen: Tensor | None = None  # bool, broadcastable to (m, n): keys that each query sees; None: all
    position: Tensor | None = None  # (m,): index of each query among the keys; None: the tokens have no order
    held: int = 0  # number of first tokens that are always kept (the attention sink)
    # (..., g, p, k): earlier queries of the g query heads that share a key/value head, oldest first, times the scale
    past: Tensor | None = None
    softcap: float | None = None  # bound of the scores, see `limitlens.models.Captured`
    # (..., n): largest attention weight that each key receives while the model repeats the context
    repeat_attention: Tensor | None = None
    frequencies: Tensor | None = None  # (r,): rotary angle per token of the dimensions (i, i + r); None: no rotation

    def of_heads(self, heads: Sequence[int]) -> "PolicyInput":
        """Input of some key/value heads, of keys (B, H, n, k) without `scores` and `seen`."""

        def chosen(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.cat([part[:, head : head + 1] for head in heads], 1)

        key, value, past, repeat = map(chosen, (self.key, self.value, self.past, self.repeat_attention))
        assert key is not None
        assert value is not None
        return replace(self, key=key, value=value, past=past, repeat_attention=repeat)

    def last_queries(self, count: int, policy: str) -> Tensor:
        """Last `count` of the earlier queries, (..., g, p, k); raises an `InputError` for `policy` if there is none."""
        if self.past is None:
            raise InputError(f"no earlier queries were given; {policy!r} ranks keys by them, read the context first")
        return self.past[..., -count:, :]


@dataclass(frozen=True, eq=False)
class Selection:
    """Keys that a key policy keeps, as a mask; attention adds `log_weights` to the scores of these keys."""

    mask: Tensor  # (draws or 1, ..., m or 1, n) bool
    log_weights: Tensor | None = None  # of the shape of `mask`; None: zero


class KeyPolicy(Protocol):
    """Rule that selects keys of a head: keys of highest priority are kept, as many as a budget allows.

    An unbiased policy returns log-weights w such that Σ_kept e^{w_j + s_j} (1, v_j) has the expectation
    Σ_j e^{s_j} (1, v_j) for any scores s.
    """

    name: str  # as users type it
    label: str  # as tables and figures show it
    sees_queries: bool = False  # an oracle: it uses the scores of later queries, which no cache knows
    ordered: bool = False  # it needs the positions of queries
    needs_past: bool = False  # it needs earlier queries
    needs_repeat: bool = False  # it needs a second pass, in which the model repeats the context
    unbiased: bool = False  # its log-weights make sums over the kept keys unbiased
    sampled: bool = False  # it draws keys at random

    def priority(self, inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
        """Priority of n keys for m queries, broadcastable to (draws, ..., m, n); one draw if nothing is random."""

    def select(self, inputs: PolicyInput, counts: Tensor | int, draws: int, generator: torch.Generator) -> Selection:
        """Keep the `counts` keys of highest priority; `counts` is a number or a tensor broadcastable to (..., m, 1)."""
        return self.select_by(inputs, self.priority(inputs, draws, generator), counts)

    def select_by(self, inputs: PolicyInput, priority: Tensor, counts: Tensor | int) -> Selection:
        """Keep the `counts` keys of highest `priority`, a tensor that the method `priority` has returned."""
        return Selection(keep(held_first(priority, inputs.held), counts, inputs.seen))


def keep(priority: Tensor, counts: Tensor | int, seen: Tensor | None = None) -> Tensor:
    """Mask of the `counts` keys of highest priority among those `seen`; `counts` is a number or tensor (..., m, 1)."""
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
    """Raise the priorities (..., n) of the first `held` tokens (attention sinks) above all others."""
    if not held:
        return priority
    first = torch.arange(priority.shape[-1], device=priority.device) < held
    return priority.float().masked_fill(first, float("inf"))


def uniform(inputs: PolicyInput, draws: int, generator: torch.Generator) -> Tensor:
    """Uniform random numbers in (0, 1], (draws, ..., 1, n): one per draw and key of each head, for all queries."""
    *heads, number, _ = inputs.key.shape
    return 1 - torch.rand(draws, *heads, 1, number, generator=generator).to(inputs.key.device)


def norms(vectors: Tensor) -> Tensor:
    """Euclidean norms (...) of vectors (..., d)."""
    return vectors.square().sum(-1).sqrt()
