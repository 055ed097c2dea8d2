"""Attention of a model to its context while it repeats the context: scores of cached keys, after KVzip.

Kim et al. (arXiv 2505.23416) repeat the context in chunks behind a prompt and score a cached key by the largest
attention weight that it receives. The softmax is over the first tokens, the chunk and the repeated tokens, as in the
authors' code and in kvpress's `KVzipPress` (both read; kvpress 0.5.5). Here the prompts have other words, chunks begin
at the first token of the context (there behind the system prompt), and learned sinks and softcaps take part.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from limitlens.attention.subset import scores_of
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.chat import chat_of
from limitlens.models.intervene import kv_shape
from limitlens.models.relay import Output, hook_attention

CHUNK = 2048  # tokens of the context that share a softmax
SINKS = 4  # first tokens, which take part in every softmax
LEAD = 8  # tokens before a later chunk, which the prompt quotes
ROWS = 64  # queries whose scores are held in memory at once: few enough for the processor's caches
PACKED = 8192  # tokens of chunks that a GPU reads in one forward pass
FIRST = "\n\nRepeat the text above word for word."
LATER = "\n\nRepeat the text above word for word, beginning after:"

Chunk = tuple[int, int, Tensor]  # its first token, the token behind it, and the tokens (1, m) of prompt and repetition


def repeat_attention(loaded: LoadedModel, cache: Any, ids: Tensor) -> list[Tensor]:
    """Largest attention weight that each cached key receives while the model repeats its context, as KVzip scores keys.

    `cache` is the model's key/value cache after it has read the context `ids` (n,) or (1, n); it is not changed.
    Returns (kv_heads, n) for each layer, empty for layers that do not cache the whole context. The maximum is over the
    query heads of a key/value head and over all tokens of the prompt and of the repeated chunk.
    """
    ids = ids.reshape(1, -1).to(loaded.model.device)
    chunks = _chunks(loaded, ids)
    if _half_on_gpu(loaded):
        try:
            return _packed(loaded, cache, ids.shape[1], chunks)
        except _OtherAttention:
            pass
    found = _empty(loaded)
    for start, stop, tokens in chunks:

        def take(call: Captured, start: int = start, stop: int = stop) -> None:
            if not call.slides(ids.shape[1]):
                _keep(found, call, ids.shape[1], start, _largest_weights(call, start, stop))

        with torch.inference_mode(), capture(loaded.model, take):
            loaded.model(input_ids=tokens, past_key_values=deepcopy(cache), logits_to_keep=1)
    return found


def read_twice(loaded: LoadedModel, ids: Tensor) -> list[Tensor]:
    """Read a context (1, n) and let the model repeat it; returns `repeat_attention` without keeping the cache."""
    with torch.inference_mode():
        cache = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    return repeat_attention(loaded, cache, ids)


def _chunks(loaded: LoadedModel, ids: Tensor) -> list[Chunk]:
    """Chunks of a context (1, n), each with the prompt that asks for it."""
    chat = chat_of(loaded)
    after = torch.tensor([() if chat is None else chat.after], dtype=ids.dtype, device=ids.device)
    asked = [loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(ids)
             for text in (FIRST, LATER)]  # fmt: skip
    found = []
    for start in range(0, ids.shape[1], CHUNK):
        stop = min(start + CHUNK, ids.shape[1])
        prompt = [asked[start > 0], ids[:, max(start - LEAD, 0) : start], after, ids[:, start:stop]]
        found.append((start, stop, torch.cat(prompt, 1)))
    return found


def _empty(loaded: LoadedModel) -> list[Tensor]:
    return [torch.zeros(0, device=loaded.model.device)] * kv_shape(loaded.model)[0]


def _keep(found: list[Tensor], call: Captured, length: int, start: int, weights: Tensor) -> None:
    """Store the weights (kv_heads, tokens of a chunk) of a layer."""
    if not found[call.layer].numel():
        found[call.layer] = torch.zeros(call.key.shape[1], length, device=call.key.device)
    found[call.layer][:, start : start + weights.shape[1]] = weights


class _OtherAttention(Exception):
    """Raised for attention with a softcap, learned sinks, a bias, a sliding window or unusual dimensions."""


def _half_on_gpu(loaded: LoadedModel) -> bool:
    return loaded.model.device.type == "cuda" and loaded.model.dtype in (torch.bfloat16, torch.float16)


def _packed(loaded: LoadedModel, cache: Any, length: int, chunks: list[Chunk]) -> list[Tensor]:
    """`repeat_attention` with several chunks in one forward pass, in which no chunk sees another, by fused kernels."""
    from limitlens.attention.kernels.largest import largest_weights

    found = _empty(loaded)
    several = max(1, PACKED // CHUNK)
    for first in range(0, len(chunks), several):
        part = chunks[first : first + several]
        ends = torch.tensor([0, *(tokens.shape[1] for *_, tokens in part)]).cumsum(0).tolist()

        def act(call: Captured, go_on: Callable[[Tensor], Output], part: list[Chunk] = part,
                ends: list[int] = ends) -> Output:  # fmt: skip
            other = (call.softcap, call.sinks, call.bias, call.sliding_window)
            kv_heads, width = call.key.shape[1], call.key.shape[3]
            if any(one is not None for one in other) or width != call.value.shape[3] or width.bit_count() != 1:
                raise _OtherAttention
            outputs, sums = [], []
            for (start, stop, _), begin, end in zip(part, ends[:-1], ends[1:], strict=True):
                query, own = call.query[:, :, begin:end], slice(length + begin, length + end)
                output, behind = _attend(query, call.key[:, :, own], call.value[:, :, own], call.scale, causal=True)
                chunk = call.key[:, :, start:stop]
                seen = torch.cat([call.key[:, :, : min(SINKS, start)], chunk], 2)
                total = torch.logaddexp(_attend(query, seen, seen, call.scale)[1], behind).reshape(kv_heads, -1)
                weights = largest_weights(query.reshape(kv_heads, -1, width), chunk[0], total, call.scale)
                _keep(found, call, length, start, weights)
                outputs.append(output)
                sums.append(behind)
            before, past = _attend(call.query, call.key[:, :, :length], call.value[:, :, :length], call.scale)
            share = torch.sigmoid(past - torch.cat(sums, 2))[..., None]  # of the weight that goes to the context
            merged = torch.lerp(torch.cat(outputs, 2).float(), before.float(), share)
            return merged.to(before.dtype).transpose(1, 2).contiguous(), None

        tokens = torch.cat([tokens for *_, tokens in part], 1)
        places = torch.cat([torch.arange(tokens.shape[1]) for *_, tokens in part]).to(tokens) + length
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # so that no mask is made
        with torch.inference_mode(), hook_attention(loaded.model, act):
            loaded.model(input_ids=tokens, past_key_values=deepcopy(cache), position_ids=places[None],
                         attention_mask=every, logits_to_keep=1)  # fmt: skip
    return found


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs (1, Hq, m, v) and log-sum-exps (1, Hq, m) of the flash kernel."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1]


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
