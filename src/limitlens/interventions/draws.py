"""Keys drawn at random in a live model: each query of a layer sees n of the tokens of its document.

A query keeps n of the keys that it sees, drawn without replacement; all of them where it sees no more. In a causal
model it always keeps itself and, unless the layer has a sliding window, the first token, the sink of most decoders;
both count among the n. The m others stand for the c keys they were drawn from, so log(c/m) is added to their scores, as
in `limitlens.attention.policies.random`; where nothing is kept for certain this would change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from limitlens.errors import InputError
from limitlens.models import Captured
from limitlens.sampling.cells import parse_sizes

WINDOW = 512  # tokens of a document, where the model knows as many positions
WAYS = ("shared", "own")  # whether the queries of a document share their keys
FEWEST = 3  # keys of a query of a causal model: itself, the first token and a random one


class Draws:
    """The change of one forward that leaves each query n keys (`limitlens.models.intervene`).

    One number for each key of a document decides for all its queries: they share their keys, as far as those of a
    causal model see the same. With `own` there is one for each query and key. All heads of a layer share a draw, unless
    they are `apart`; each layer has its own, unless they are `fixed`.
    """

    def __init__(
        self, count: int, generator: torch.Generator, *, own: bool = False, fixed: bool = False, apart: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        self.count, self.generator, self.own, self.fixed, self.apart = count, generator, own, fixed, apart
        self.layers = None if layers is None else frozenset(layers)  # that draw; None: all
        self.drawn: Tensor | None = None

    def __call__(self, call: Captured) -> Captured:
        """What the layer attends to."""
        if self.layers is not None and call.layer not in self.layers:
            return call
        (batch, heads, length, _), there = call.query.shape, call.key.shape[2]
        if self.apart:
            key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (call.key, call.value))
            call = replace(call, key=key, value=value)
        if self.drawn is None or not self.fixed:
            shape = batch, heads if self.apart else 1, length if self.own else 1, there
            self.drawn = torch.rand(shape, generator=self.generator).to(call.key.device)
        seen, count = call.seen(), min(self.count, there)
        if seen is None and call.bias is None and not self.own:  # then a layer costs less than with all keys
            kept = self.drawn[:, :, 0].topk(count, -1, largest=False, sorted=False).indices[..., None]
            key, value = (
                part.gather(2, kept.expand(-1, part.shape[1], -1, part.shape[3])) for part in (call.key, call.value)
            )
            return replace(call, key=key, value=value)
        order = self.drawn.expand(*self.drawn.shape[:2], length, there)
        order = order if seen is None else order.masked_fill(~seen, 2.0)
        if not call.causal or seen is None:
            mask = order <= order.kthvalue(count, -1, keepdim=True).values
            return replace(call, mask=mask if seen is None else mask & seen)
        key_at = torch.arange(there, device=order.device)
        held = key_at == key_at[there - length :, None]
        held = held if call.sliding_window is not None else held | (key_at == 0)
        order, free = order.masked_fill(held, -1.0), seen & ~held
        mask = (order <= order.kthvalue(count, -1, keepdim=True).values) & seen
        stand = free.sum(-1, keepdim=True) / (mask & free).sum(-1, keepdim=True).clamp_min(1)
        weight = torch.where(free, stand.clamp_min(1).log(), 0.0).to(call.query.dtype)
        return replace(call, mask=mask, bias=weight if call.bias is None else call.bias + weight)


def numbers_of_keys(keys: str | Sequence[int], length: int, causal: bool) -> tuple[int, ...]:
    """Numbers of keys that queries of documents of this length may be left."""
    sizes, least = parse_sizes(keys), FEWEST if causal else 1
    if sizes[0] < least or sizes[-1] > length:
        given = f"keys are {', '.join(map(str, sizes))} for documents of {length} tokens"
        raise InputError(f"{given}; expected numbers from {least} to {length}")
    return sizes
