"""Sampled keys in a live model: each query of a layer attends to n random keys of its document.

A query keeps n of the keys that it sees, drawn without replacement; all of them where it sees no more than n. In a
causal model it always keeps itself and, unless the layer has a sliding window, the first token, the sink of most
decoders; both count among the n. The m other keys stand for the c keys they were drawn from, so log(c/m) is added to
their scores, as in `limitlens.attention.policies.random`. Where no key is certain this would change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from limitlens.errors import InputError
from limitlens.models import Captured
from limitlens.sampling.cells import parse_sizes

KEY_SHARING = ("shared", "own")  # the queries of a document attend to the same keys, or each query to keys of its own
MIN_CAUSAL_KEYS = 3  # of a causal query: itself, the first token and a random one


class SampledKeys:
    """The change of one forward that leaves each query n keys, for `limitlens.models.intervene`.

    One random number for each key of a document decides for all its queries, which therefore share their keys as far
    as a causal mask lets them; `per_query` draws one number for each query and key. All heads of a layer share the
    draw unless `per_head`; each layer draws anew unless `fixed`. Only `layers` sample, all of them by default.
    """

    def __init__(
        self, count: int, generator: torch.Generator, *, per_query: bool = False, fixed: bool = False,
        per_head: bool = False, layers: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        self.count = count
        self.generator = generator
        self.per_query = per_query
        self.fixed = fixed
        self.per_head = per_head
        self.layers = None if layers is None else frozenset(layers)
        self.drawn: Tensor | None = None

    def __call__(self, call: Captured) -> Captured:
        """The call with the keys that its queries keep."""
        if self.layers is not None and call.layer not in self.layers:
            return call
        batch, heads, length, _ = call.query.shape
        keys = call.key.shape[2]
        if self.per_head:
            key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (call.key, call.value))
            call = replace(call, key=key, value=value)
        if self.drawn is None or not self.fixed:
            shape = batch, heads if self.per_head else 1, length if self.per_query else 1, keys
            self.drawn = torch.rand(shape, generator=self.generator).to(call.key.device)
        seen = call.seen()
        count = min(self.count, keys)
        if seen is None and call.bias is None and not self.per_query:  # fewer keys: cheaper than the whole layer
            kept = self.drawn[:, :, 0].topk(count, -1, largest=False, sorted=False).indices[..., None]
            key, value = (
                part.gather(2, kept.expand(-1, part.shape[1], -1, part.shape[3])) for part in (call.key, call.value)
            )
            return replace(call, key=key, value=value)
        order = self.drawn.expand(*self.drawn.shape[:2], length, keys)
        order = order if seen is None else order.masked_fill(~seen, 2.0)
        if not call.causal or seen is None:
            mask = order <= order.kthvalue(count, -1, keepdim=True).values
            return replace(call, mask=mask if seen is None else mask & seen)
        position = torch.arange(keys, device=order.device)
        certain = position == position[keys - length :, None]
        certain = certain if call.sliding_window is not None else certain | (position == 0)
        order = order.masked_fill(certain, -1.0)
        drawable = seen & ~certain
        mask = (order <= order.kthvalue(count, -1, keepdim=True).values) & seen
        ratio = drawable.sum(-1, keepdim=True) / (mask & drawable).sum(-1, keepdim=True).clamp_min(1)  # c/m
        weight = torch.where(drawable, ratio.clamp_min(1).log(), 0.0).to(call.query.dtype)
        return replace(call, mask=mask, bias=weight if call.bias is None else call.bias + weight)


def check_keys(keys: str | Sequence[int], length: int, causal: bool) -> tuple[int, ...]:
    """Numbers of sampled keys, each possible for a query of documents of `length` tokens."""
    sizes = parse_sizes(keys)
    least = MIN_CAUSAL_KEYS if causal else 1
    if sizes[0] < least or sizes[-1] > length:
        given = f"keys are {', '.join(map(str, sizes))} for documents of {length} tokens"
        raise InputError(f"{given}; expected numbers from {least} to {length}")
    return sizes
