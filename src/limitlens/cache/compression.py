"""Compressed KV cache (`limitlens.apply`): a model that really keeps only the entries of a cache plan.

The first forward pass with a new cache reads the prompt. As soon as a layer has attended, its cache keeps the entries
that the plan's policies select, and the rest is freed before the next layer. The largest memory is therefore one full
layer beside the kept entries of the others. Tokens of later forward passes are kept in full.

A policy that needs a second pass (`reconstruction`) lets the model repeat the prompt before anything is evicted, so the
largest memory is then that of the full cache and of the copy that the repeated tokens extend.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils.generic import ModelOutput

from limitlens.attention.policies import Selection, get_policy
from limitlens.attention.policies.expected import LAW
from limitlens.cache.compressed import (
    CompressedCache,
    CompressedLayer,
    Eviction,
    budgets_for,
    check_plan,
    layer_bytes,
    pack,
)
from limitlens.cache.plan import Plan
from limitlens.cache.reconstruction import read_twice, repeat_attention
from limitlens.errors import InputError, check_number
from limitlens.models import Captured, LoadedModel
from limitlens.models.intervene import PolicyHook, kv_shape
from limitlens.models.relay import Output, hook_attention
from limitlens.record import read_run

FULL = "there is not enough memory to compress every layer of the cache; the others stay full"
Repeats = Sequence[Sequence[Tensor]] | None  # of each sequence: `repeat_attention` by layer
EAGER = "the model is compiled; with a compressed cache it runs without torch.compile, with the same results"


@dataclass(eq=False)
class Compression:
    """What `limitlens.apply` gives: the plan in use, and the size of the cache of the last prompt."""

    plan: Plan
    model: PreTrainedModel
    open: bool = True
    evicted: Eviction = field(default_factory=Eviction)  # of the last prompt
    running: dict[int, CompressedCache] = field(default_factory=dict)  # by thread: the cache of the next attention
    hooks: dict[int, PolicyHook] = field(default_factory=dict)  # by prompt length
    repeating: LoadedModel | None = None  # the model, if a policy of the plan needs a second pass over the prompt
    ids: Tensor | None = None  # (B, n): token ids of the last prompt
    waiting: list[tuple[CompressedCache, Captured]] = field(default_factory=list)  # layers that the second pass cuts
    reading: bool = False  # whether the second pass is under way, which leaves caches alone
    prefill_batch: int | None = None  # sequences of a batch that are read at a time
    read: list[Any] = field(default_factory=list)  # outputs for the groups of a batch that were read

    def __deepcopy__(self, memo: Any) -> Self:  # a copy of a cache belongs to the same block
        return self

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of each sequence of the last prompt."""
        return self.evicted.prompt

    @property
    def full_bytes(self) -> int:
        """Bytes of the last prompt's keys and values before eviction."""
        return self.evicted.full_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the last prompt's keys and values after eviction."""
        return self.evicted.kept_bytes

    @property
    def seconds(self) -> float:
        """Time that eviction took for the last prompt."""
        return self.evicted.seconds

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before a forward pass of the model: put a compressed cache in the place of an empty one."""
        if args:
            kwargs |= dict(zip(inspect.signature(self.model.forward).parameters, args, strict=False))
        given, wanted = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if self.reading:
            return (), kwargs
        if isinstance(given, CompressedCache):
            if given.block is not self:
                raise InputError("the compressed cache was made in another `ll.apply` block; expected a new cache")
            return (), kwargs
        if given is not None and (type(given) is not DynamicCache or given.offloading):
            kind = type(given).__name__
            raise InputError(f"the cache is a {kind}; expected none, or transformers' DynamicCache without offloading")
        if given is not None and (held := given.get_seq_length()):
            expected = "expected a new one: the prompt must be read inside the `ll.apply` block"
            raise InputError(f"the cache holds {held:,} tokens already; {expected}")
        if given is not None or (self.model.config.get_text_config().use_cache if wanted is None else wanted):
            kwargs = self._read_groups(kwargs)
            kwargs["past_key_values"] = CompressedCache(self)
            self.ids, self.waiting = kwargs.get("input_ids"), []
        return (), kwargs

    def _read_groups(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Read all but the last group of a batch that is larger than `prefill_batch`; returns arguments of the last."""
        ids = kwargs.get("input_ids")
        batch = len(kwargs["inputs_embeds"] if ids is None else ids)
        size = self.prefill_batch or batch
        if batch <= size:
            return kwargs

        def part(first: int) -> dict[str, Any]:
            rows, given = slice(first, first + size), kwargs | {"past_key_values": None}
            return {name: value[rows] if isinstance(value, Tensor) and value.ndim > 1 and len(value) == batch else value
                    for name, value in given.items()}  # fmt: skip

        *starts, last = range(0, batch, size)
        self.read = [self.model(**part(first) | {"use_cache": True}) for first in starts]
        return part(last)

    def end(self, _: Any, __: Any, output: Any) -> Any:
        """Hook after a forward pass of the model: make the second pass that policies need, and join groups of a batch.

        Only after a prompt was read.
        """
        waiting, self.waiting = self.waiting, []
        if waiting and self.repeating is not None:
            self._read_again(waiting, self.repeating)
        read, self.read = self.read, []
        return _joined([*read, output]) if read else None

    def _read_again(self, waiting: list[tuple[CompressedCache, Captured]], loaded: LoadedModel) -> None:
        """Make the second pass over the prompt, and evict what the plan evicts of all layers."""
        if self.ids is None:
            raise InputError("the prompt was given as embeddings; expected input_ids, which a second pass repeats")
        (cache, first), *_others = waiting
        own = _own_tokens(first)
        alone = len(own) == 1 and len(own[0]) == first.key.shape[2]
        self.reading = True
        try:
            with cache.evicted.timed(first.key.device):
                repeats = [repeat_attention(loaded, cache, self.ids)] if alone else [
                    read_twice(loaded, self.ids[b : b + 1, tokens]) for b, tokens in enumerate(own)
                ]  # fmt: skip
        finally:
            self.reading = False
        for cache, call in waiting:
            self._compress(cache, call, repeats)

    def handle(self, call: Captured, proceed: Callable[[Tensor], Output]) -> Output:
        """Attention of one layer: over kept entries, or in the first forward pass over the prompt, then evict."""
        cache = self.running.pop(get_ident(), None)
        if cache is None:  # a forward pass without a cache
            if self.plan.layer_kinds[call.layer] == "none":
                given = f"layer {call.layer} has no cache of its own and attends to that of another layer"
                raise InputError(f"{given}; expected a model in which every attention layer has one")
            return proceed(call.query)
        layer = cache.layers[call.layer]
        if isinstance(layer, CompressedLayer):
            return layer.attend(call), None
        output = proceed(call.query)
        if self.reading or call.query.shape[2] < call.key.shape[2]:
            return output
        if self.repeating is None:
            self._compress(cache, call)
        else:
            self.waiting.append((cache, replace(call, query=call.query[:, :, -LAW:])))  # policies use no earlier ones
        return output

    def _compress(self, cache: CompressedCache, call: Captured, repeats: Repeats = None) -> None:
        """Evict what the plan evicts of a layer that has read the prompt, and count bytes and seconds."""
        cache.evicted.full_bytes += layer_bytes(cache.layers[call.layer])
        if self.plan.layer_kinds[call.layer] == "full" and not call.slides(call.key.shape[2]):
            with cache.evicted.timed(call.key.device):
                self._evict(cache, call, repeats)
        cache.evicted.kept_bytes += layer_bytes(cache.layers[call.layer])

    def _evict(self, cache: CompressedCache, call: Captured, repeats: Repeats) -> None:
        """Replace the full cache of a layer by the kept entries; if memory does not suffice, it stays full."""
        if call.bias is not None:
            given = f"layer {call.layer} adds a bias to its scores by relative position"
            raise InputError(f"{given}, which a compressed cache does not store; expected a model without")
        try:
            rows = pack(call, *self._select(cache, call, repeats))
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            warnings.warn(FULL, stacklevel=2)
            return
        cache.layers[call.layer] = CompressedLayer(rows, call.key.shape[2], call.sliding_window)

    def _select(
        self, cache: CompressedCache, call: Captured, repeats: Repeats
    ) -> tuple[list[Tensor], list[Selection], list[list[int]]]:
        """For each sequence: its tokens (n,) without padding, the keys (H, n) that heads keep, and their numbers."""
        total = call.key.shape[2]
        tokens, selections, sizes = _own_tokens(call), [], []
        for b, own in enumerate(tokens):
            key, value, query = (part[b : b + 1] for part in (call.key, call.value, call.query))
            if len(own) < total:
                key, value = key[:, :, own], value[:, :, own]
                query = query[:, :, own[own >= total - query.shape[2]] - (total - query.shape[2])]
            query = query[:, :, -LAW:]  # policies use no earlier ones
            # As if the sequence were alone, so that its entries do not depend on the batch.
            position = torch.arange(len(own) - query.shape[2], len(own))  # on the CPU: nothing waits for the device
            hook = self._hook(len(own))
            hook.repeat = None if repeats is None else repeats[b]
            hook(replace(call, mask=None, causal=True, position=position, query=query, key=key, value=value))
            selections.append(hook.selected.pop(call.layer))
            sizes.append(hook.counts[call.layer].tolist())
        cache.evicted.prompt = tuple(map(len, tokens))
        return tokens, selections, sizes

    def _hook(self, length: int) -> PolicyHook:
        """Function that selects the keys of a prompt of `length` tokens by the plan's policies."""
        if length not in self.hooks:
            layers, heads = kv_shape(self.model)
            counts = [row or [0] * heads for row in budgets_for(self.plan, length)]
            policies = [row or ("recent",) * heads for row in self.plan.policies]
            self.hooks[length] = PolicyHook(policies, counts, length, self.plan.seed, (layers, heads))
        return self.hooks[length]


