"""Run a real model with selected keys or rescaled attention scores.

A change is a function from the input of a layer's attention (`Captured`) to another input. If it changes at most the
queries, the model's own attention runs. Otherwise `attend` computes the outputs, in blocks of queries.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.attention.certified import RULES, ReadRule, predicted_scores, read_keys
from limitlens.attention.policies import PolicyInput, Selection, get_policy
from limitlens.attention.subset import attend_subset, capped
from limitlens.errors import InputError, as_array, check_number, check_relative
from limitlens.models.catalog import LoadedModel
from limitlens.models.exponents import read_exponents
from limitlens.models.relay import Captured, Output, hook_attention
from limitlens.models.rope_scaling import rope_scaled
from limitlens.sampling.streams import generator_for

Change = Callable[[Captured], Captured]
DIFFERENT_POSITIONS = "the texts of a batch have different positions; run them one at a time or unpadded"
MAX_SCORES = 1 << 24  # scores or priorities (one per query and key) held in memory at once


@contextmanager
def intervene(
    model: PreTrainedModel | LoadedModel, *, keys: str | Sequence[Sequence[str]] | Change = "all",
    count: int | Sequence[Sequence[int]] | None = None, cut: int | None = None,
    score_scale: float | Sequence[Sequence[float]] | Callable[[int, Tensor], Tensor] | Any = 1.0,
    certify: tuple[float, float] | None = None, seed: int = 0,
) -> Iterator[None]:  # fmt: skip
    """Make forward passes of `model` within the `with` block attend to selected keys only, or with rescaled scores.

    A key/value cache of fixed length (`StaticCache`) is not supported.

    Parameters
    ----------
    keys : "all", the name of a key policy such as "recent", names [layer][kv_head], or a function from a layer's
        `Captured` to the `Captured` used instead. A probe calls this function from several threads.
    count : number of keys that each query attends to, or numbers [layer][kv_head].
    cut : length of the context, of which `count` keys are selected once. Later queries see these keys and all later
        tokens; layers whose sliding window is shorter than the context are left as they are. If None, each query
        selects among the keys it sees; a causal model then allows no policy that ranks keys by earlier queries.
    score_scale : factor of scale · <query, key>, before any softcap or bias: a number, an array (layers, heads), a
        function (layer, positions of the queries) -> tensor broadcastable to (heads, queries), or a file that
        `limitlens temper` wrote, which also sets the rope scaling. Gradients flow through it; under
        `torch.utils.checkpoint` call `backward` within the block.
    certify : (ε, δ): each query reads the keys that the rule "int4" of `limitlens certify` selects, so that its output
        error is at most ε with probability 1 − δ (asymptotic); instead of `keys`.
    seed : seed of random policies and of certified reads.

    >>> ids = model.tokenizer('abcabcabc', return_tensors='pt')['input_ids']
    >>> with ll.intervene(model, keys='recent', count=2):
    ...     changed = model.model(ids).logits
    >>> bool((changed == model.model(ids).logits).all())
    False
    """
    stack = model.model if isinstance(model, LoadedModel) else model
    config = stack.config.get_text_config()
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    changes: list[Change] = []
    positions: Any = nullcontext()
    if isinstance(score_scale, str | Path):
        found = read_exponents(score_scale, stack)
        score_scale = found.factor()
        positions = rope_scaled(stack, found.rope_scaling, found.to / found.trained, found.trained)
    if callable(score_scale) or np.ndim(score_scale) or score_scale != 1:
        changes.append(_scaling(score_scale, layers, heads))
    if certify is not None and (keys != "all" or count is not None or cut is not None):
        raise InputError("certify was given with keys, a count or a cut; expected certify or a key policy, not both")
    if certify is not None:
        changes.append(certified_reads(check_promise(*certify), seed))
    elif callable(keys):
        changes.append(keys)
    elif keys != "all":
        changes.append(PolicyHook(keys, count, cut, seed, kv_shape(stack)))
    elif count is not None or cut is not None:
        raise InputError("a count or a cut was given without a key policy; expected one, such as keys='recent'")

    def act(call: Captured, go_on: Callable[[Tensor], Output]) -> Output:
        changed = call
        for change in changes:
            changed = change(changed)
        same = all(getattr(changed, name) is getattr(call, name) for name in ("key", "value", "mask", "bias"))
        return go_on(changed.query) if same else (attend(changed).transpose(1, 2).contiguous(), None)

    with positions, hook_attention(stack, act):
        yield


def kv_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Number of layers of a model, and number of key/value heads of a layer."""
    config = model.config.get_text_config()
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def attend(call: Captured, max_scores: int = MAX_SCORES) -> Tensor:
    """Outputs (B, Hq, L, v) of an attention layer with the input `call`, computed in blocks of queries."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    query, groups = call.query, call.query.shape[1] // call.key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (call.key, call.value))
    batch, heads, length, total = *query.shape[:3], key.shape[2]
    rows = max(1, max_scores // (batch * heads * total))
    precise = torch.promote_types(query.dtype, torch.float32)
    outputs = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen, bias, block = call.seen(start, stop), call.bias, query[:, :, start:stop]
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        if call.softcap is None and call.sinks is None:  # torch's kernel is twice as fast, but has neither of them
            if seen is not None:
                zero, lowest = query.new_zeros(()), torch.finfo(query.dtype).min
                bias = torch.where(seen, zero if bias is None else bias.to(query.dtype), lowest)
            added = None if bias is None else bias.to(query.dtype).expand(batch, heads, stop - start, total)
            outputs.append(sdpa(block, key, value, attn_mask=added, scale=call.scale))
            continue
        scores = capped(call.scale * (block.to(precise) @ key.mT.to(precise)), call.softcap)
        sinks = None if call.sinks is None else call.sinks.view(1, -1, 1)
        _, output = attend_subset(scores, value.to(precise), mask=seen, log_weights=bias, sinks=sinks)
        outputs.append(output.to(query.dtype))
    return torch.cat(outputs, 2)


def _scaling(score_scale: Any, layers: int, heads: int) -> Change:
    """Function that multiplies the queries of an attention input, and so the scores, by `score_scale`."""
    if not callable(score_scale):
        shape = as_array("score_scale", score_scale).shape  # raises if a number is not finite
        if shape not in ((), (layers, heads)):
            expected = f"expected a number or one for each of {layers} layers and {heads} heads"
            raise InputError(f"score_scale has shape {shape}; {expected}")
        table = torch.as_tensor(score_scale)

    def change(call: Captured) -> Captured:
        if callable(score_scale):
            if call.position is None:
                raise InputError(DIFFERENT_POSITIONS)
            factors = torch.as_tensor(score_scale(call.layer, call.position))
        else:
            factors = table if table.ndim == 0 else table[call.layer, :, None]
        shape = tuple(call.query.shape[1:3])
        try:
            full = factors.to(call.query).expand(shape)
        except RuntimeError:
            given = f"score_scale of layer {call.layer} has shape {tuple(factors.shape)}"
            raise InputError(f"{given}; expected a shape that broadcasts to (heads, queries) = {shape}") from None
        return replace(call, query=call.query * full[None, :, :, None])

    return change


class PolicyHook:
    """Function on the input of a layer's attention that masks all but `counts` keys of each head, by a key policy.

    Each query selects its keys or, if `cut` is given, all queries from position `cut` on share one selection.
    `policies` and `counts` are one value for all heads, or values [layer][kv_head].
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
        expected = f"one name, or for each of {shape[0]} layers a list of {shape[1]} names, one per key/value head"
        if not isinstance(policies, str) and (self.oracle or tuple(map(len, policies)) != (shape[1],) * shape[0]):
            given = f"key policies are {policies}{', with an oracle in a list' if self.oracle else ''}"
            raise InputError(f"{given}; expected {expected} (an oracle, which knows queries, only as the one name)")
        self.counts = torch.as_tensor(np.asarray(-1 if counts is None else counts))
        whole = self.counts.shape in ((), shape) and not self.counts.is_floating_point()
        if not whole or bool((self.counts < (0 if cut else 1)).any()):
            each = f"for each of {shape[0]} layers and {shape[1]} key/value heads"
            expected = f"a whole number of at least 1, or one {each}"
            raise InputError(f"the number of keys to keep is {counts}; expected {expected}")
        if cut is not None and cut < 1:
            raise InputError(f"the cut is at {cut}; expected a position of at least 1, the length of the context")
        if cut is not None and bool((self.counts > cut).any()):
            most = int(self.counts.max())
            raise InputError(f"{most} keys are to be kept of {cut} before the cut; expected at most as many")
        self.selected: dict[int, Selection] = {}  # by layer: the keys before the cut that are kept
        self.repeat: Sequence[Tensor] | None = None  # attention while the context is repeated, if a policy needs it

    def __call__(self, call: Captured) -> Captured:
        """Return the attention input `call` with a mask that hides all keys except the selected ones."""
        if call.position is None:
            raise InputError(DIFFERENT_POSITIONS)
        return self._for_each_query(call) if self.cut is None else self._after_cut(call, self.cut)

    def _for_each_query(self, call: Captured) -> Captured:
        """Attention input `call` with a mask in which each query keeps `counts` of the keys that it sees."""
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
        """Attention input `call` in which queries from position `cut` on see only selected keys from before `cut`."""
        assert call.position is not None
        length, total = call.query.shape[2], call.key.shape[2]
        begins = max(int(call.position[-1]) + 1 - total, 0)  # position of the first key
        before = cut - begins  # keys before the cut
        early = int((call.position < cut).sum())  # queries before the cut
        if call.slides(cut) or before <= 0 or (early == length and before > total):
            return call  # the cache holds not all or none of the keys before the cut, or the cut is not reached yet
        later = slice(early, length)
        end = torch.full((1,), before, device=call.key.device)
        if not self.oracle and (early or call.layer not in self.selected):
            past = call.query[:, :, :early] if early else None
            self.selected[call.layer] = self._select(call, before, None, end, None, past)
        if early == length:
            return call
        kept = self._select(call, before, None, end, later) if self.oracle else self.selected[call.layer]
        shape = (*call.query.shape[:2], length, total)
        mask = torch.ones(shape, dtype=torch.bool, device=call.key.device)
        rows = (*shape[:2], length - early, before)  # of the selection, the last keys: a sliding window drops the first
        mask[:, :, later, :before] = _per_query_head(kept.mask[..., -before:], rows)
        seen = call.seen()
        bias = None
        if kept.log_weights is not None:
            bias = call.query.new_zeros(shape)
            bias[:, :, later, :before] = _per_query_head(kept.log_weights[..., -before:], rows)
        return _with(call, mask if seen is None else mask & seen, bias)

    def _select(
        self, call: Captured, total: int, seen: Tensor | None, place: Tensor, rows: slice | None,
        past: Tensor | None = None,
    ) -> Selection:  # fmt: skip
        """Selection among the first `total` keys for the queries `rows`, whose own keys have the indices `place`."""
        count = (self.counts if self.counts.ndim == 0 else self.counts[call.layer]).to(place, non_blocking=True)

        def by(name: str, heads: Sequence[int] = ()) -> Selection:
            policy = self.known[name]
            own = call.query if past is None and policy.needs_past and not call.causal else past  # encoder: all queries
            served = call.query[:, :, rows] if rows is not None and policy.sees_queries else None
            repeat = None if self.repeat is None else self.repeat[call.layer]
            inputs = policy_input(call, total, place, past=own, served=served, seen=seen, repeat=repeat)
            if inputs.scores is not None and call.bias is not None:
                bias = call.bias.expand(-1, *call.query.shape[1:3], call.key.shape[2])[:, :, rows, :total]
                bias = bias.reshape(len(bias), call.key.shape[1], -1, *bias.shape[2:])
                inputs = replace(inputs, scores=inputs.scores + bias)
            counts = count.view(-1, *(1,) * (2 + policy.sees_queries))  # broadcastable to (B, Hkv[, G], m, n)
            if heads:
                inputs = inputs.of_heads(heads)
                counts = torch.stack([counts[min(head, len(counts) - 1)] for head in heads])
            kept = policy.select(inputs, counts, 1, generator_for(self.seed, call.layer, total))
            return Selection(kept.mask[0], None if kept.log_weights is None else kept.log_weights[0])

        if isinstance(self.policies, str):
            return by(self.policies)
        names = self.policies[call.layer]
        whose = {name: [head for head, own in enumerate(names) if own == name] for name in sorted(set(names))}
        # Random draws are made for all heads, so that they do not depend on the policies of others.
        some = {name for name in whose if seen is None and whose.keys() != {name} and not self.known[name].sampled}
        parts = {name: by(name, heads if name in some else ()) for name, heads in whose.items()}
        shape = (*call.key.shape[:2], len(place), total)
        zero = torch.zeros(shape[:1] + (1,) * 3, device=call.key.device)

        def join(part: Callable[[Selection], Tensor]) -> Tensor:
            found = []
            for head, name in enumerate(names):
                whole = part(parts[name]).expand(shape[0], -1, *shape[2:])
                found.append(whole[:, min(whose[name].index(head) if name in some else head, whole.shape[1] - 1)])
            return torch.stack(found, 1)

        weighted = any(part.log_weights is not None for part in parts.values())
        weights = join(lambda part: zero if part.log_weights is None else part.log_weights) if weighted else None
        return Selection(join(lambda part: part.mask), weights)


