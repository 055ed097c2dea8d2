"""Apply a key policy (rule for which keys a head keeps) to the attention of a running model, for `intervene`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.policies import PolicyInput, Selection, get_policy
from limitlens.errors import InputError
from limitlens.models.relay import Captured
from limitlens.sampling.streams import generator_for

MAX_SCORES = 1 << 24  # priorities of keys (one per query and key) held in memory at once


class PolicyHook:
    """Function that masks the input of a layer's attention so that each head attends to `counts` keys.

    Keys are selected for each query or, if `cut` is given, once for all queries from position `cut` on. `policies` is
    one name, or names [layer][kv_head]; `counts` is one number, or numbers [layer][kv_head].
    """

    def __init__(
        self, policies: str | Sequence[Sequence[str]], counts: Any, cut: int | None, seed: int, shape: tuple[int, int],
        max_scores: int = MAX_SCORES,
    ) -> None:  # fmt: skip
        self.cut, self.seed, self.max_scores = cut, seed, max_scores
        self.policies = policies
        names = {policies} if isinstance(policies, str) else {name for row in policies for name in row}
        self.known = {name: get_policy(name) for name in names}
        self.oracle = any(policy.sees_queries for policy in self.known.values())
        if not isinstance(policies, str) and (self.oracle or tuple(map(len, policies)) != (shape[1],) * shape[0]):
            raise InputError(
                f"key policies are {policies}; expected one name, or a name other than an oracle's for each of "
                f"{shape[0]} layers and {shape[1]} key/value heads"
            )
        self.counts = torch.as_tensor(np.asarray(-1 if counts is None else counts))
        whole = self.counts.shape in ((), shape) and not self.counts.is_floating_point()
        if not whole or bool((self.counts < (0 if cut else 1)).any()):
            raise InputError(
                f"the number of keys to keep is {counts}; expected a whole number of at least 1, or one for each of "
                f"{shape[0]} layers and {shape[1]} key/value heads"
            )
        if cut is not None and cut < 1:
            raise InputError(f"the cut is at {cut}; expected a position of at least 1, the length of the context")
        if cut is not None and bool((self.counts > cut).any()):
            most = int(self.counts.max())
            raise InputError(f"{most} keys are to be kept of {cut} before the cut; expected at most as many")
        self.selected: dict[int, Selection] = {}  # by layer: the keys before the cut that are kept

    def __call__(self, call: Captured) -> Captured:
        """The layer's attention input `call`, with a mask that hides all keys except the kept ones."""
        if call.position is None:
            raise InputError("the texts of a batch have different positions; run them one at a time or unpadded")
        return self._for_each_query(call) if self.cut is None else self._after_cut(call, self.cut)

    def _for_each_query(self, call: Captured) -> Captured:
        """Attention input `call` with a mask in which each query keeps `counts` of the keys that it could see."""
        past = next((name for name, policy in self.known.items() if policy.needs_past), None)
        if past and call.causal:
            given = f"{past!r} ranks keys by earlier queries, which differ for each query of a causal model"
            raise InputError(f"{given}; expected a cut, such as cut=1024")
        length, total = call.query.shape[2], call.key.shape[2]
        place = torch.arange(total - length, total, device=call.key.device)  # index among the keys
        rows = max(1, self.max_scores // (call.query.shape[0] * call.query.shape[1] * total))
        masks, weights = [], []
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            kept = self._select(call, total, call.seen(start, stop), place[start:stop], slice(start, stop))
            shape = (*call.query.shape[:2], stop - start, total)
            masks.append(_per_query_head(kept.mask, shape))
            if kept.log_weights is not None:
                weights.append(_per_query_head(kept.log_weights, shape))
        return _with(call, torch.cat(masks, 2), torch.cat(weights, 2) if weights else None)

    def _after_cut(self, call: Captured, cut: int) -> Captured:
        """Attention input `call` in which queries at or after `cut` see, of the keys before `cut`, only kept ones."""
        assert call.position is not None
        length, total = call.query.shape[2], call.key.shape[2]
        begins = max(int(call.position[-1]) + 1 - total, 0)  # position of the first key
        before = cut - begins  # keys before the cut
        early = int((call.position < cut).sum())  # queries before the cut
        if before <= 0 or (early == length and before > total):
            return call  # the cache holds no key before the cut any more, or the cut is not reached yet
        later = slice(early, length)
        end = torch.full((1,), before, device=call.position.device)
        if not self.oracle and (early or call.layer not in self.selected):
            past = call.query[:, :, :early] if early else None
            self.selected[call.layer] = self._select(call, before, None, end, None, past)
        if early == length:
            return call
        kept = self._select(call, before, None, end, later) if self.oracle else self.selected[call.layer]
        shape = (*call.query.shape[:2], length, total)
        mask = torch.ones(shape, dtype=torch.bool, device=call.key.device)
        mask[:, :, later, :before] = _per_query_head(kept.mask, (*shape[:2], length - early, before))
        seen = call.seen()
        bias = None
        if kept.log_weights is not None:
            bias = call.query.new_zeros(shape)
            bias[:, :, later, :before] = _per_query_head(kept.log_weights, (*shape[:2], length - early, before))
        return _with(call, mask if seen is None else mask & seen, bias)

    def _select(
        self, call: Captured, total: int, seen: Tensor | None, place: Tensor, rows: slice | None,
        past: Tensor | None = None,
    ) -> Selection:  # fmt: skip
        """Keys that the layer's policies select among the first `total` keys.

        `rows` are the queries that attend, `place` the indices of these queries' own keys, `seen` the mask of visible
        keys, `past` the earlier queries by which some policies rank keys.
        """
        count = (self.counts if self.counts.ndim == 0 else self.counts[call.layer]).to(call.key.device)

        def by(name: str) -> Selection:
            policy = self.known[name]
            own = call.query if past is None and policy.needs_past and not call.causal else past  # encoder: all queries
            served = call.query[:, :, rows] if rows is not None and policy.sees_queries else None
            inputs = policy_input(call, total, place, past=own, served=served, seen=seen)
            counts = count.view(-1, *(1,) * (2 + policy.sees_queries))  # broadcastable to (B, Hkv[, G], m, n)
            kept = policy.select(inputs, counts, 1, generator_for(self.seed, call.layer, total))
            return Selection(kept.mask[0], None if kept.log_weights is None else kept.log_weights[0])

        if isinstance(self.policies, str):
            return by(self.policies)
        names = self.policies[call.layer]
        parts = {name: by(name) for name in sorted(set(names))}
        shape = (*call.key.shape[:2], len(place), total)
        zero = torch.zeros((), device=call.key.device)

        def join(part: Callable[[Selection], Tensor]) -> Tensor:
            return torch.cat([part(parts[name]).expand(shape)[:, [head]] for head, name in enumerate(names)], 1)

        weighted = any(part.log_weights is not None for part in parts.values())
        weights = join(lambda part: zero if part.log_weights is None else part.log_weights) if weighted else None
        return Selection(join(lambda part: part.mask), weights)


def policy_input(
    call: Captured, total: int, place: Tensor, *, past: Tensor | None, served: Tensor | None = None,
    seen: Tensor | None = None,
) -> PolicyInput:  # fmt: skip
    """Input of a key policy that selects among the first `total` keys of a layer.

    Leading axes are the batch and the key/value heads; for an oracle policy, which sees the queries `served` that will
    attend, also the query heads that share a key/value head. `past` (earlier queries) and `served` are (B, Hq, p, k).
    """
    batch, kv_heads = call.key.shape[:2]

    def grouped(query: Tensor) -> Tensor:
        return query.float().reshape(batch, kv_heads, -1, *query.shape[2:]) * call.scale

    key, value = (part[:, :, :total].float() for part in (call.key, call.value))
    scores = None
    if served is not None:
        key, value = key[:, :, None], value[:, :, None]
        scores = grouped(served) @ key.mT  # without softcap, which keeps their order
        seen = seen if seen is None or seen.ndim < 4 else seen[:, :, None]
    sink = int(call.causal and call.sliding_window is None and seen is None)  # at a cut, keep the first token
    return PolicyInput(key, value, scores, seen, place, sink, None if past is None else grouped(past), call.softcap)


def _per_query_head(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Mask or weights by query head, of `shape` (B, Hq, m, n), from `part` (B, Hkv, ...) or (B, Hkv, G, ...)."""
    if part.ndim == 5:
        return part.flatten(1, 2).expand(shape)
    return part.repeat_interleave(shape[1] // part.shape[1], 1).expand(shape)


def _with(call: Captured, mask: Tensor, weights: Tensor | None) -> Captured:
    """Attention input `call` with the mask `mask`, and the log-weights `weights` added to the bias of the scores."""
    if weights is None:
        return replace(call, mask=mask)
    weights = weights.masked_fill(~mask, 0)
    return replace(call, mask=mask, bias=weights if call.bias is None else call.bias + weights)
