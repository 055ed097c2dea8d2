"""Run a real model with other keys or other scores: the intervention on which everything that acts on a model stands.

A change is a function from what a layer is about to attend to (`Captured`) to what it shall attend to instead. Where it
leaves the call as it is the model goes on bit for bit; where it changes the queries alone, as a factor on the scores
does, the model's own attention is used, so nothing of size n × n is held; else `attend` computes the formula of
`Captured` over the keys that are left, in blocks of queries.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.attention.scores import capped
from limitlens.errors import InputError, as_array
from limitlens.models.catalog import LoadedModel
from limitlens.models.exponents import read_exponents
from limitlens.models.relay import Captured, Output, hook_attention
from limitlens.models.rope_scaling import rope_scaled

Change = Callable[[Captured], Captured]
SCORES = 1 << 24  # scores that are held at once


@contextmanager
def intervene(
    model: PreTrainedModel | LoadedModel, *, keys: str | Change = "all",
    count: int | Sequence[Sequence[int]] | None = None, cut: int | None = None,
    factor: float | Sequence[Sequence[float]] | Callable[[int, Tensor], Tensor] | Any = 1.0,
    layers: Iterable[int] | None = None, heads: Iterable[int] | None = None, seed: int = 0,
) -> Iterator[None]:  # fmt: skip
    """Every forward of `model` within the block attends to chosen keys, with scores times a factor.

    A cache that holds a sliding window keeps positions right; one of fixed length does not (`StaticCache`).

    Parameters
    ----------
    keys : "all", a key policy by name, or a function from a layer's `Captured` to the one that
        it shall attend to instead (`dataclasses.replace`: other queries, keys, values, mask or bias); a probe within
        the block calls it from several threads.
    count : keys that each query keeps, or one number for each layer and key/value head.
    cut : the tokens before this position are the context whose cache is cut to `count` keys, once and for all queries
        at or behind it, which see all tokens from the cut on; queries before it see everything. Left out, every query
        chooses for itself among the keys it sees, which choices by earlier queries cannot do in a causal model.
    factor : what multiplies scale · <query, key>, before a softcap and before what the model adds to its scores: a
        number, an array (layers, heads), or a function of the layer and of the queries' positions (a tensor (queries,))
        whose tensor is broadcast to (heads, queries), or the file of exponents that `limitlens temper` wrote, whose
        stretch of the positions is applied with it. Gradients flow through it, under `torch.utils.checkpoint` too:
        then call `backward` within the block, since it runs the layers again.
    layers, heads : where to act, all when left out; the other layers and query heads attend as ever.
    seed : of random choices, which depend on it, on the layer and on the number of keys alone.

    >>> ids = model.tokenizer('abcabcabc', return_tensors='pt')['input_ids']
    >>> with ll.intervene(model, keys='recent', count=2):
    ...     changed = model.model(ids).logits
    >>> bool((changed == model.model(ids).logits).all())
    False
    """
    stack = model.model if isinstance(model, LoadedModel) else model
    config = stack.config.get_text_config()
    width = config.num_attention_heads
    acted = None if layers is None else _within("layers", layers, config.num_hidden_layers)
    picked = None if heads is None else _within("heads", heads, width)
    changes: list[Change] = []
    placed: Any = nullcontext()
    if isinstance(factor, str | Path):
        found = read_exponents(factor, stack)
        factor, placed = found.factor(), rope_scaled(stack, found.stretch, found.to / found.trained, found.trained)
    if callable(factor) or np.ndim(factor) or factor != 1:
        changes.append(_scaling(factor, config.num_hidden_layers, width))
    if callable(keys):
        changes.append(keys)
    elif keys != "all":
        from limitlens.models.choosing import Choosing

        shape = config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or width
        changes.append(Choosing(keys, count, cut, seed, shape))
    elif count is not None or cut is not None:
        raise InputError("a count or a cut was given without a choice of keys; expected one, such as keys='recent'")

    def act(call: Captured, go_on: Callable[[Tensor], Output]) -> Output:
        if acted is not None and call.layer not in acted:
            return go_on(call.query)
        changed = call
        for change in changes:
            changed = change(changed)
        same = all(getattr(changed, name) is getattr(call, name) for name in ("key", "value", "mask", "bias"))
        output = go_on(changed.query) if same else (attend(changed).transpose(1, 2).contiguous(), None)
        if picked is None or changed is call:
            return output
        untouched, weights = go_on(call.query)
        mine = untouched.new_zeros(width, 1).bool().index_fill(0, untouched.new_tensor(picked).long(), True)
        return output[0].where(mine, untouched), weights

    with placed, hook_attention(stack, act):
        yield


def attend(call: Captured) -> Tensor:
    """Outputs (B, Hq, L, v) of a layer by the formula of `Captured`, in blocks of queries."""
    from torch.nn.functional import scaled_dot_product_attention

    query, groups = call.query, call.query.shape[1] // call.key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (call.key, call.value))
    batch, heads, length, there = *query.shape[:3], key.shape[2]
    lowest, rows, outputs = torch.finfo(query.dtype).min, max(1, SCORES // (batch * heads * there)), []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen, bias = call.seen(start, stop), call.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        if seen is not None:
            bias = torch.where(seen, query.new_zeros(()) if bias is None else bias.to(query.dtype), lowest)
        asked = query[:, :, start:stop]
        if call.softcap is None and call.sinks is None:
            shape = (batch, heads, stop - start, there)
            added = None if bias is None else bias.to(query.dtype).expand(shape)
            outputs.append(scaled_dot_product_attention(asked, key, value, attn_mask=added, scale=call.scale))
            continue
        scores = capped(call.scale * (asked @ key.mT), call.softcap)
        scores = scores if bias is None else scores + bias
        if call.sinks is not None:
            learned = call.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, learned], -1)
        outputs.append(scores.softmax(-1)[..., :there] @ value)
    return torch.cat(outputs, 2)


def _scaling(factor: Any, layers: int, heads: int) -> Change:
    """The change that multiplies queries by a factor, which multiplies their scores."""
    if not callable(factor):
        shape = np.shape(factor)
        if shape not in ((), (layers, heads)):
            told = f"the factor has shape {shape}"
            raise InputError(f"{told}; expected a number or one for each of {layers} layers and {heads} heads")
        as_array("the factor", factor)  # finite numbers, or a sentence that says so
        table = torch.as_tensor(factor)

    def change(call: Captured) -> Captured:
        if callable(factor):
            if call.position is None:
                raise InputError(
                    "the texts of a batch stand at different positions; a factor of positions needs one, so run them "
                    "one at a time or without padding"
                )
            given = torch.as_tensor(factor(call.layer, call.position))
        else:
            given = table if table.ndim == 0 else table[call.layer, :, None]
        wanted = tuple(call.query.shape[1:3])
        try:
            full = given.to(call.query).expand(wanted)
        except RuntimeError:
            told = f"the factor of layer {call.layer} has shape {tuple(given.shape)}"
            raise InputError(f"{told}; expected one that is broadcast to (heads, queries), here {wanted}") from None
        return replace(call, query=call.query * full[None, :, :, None])

    return change


def _within(what: str, given: Iterable[int], stop: int) -> list[int]:
    """Indices of layers or heads, all of which there are."""
    found = sorted(set(given))
    if not found or found[0] < 0 or found[-1] >= stop:
        raise InputError(f"{what} are {found}; expected at least one of 0 to {stop - 1}")
    return found
