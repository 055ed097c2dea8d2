"""Attention of a model to its context while it repeats the context: scores of cached keys, after KVzip.

Kim et al. (arXiv 2505.23416) repeat the context in chunks behind a prompt and score a cached key by the largest
attention weight that it receives. The softmax is over the first tokens, the chunk and the repeated tokens, as in the
authors' code and in kvpress's `KVzipPress` (both read; kvpress 0.5.5). Here the prompts have other words, chunks begin
at the first token of the context (there behind the system prompt), and learned sinks and softcaps take part.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from limitlens.attention.subset import scores_of
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.chat import chat_of
from limitlens.models.intervene import kv_shape

CHUNK = 2048  # tokens of the context that one forward pass repeats
SINKS = 4  # first tokens, which take part in every softmax
LEAD = 8  # tokens before a later chunk, which the prompt quotes
ROWS = 64  # queries whose scores are held in memory at once: few enough for the processor's caches
FIRST = "\n\nRepeat the text above word for word."
LATER = "\n\nRepeat the text above word for word, beginning after:"


def repeat_attention(loaded: LoadedModel, cache: Any, ids: Tensor) -> list[Tensor]:
    """Largest attention weight that each cached key receives while the model repeats its context, as KVzip scores keys.

    `cache` is the model's key/value cache after it has read the context `ids` (n,) or (1, n); it is not changed.
    Returns (kv_heads, n) for each layer, empty for layers that do not cache the whole context. The maximum is over the
    query heads of a key/value head and over all tokens of the prompt and of the repeated chunk.
    """
    ids = ids.reshape(1, -1)
    length = ids.shape[1]
    found = [torch.zeros(0, device=loaded.model.device)] * kv_shape(loaded.model)[0]
    chat = chat_of(loaded)
    after = torch.tensor([() if chat is None else chat.after], dtype=ids.dtype, device=ids.device)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)

        def take(call: Captured, start: int = start, stop: int = stop) -> None:
            if call.slides(length):
                return
            if not found[call.layer].numel():
                found[call.layer] = torch.zeros(call.key.shape[1], length, device=call.key.device)
            found[call.layer][:, start:stop] = _largest_weights(call, start, stop)

        asked = loaded.tokenizer(LATER if start else FIRST, add_special_tokens=False, return_tensors="pt")["input_ids"]
        prompt = [asked.to(ids), ids[:, max(start - LEAD, 0) : start], after, ids[:, start:stop]]
        with torch.inference_mode(), capture(loaded.model, take):
            loaded.model(
                input_ids=torch.cat(prompt, 1).to(loaded.model.device), past_key_values=deepcopy(cache),
                logits_to_keep=1,
            )  # fmt: skip
    return found


def read_twice(loaded: LoadedModel, ids: Tensor) -> list[Tensor]:
    """Read a context (1, n) and let the model repeat it; returns `repeat_attention` without keeping the cache."""
    with torch.inference_mode():
        cache = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    return repeat_attention(loaded, cache, ids)


def _largest_weights(call: Captured, start: int, stop: int) -> Tensor:
    """Largest weights (kv_heads, stop − start) of the keys `start` to `stop` over all queries of a layer's attention.

    The softmax is over the first tokens before `start`, these keys, and the keys of the queries themselves. Logarithms
    of weights are compared, so that one exponential a key is left to compute.
    """
    query, key = call.query[0].float() * call.scale, call.key[0].float()
    length = query.shape[1]
    sinks = min(SINKS, start)
    lead = sinks + stop - start  # keys that every query sees
    key = torch.cat([key[:, :sinks], key[:, start:stop], key[:, -length:]], 1)
    query = query.view(key.shape[0], -1, *query.shape[1:])  # (kv_heads, g, m, k)
    best = key.new_full((key.shape[0], stop - start), float("-inf"))
    for row in range(0, length, ROWS):
        rows = query[:, :, row : row + ROWS]
        end = row + rows.shape[2]
        scores = scores_of(rows.flatten(1, 2), key[:, : lead + end], call.softcap)
        scores = scores.view(*rows.shape[:3], -1)
        later = torch.ones(end - row, end - row, dtype=torch.bool, device=key.device).triu(1)
        scores[..., lead + row :].masked_fill_(later, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if call.sinks is not None:
            total = torch.logaddexp(total, call.sinks.float().view(key.shape[0], -1, 1, 1))
        best = torch.maximum(best, (scores[..., sinks:lead] - total).amax((1, 2)))
    return best.exp()