def check_promise(error: float, delta: float) -> tuple[float, float]:
    """Return the error ε and failure probability δ of certified reads if both lie between 0 and 1."""
    expected = "a probability of a larger error between 0 and 1, such as 0.1"
    return check_relative(error), check_number("delta", delta, expected, closed=False, below=1)


def certified_reads(
    promise: tuple[float, float], seed: int, rule: str = "int4", max_scores: int = MAX_SCORES
) -> Change:
    """Function on the input of a layer's attention that masks the keys a query does not read, to keep `promise`."""
    chosen = RULES[rule]

    def change(call: Captured) -> Captured:
        batch, heads, length, total = *call.query.shape[:3], call.key.shape[2]
        device = call.key.device
        generator = generator_for(seed, call.layer, total, device=device)
        mask = torch.empty((batch, heads, length, total), dtype=torch.bool, device=device)
        weights = torch.zeros(mask.shape, device=device)
        at_once = max(1, max_scores * (1 if device.type == "cpu" else 32) // (8 * total * heads))
        every = torch.arange(heads, device=device)
        for b, start in np.ndindex(batch, -(-length // at_once)):
            rows = torch.arange(start * at_once, min((start + 1) * at_once, length), device=device)
            found = head_rows(call, b, every, rows.expand(heads, -1))
            predicted = predicted_rows(call, b, every, rows.expand(heads, -1), chosen)
            scores, seen, predicted = (part.flatten(0, 1) for part in (found[0], found[2], predicted))
            sinks = None if found[3] is None else found[3].flatten()
            uniform = torch.rand(scores.shape, generator=generator, device=device)
            own = read_keys(chosen, scores, predicted, found[1], seen, promise, uniform, sinks)
            mask[b, :, rows], weights[b, :, rows] = (part.view(heads, -1, total) for part in own)
        return _with(call, mask, weights)

    return change


def head_rows(call: Captured, b: int, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores (h, m, n), values (h, n, v), visible keys (h, m, n) and learned sinks (h, m) of some queries of a text.

    The queries are `rows` (h, m) of the query heads `heads` (h,) of text b.
    """
    shape = (*call.query.shape[:3], call.key.shape[2])
    value = call.value[b, heads * call.key.shape[1] // shape[1]].float()
    scores = _finished(call, b, heads, rows, _scaled(call, b, heads, rows) @ _keys(call, b, heads).mT)
    places = torch.arange(shape[3], device=value.device)
    seen = places <= (places[-shape[2] :][rows][..., None] if call.causal else shape[3])
    seen = seen.expand(scores.shape) if call.mask is None else call.mask.expand(shape)[b, heads[:, None], rows]
    sinks = None if call.sinks is None else call.sinks[heads, None].float().expand(rows.shape)
    return scores, value, seen, sinks


def predicted_rows(call: Captured, b: int, heads: Tensor, rows: Tensor, rule: ReadRule) -> Tensor:
    """Predicted scores (h, m, n) of the same queries, from a small copy or bounds of the keys."""
    predicted = predicted_scores(rule, _scaled(call, b, heads, rows), _keys(call, b, heads))
    return _finished(call, b, heads, rows, predicted)


def _scaled(call: Captured, b: int, heads: Tensor, rows: Tensor) -> Tensor:
    return call.query[b, heads[:, None], rows].float() * call.scale


def _keys(call: Captured, b: int, heads: Tensor) -> Tensor:
    return call.key[b, heads * call.key.shape[1] // call.query.shape[1]].float()


def _finished(call: Captured, b: int, heads: Tensor, rows: Tensor, scores: Tensor) -> Tensor:
    """Scores with the softcap and the bias of the layer."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    bias = 0.0 if call.bias is None else call.bias.expand(shape)[b, heads[:, None], rows]
    return capped(scores, call.softcap) + bias


def policy_input(
    call: Captured, total: int, place: Tensor, *, past: Tensor | None, served: Tensor | None = None,
    seen: Tensor | None = None, repeat: Tensor | None = None,
) -> PolicyInput:  # fmt: skip
    """Input of a key policy that selects among the first `total` keys of a layer.

    `place` are the indices of the attending queries among the keys. `past` (earlier queries) and `served` (the
    attending queries, only for an oracle) are (B, Hq, p, k). For an oracle, heads have the axes (Hkv, Hq / Hkv).
    `repeat` (Hkv, total) are the weights of `limitlens.cache.reconstruction.repeat_attention`.
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
    return PolicyInput(
        key, value, scores, seen, place, sink, None if past is None else grouped(past), call.softcap,
        None if repeat is None else repeat.expand(batch, *repeat.shape), call.frequencies if call.causal else None,
    )  # fmt: skip


def _per_query_head(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Mask or weights of `shape` (B, Hq, m, n), from `part` by key/value head, (B, Hkv, ...) or (B, Hkv, G, ...)."""
    if part.ndim == 5:
        return part.flatten(1, 2).expand(shape)
    return part.repeat_interleave(shape[1] // part.shape[1], 1).expand(shape)


def _with(call: Captured, mask: Tensor, weights: Tensor | None) -> Captured:
    if weights is None:
        return replace(call, mask=mask)
    weights = weights.masked_fill(~mask, 0)
    return replace(call, mask=mask, bias=weights if call.bias is None else call.bias + weights)
