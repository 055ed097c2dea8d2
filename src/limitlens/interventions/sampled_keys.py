"""Sampled keys: an intervention on a live model, in which each query attends to n random keys of its document.

Keys are drawn without replacement, and a query that sees at most n keys keeps all. A causal query always keeps its own
token and, without a sliding window, the first token (the usual attention sink); both count among the n. The m other
keys stand for the c keys from which they were drawn, so log(c/m) is added to their scores.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from limitlens.errors import InputError, check_seed
from limitlens.models import Captured
from limitlens.sampling.cells import parse_sizes

KEY_SHARING = ("shared", "own")  # all queries of a document attend to the same keys, or each query draws its own
MIN_CAUSAL_KEYS = 3  # for a causal query: its own token, the first token and a random one


@dataclass(eq=False)
class SampledKeys:
    """Hook for `limitlens.models.intervene` that lets each query attend to only `count` random keys.

    With `key_sharing` "shared" the queries of a document share their keys, as far as a causal mask permits. With "own"
    each query draws its own. Every layer draws new keys unless `fixed`. Only `layers` sample keys (None: all layers).
    """

    count: int
    generator: torch.Generator
    key_sharing: str = "shared"
    fixed: bool = False
    layers: Collection[int] | None = None
    random_numbers: Tensor | None = None  # those of the last layer that sampled its keys

    def __call__(self, call: Captured) -> Captured:
        """Restrict one layer's attention to the sampled keys."""
        if self.layers is not None and call.layer not in self.layers:
            return call
        batch, _, length, _ = call.query.shape
        keys = call.key.shape[2]
        shared = self.key_sharing == "shared"
        if self.random_numbers is None or not self.fixed:
            shape = batch, 1, 1 if shared else length, keys
            self.random_numbers = torch.rand(shape, generator=self.generator).to(call.key.device)
        seen = call.seen()
        count = min(self.count, keys)
        if seen is None and call.bias is None and shared:  # fewer keys: cheaper than the whole layer
            kept = self.random_numbers[:, :, 0].topk(count, -1, largest=False, sorted=False).indices[..., None]
            key, value = (x.gather(2, kept.expand(-1, x.shape[1], -1, x.shape[3])) for x in (call.key, call.value))
            return replace(call, key=key, value=value)
        order = self.random_numbers.expand(batch, 1, length, keys)
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


def check_sampling(keys: str | Sequence[int], key_sharing: str, seed: int) -> None:
    """Raise an `InputError` if an option of an experiment with sampled keys is invalid for every model."""
    parse_sizes(keys)
    check_seed(seed)
    if key_sharing not in KEY_SHARING:
        raise InputError(f"key_sharing is {key_sharing!r}; expected one of {', '.join(KEY_SHARING)}")


def check_keys(keys: str | Sequence[int], length: int, causal: bool) -> tuple[int, ...]:
    """Numbers of keys per query from the option `keys`, checked to be possible in documents of `length` tokens."""
    sizes = parse_sizes(keys)
    least = MIN_CAUSAL_KEYS if causal else 1
    if sizes[0] < least or sizes[-1] > length:
        given = f"keys are {', '.join(map(str, sizes))} for documents of {length} tokens"
        raise InputError(f"{given}; expected numbers from {least} to {length}")
    return sizes
