"""Size of a model's own KV cache, layer by layer: all tokens of a context, or the last ones of a sliding window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from limitlens.errors import InputError
from limitlens.models import LoadedModel, capture
from limitlens.models.intervene import kv_shape


@dataclass(frozen=True)
class LayerCache:
    """What a model's own KV cache holds of one layer when it has read a context."""

    heads: int = 0  # key/value heads; 0: the layer has no cache
    entries: int = 0  # of each head: all tokens, or with a sliding window of W tokens the last W − 1
    entry_bytes: int = 0  # bytes of one key and its value


def check_decoder(loaded: LoadedModel) -> None:
    """Raise an `InputError` if the model is an encoder, which keeps no KV cache."""
    if not loaded.causal:
        expected = "a decoder, such as smollm2 (ll.intervene selects the keys of an encoder)"
        raise InputError(f"{loaded.name} is an encoder, which keeps no cache; expected {expected}")


def layer_caches(loaded: LoadedModel, context: int) -> list[LayerCache]:
    """Read what the cache of each layer of a decoder holds after `context` tokens from the cache of a short text."""
    stack: Any = loaded.model.base_model
    ids = torch.zeros((1, 2), dtype=torch.long, device=loaded.model.device)
    with torch.inference_mode(), capture(stack, lambda call: None):  # raises if the attention cannot be captured
        output = stack(input_ids=ids, **{"use_cache": True} if loaded.causal else {})
    check_decoder(loaded)
    found = [LayerCache()] * kv_shape(loaded.model)[0]
    for place, layer in enumerate(output.past_key_values.layers):
        if getattr(layer, "keys", None) is not None:
            entries = min(context, layer.sliding_window - 1) if layer.is_sliding else context
            width = layer.keys.shape[-1] + layer.values.shape[-1]
            found[place] = LayerCache(layer.keys.shape[1], entries, width * layer.keys.element_size())
    return found


def share_of(size: int, caches: Sequence[LayerCache], context: int) -> float:
    """Share of the layers that cache the whole context, for which the whole model's cache fits into `size` bytes."""
    whole = sum(cache.heads * cache.entries * cache.entry_bytes for cache in caches)
    full = [cache for cache in caches if cache.entries == context]
    entry, entries = max((cache.entry_bytes for cache in full), default=0), sum(cache.heads for cache in full) * context
    beside = whole - sum(cache.heads * cache.entry_bytes for cache in full) * context  # of sliding windows
    if not beside + entry <= size <= whole:
        least = f"{beside + entry:,}, one entry" + f" beside {beside:,} bytes of sliding windows" * bool(beside)
        expected = f"between {least}, and {whole:,}, the whole cache, or a share such as 0.25"
        raise InputError(f"total is {size:,} bytes; expected {expected}")
    return (size - beside) // entry / entries if full else 1.0
