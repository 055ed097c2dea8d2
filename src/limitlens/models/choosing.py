"""A choice of keys as a change to what a layer attends to."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.policies import PolicyInput, Selection, named
from limitlens.errors import InputError
from limitlens.models.relay import Captured
from limitlens.sampling.streams import generator_for

SCORES = 1 << 24  # priorities that are held at once


class Choosing:
    """Keeps `count` keys by a choice: for each query anew, or once for all queries behind a cut."""

    def __init__(self, name: str, count: Any, cut: int | None, seed: int, shape: tuple[int, int]) -> None:
        self.choice, self.cut, self.seed = named(name), cut, seed
        self.counts = torch.as_tensor(np.asarray(-1 if count is None else count))
        whole = self.counts.shape in ((), shape) and not self.counts.is_floating_point()
        if not whole or bool((self.counts < (0 if cut else 1)).any()):
            raise InputError(
                f"{count} keys are to be kept; expected a whole number of at least 1, or one for each of {shape[0]} "
                f"layers and {shape[1]} key/value heads"
            )
        if cut is not None and cut < 1:
            raise InputError(f"the cut is at {cut}; expected a position of at least 1, the length of the context")
        if cut is not None and bool((self.counts > cut).any()):
            most = int(self.counts.max())
            raise InputError(f"{most} keys are to be kept of {cut} before the cut; expected at most as many")
        self.made: dict[int, Selection] = {}  # what was kept at the cut, by layer

    def __call__(self, call: Captured) -> Captured:
        """What the layer attends to."""
        if call.position is None:
            raise InputError("the texts of a batch stand at different positions; run them one at a time or unpadded")
        return self._each(call) if self.cut is None else self._behind(call, self.cut)

    def _each(self, call: Captured) -> Captured:
        """Every query chooses among the keys it sees."""
        if self.choice.needs_past and call.causal:
            given = f"{self.choice.name!r} chooses by earlier queries, which differ for every query of a causal model"
            raise InputError(f"{given}; expected a cut, such as cut=1024")
        length, there = call.query.shape[2], call.key.shape[2]
        place = torch.arange(there - length, there, device=call.key.device)  # among the keys
        rows = max(1, SCORES // (call.query.shape[0] * call.query.shape[1] * there))
        masks, weights = [], []
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            kept = self._kept(call, there, call.seen(start, stop), place[start:stop], slice(start, stop))
            shape = (*call.query.shape[:2], stop - start, there)
            masks.append(_per_query_head(kept.mask, shape))
            if kept.log_weights is not None:
                weights.append(_per_query_head(kept.log_weights, shape))
        return _with(call, torch.cat(masks, 2), torch.cat(weights, 2) if weights else None)

    def _behind(self, call: Captured, cut: int) -> Captured:
        """Queries at or behind the cut see what was kept of the keys before it, and all others that they saw."""
        assert call.position is not None
        length, there = call.query.shape[2], call.key.shape[2]
        position = call.position
        begins = max(int(position[-1]) + 1 - there, 0)  # the position of the first key
        before = cut - begins  # keys before the cut
        fresh = int((position < cut).sum())  # queries before it
        if before <= 0 or (fresh == length and before > there):
            return call  # nothing of the context is left, or it has not been read yet
        served = slice(fresh, length)
        end, past = torch.full((1,), before, device=position.device), call.query[:, :, :fresh] if fresh else None
        if not self.choice.sees_queries and (fresh or call.layer not in self.made):
            self.made[call.layer] = self._kept(call, before, None, end, None, past)
        if fresh == length:
            return call
        oracle = self.choice.sees_queries
        kept = self._kept(call, before, None, end, served) if oracle else self.made[call.layer]
        shape = (*call.query.shape[:2], length, there)
        mask = torch.ones(shape, dtype=torch.bool, device=call.key.device)
        mask[:, :, served, :before] = _per_query_head(kept.mask, (*shape[:2], length - fresh, before))
        seen = call.seen()
        bias = None
        if kept.log_weights is not None:
            bias = call.query.new_zeros(shape)
            bias[:, :, served, :before] = _per_query_head(kept.log_weights, (*shape[:2], length - fresh, before))
        return _with(call, mask if seen is None else mask & seen, bias)

    def _kept(
        self, call: Captured, there: int, seen: Tensor | None, place: Tensor, rows: slice | None,
        past: Tensor | None = None,
    ) -> Selection:  # fmt: skip
        """What is kept of the first `there` keys, for queries at `place` among them (the rows, where they are seen)."""
        if past is None and self.choice.needs_past and not call.causal:
            past = call.query  # an encoder's queries are all there
        asked = call.query[:, :, rows] if rows is not None and self.choice.sees_queries else None
        sight = sight_of(call, there, place, past=past, served=asked, seen=seen)
        own = (self.counts if self.counts.ndim == 0 else self.counts[call.layer]).to(call.key.device)
        counts = own.view(-1, *(1,) * (2 + self.choice.sees_queries))  # broadcastable to (B, Hkv[, G], m, n)
        kept = self.choice.choose(sight, counts, 1, generator_for(self.seed, call.layer, there))
        return Selection(kept.mask[0], None if kept.log_weights is None else kept.log_weights[0])


def sight_of(
    call: Captured, there: int, place: Tensor, *, past: Tensor | None, served: Tensor | None = None,
    seen: Tensor | None = None,
) -> PolicyInput:  # fmt: skip
    """What a choice may look at when it chooses among the first `there` keys of a layer.

    Leading axes are the batch, key/value heads and, where a choice looks at the queries `served`, the query heads that
    share them; `past` are queries that came before, (B, Hq, p, k) like `served`.
    """
    batch, shared = call.key.shape[:2]

    def grouped(query: Tensor) -> Tensor:
        return query.float().reshape(batch, shared, -1, *query.shape[2:]) * call.scale

    key, value = (part[:, :, :there].float() for part in (call.key, call.value))
    scores = None
    if served is not None:
        key, value = key[:, :, None], value[:, :, None]
        scores = grouped(served) @ key.mT  # a softcap changes no order
        seen = seen if seen is None or seen.ndim < 4 else seen[:, :, None]
    sink = int(call.causal and call.sliding_window is None and seen is None)  # the first token, at a cut
    return PolicyInput(key, value, scores, seen, place, sink, None if past is None else grouped(past), call.softcap)


def _per_query_head(given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What belongs to key/value heads, or to query heads in their groups, for all query heads (B, Hq, m, n)."""
    if given.ndim == 5:
        return given.flatten(1, 2).expand(shape)
    return given.repeat_interleave(shape[1] // given.shape[1], 1).expand(shape)


def _with(call: Captured, mask: Tensor, weights: Tensor | None) -> Captured:
    """The call with fewer keys seen, and weights beside the model's own bias."""
    if weights is None:
        return replace(call, mask=mask)
    weights = weights.masked_fill(~mask, 0)
    return replace(call, mask=mask, bias=weights if call.bias is None else call.bias + weights)