@contextmanager
def apply(
    model: PreTrainedModel | LoadedModel, plan: Plan | str | Path, *, force: bool = False, tokenizer: Any = None,
    prefill_batch: int | None = None,
) -> Iterator[Compression]:  # fmt: skip
    """Make a decoder keep only the KV-cache entries of a plan, within the `with` block; memory really falls.

    The prompt must be read in one forward pass, so `prefill_chunk_size` is refused. Compiled models run without
    compilation.

    Parameters
    ----------
    model : a decoder of transformers, or one that limitlens loaded. `model.generate` and direct calls both work, with
        batches of prompts of different lengths and with beams.
    plan : a plan, or its folder. Heads keep their budgets of entries, or their shares of a prompt that is longer than
        the plan's context. Layers with a sliding window shorter than the prompt are left as they are.
    force : also apply the plan of a model with other weights and the same shapes, such as before fine-tuning
    tokenizer : of a model of transformers, for plans with the policy `reconstruction`, whose second pass asks the model
        to repeat the prompt; it needs the memory of two full caches
    prefill_batch : number of sequences of a batch whose prompts are read at a time, so that memory for reading is
        bounded; all by default. The compressed caches are then joined, layer by layer.

    >>> made = ll.plan(model, text, total=0.5, context=64, windows=(2, 2), policy='snapkv')
    >>> ids = model.tokenizer('abcdefgh' * 8, return_tensors='pt')['input_ids']
    >>> with ll.apply(model, made) as applied:
    ...     answer = model.model.generate(ids, max_new_tokens=4)
    >>> applied.kept_bytes == made.total.bytes
    True
    """
    made: Plan = read_run(plan).result(Plan) if isinstance(plan, str | Path) else plan
    own = model.model if isinstance(model, LoadedModel) else model
    stack: Any = getattr(own, "_orig_mod", own)  # of torch.compile
    check_plan(made, model if isinstance(model, LoadedModel) else stack, force)
    if prefill_batch is not None:
        check_number("prefill_batch", prefill_batch, "at least 1", low=1)
    block = Compression(made, stack, prefill_batch=prefill_batch)
    again = [name for row in made.policies for name in row if get_policy(name).needs_repeat]
    if again:
        given = f"the key policy {again[0]!r} asks the model to repeat the prompt"
        if not isinstance(model, LoadedModel) and tokenizer is None:
            raise InputError(f"{given}, which needs its tokenizer; expected ll.apply(model, plan, tokenizer=...)")
        block.repeating = model if isinstance(model, LoadedModel) else LoadedModel("", stack, tokenizer)
    with ExitStack() as undo:
        marks = (own, "_orig_mod"), (stack, "_compiled_call_impl"), (stack.forward, "_torchdynamo_orig_callable")
        if any(getattr(part, name, None) is not None for part, name in marks):
            warnings.warn(EAGER, stacklevel=3)
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(hook_attention(stack, block.handle))
        undo.callback(stack.register_forward_pre_hook(block.begin, with_kwargs=True, prepend=True).remove)
        undo.callback(stack.register_forward_hook(block.end).remove)
        undo.callback(setattr, block, "open", False)
        if hasattr(stack, "generate"):
            stack.generate = partial(_generate, stack, stack.generate)
            undo.callback(delattr, stack, "generate")
        yield block


def _joined(parts: Sequence[Any]) -> Any:
    """Join outputs of a model for groups of a batch: tensors along the batch, tuples, and compressed caches."""
    first, last = parts[0], parts[-1]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.ndim else last
    if isinstance(first, CompressedCache):
        first.join(parts[1:])
        return first
    if isinstance(first, ModelOutput):
        for name in first:
            first[name] = _joined([part[name] for part in parts])
        return first
    return tuple(_joined(column) for column in zip(*parts, strict=True)) if isinstance(first, tuple) else last


def _own_tokens(call: Captured) -> list[Tensor]:
    """Indices (n,) of the tokens of each sequence of a batch, padding left out."""
    if call.mask is None:
        return [torch.arange(call.key.shape[2], device=call.key.device)] * call.key.shape[0]
    return [call.mask[b % len(call.mask), 0, -1].nonzero()[:, 0] for b in range(call.key.shape[0])]


def _generate(model: Any, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `generate` of a model, unless it would read the prompt in chunks: only the first would be compressed."""
    config = kwargs.get("generation_config") or model.generation_config
    if kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None)) is not None:
        raise InputError("prefill_chunk_size was given; leave it out, so that one forward pass reads the prompt")
    return generate(*args, **kwargs)
