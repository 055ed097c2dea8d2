"""Run a real model with selected keys or rescaled scores: the basis of every experiment on a live model.

A change is a function from the input of a layer's attention (`Captured`) to another input. If it returns the same
object, the model runs unchanged, bit for bit. If it changes only the queries, as a factor on the scores does, the
model's own attention runs and no n × n matrix is held. Otherwise `attend` computes the outputs in blocks of queries.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.attention.subset import capped
from limitlens.errors import InputError, as_array
from limitlens.models.catalog import LoadedModel
from limitlens.models.exponents import read_exponents
from limitlens.models.relay import Captured, Output, hook_attention
from limitlens.models.rope_scaling import rope_scaled

Change = Callable[[Captured], Captured]
MAX_SCORES = 1 << 24  # scores held in memory at once


@contextmanager
def intervene(
    model: PreTrainedModel | LoadedModel, *, keys: str | Sequence[Sequence[str]] | Change = "all",
    count: int | Sequence[Sequence[int]] | None = None, cut: int | None = None,
    score_scale: float | Sequence[Sequence[float]] | Callable[[int, Tensor], Tensor] | Any = 1.0,
    seed: int = 0,
) -> Iterator[None]:  # fmt: skip
    """Make every forward pass of `model` within the `with` block attend to selected keys, with rescaled scores.

    A cache that holds a sliding window is supported; a cache of fixed length (`StaticCache`) is not.

    Parameters
    ----------
    keys : "all", a key policy by name, names [layer][kv_head], or a function from a layer's `Captured` to the
        `Captured` used instead (`dataclasses.replace`: other queries, keys, values, mask or bias); a probe within the
        block calls the function from several threads.
    count : number of keys that each query keeps, or one number for each layer and key/value head.
    cut : length of the context. Its cache is cut once to `count` keys; queries at or after this position see the kept
        keys and all later tokens, queries before it see everything. If None, each query selects among the keys it
        sees; in a causal model this excludes policies that rank keys by earlier queries.
    score_scale : factor of scale · <query, key>, before a softcap and before any bias of the model: a number, an array
        (layers, heads), a function of the layer and the queries' positions (a tensor (queries,)) that returns a tensor
        broadcastable to (heads, queries), or the file of exponents that `limitlens temper` wrote, which also sets the
        scaling of the rotary positions. Gradients flow through it, also under `torch.utils.checkpoint`; then call
        `backward` within the block, since it runs the layers again.
    seed : seed of random policies; the draws depend only on the seed, the layer and the number of keys.

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
    if callable(keys):
        changes.append(keys)
    elif keys != "all":
        from limitlens.models.policy_hook import PolicyHook

        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        changes.append(PolicyHook(keys, count, cut, seed, (layers, kv_heads)))
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


def attend(call: Captured, max_scores: int = MAX_SCORES) -> Tensor:
    """Outputs (B, Hq, L, v) of an attention layer for the input `call` (formula: `Captured`), in blocks of queries."""
    from torch.nn.functional import scaled_dot_product_attention

    from limitlens.attention.subset import attend_subset

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
            outputs.append(scaled_dot_product_attention(block, key, value, attn_mask=added, scale=call.scale))
            continue
        scores = capped(call.scale * (block.to(precise) @ key.mT.to(precise)), call.softcap)
        sinks = None if call.sinks is None else call.sinks.view(1, -1, 1)
        _, output = attend_subset(scores, value.to(precise), mask=seen, log_weights=bias, sinks=sinks)
        outputs.append(output.to(query.dtype))
    return torch.cat(outputs, 2)


def _scaling(score_scale: Any, layers: int, heads: int) -> Change:
    """Change (function from attention input to attention input) that multiplies the queries, and so their scores."""
    if not callable(score_scale):
        shape = np.shape(score_scale)
        if shape not in ((), (layers, heads)):
            expected = f"expected a number or one for each of {layers} layers and {heads} heads"
            raise InputError(f"score_scale has shape {shape}; {expected}")
        as_array("score_scale", score_scale)  # raises if a number is not finite
        table = torch.as_tensor(score_scale)

    def change(call: Captured) -> Captured:
        if callable(score_scale):
            if call.position is None:
                raise InputError(
                    "the texts of a batch have different positions; score_scale as a function of positions needs equal "
                    "ones, so run the texts one at a time or unpadded"
                )
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
