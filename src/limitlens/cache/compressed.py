"""Layers of a compressed KV cache, as transformers caches: entries of a prompt that a plan keeps, and new tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from limitlens.attention.policies import Selection
from limitlens.attention.ragged import RaggedRows
from limitlens.cache.plan import Plan
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel
from limitlens.models.catalog import weights_digest
from limitlens.models.intervene import kv_shape

if TYPE_CHECKING:
    from limitlens.cache.compression import Compression


class CompressedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a compressed cache: the kept entries of the prompt, and all entries of later tokens."""

    def __init__(self, rows: RaggedRows, length: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.length = length  # tokens read so far, evicted ones and padding included
        self.window = window  # of a sliding window that is longer than the prompt
        self.is_sliding = window is not None
        self.is_initialized = True
        self.is_croppable = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; returns them alone, since `attend` reads the stored entries."""
        self.rows.append(key_states, value_states, self.length)
        self.length += key_states.shape[2]
        return key_states, value_states

    def attend(self, call: Captured) -> Tensor:
        """Attention outputs (B, L, Hq, v) of new tokens over the kept entries and all later tokens."""
        seen = call.mask
        if seen is not None:
            seen = seen[:, 0, :, -self.rows.new :].expand(call.query.shape[0], -1, -1)
        output = self.rows.attend(
            call.query, scale=call.scale, softcap=call.softcap, sinks=call.sinks, seen=seen, window=self.window
        )
        return output.transpose(1, 2).contiguous()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer is made of a prompt's keys and values."""

    def get_seq_length(self) -> int:
        """Number of tokens read so far, which gives the position of the next token; evicted tokens count."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of attention masks, which cover all tokens read so far."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Largest number of tokens: −1 for no limit, or the length of the sliding window."""
        return self.window or -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences of the batch into another order, for beam search."""
        self.rows.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        self.rows.select(torch.arange(self.rows.batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        self.rows.select([b for b in range(self.rows.batch) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; those of the prompt cannot be removed, because most are gone."""
        removed = abs(tokens_to_remove)
        if removed > self.rows.new:
            given = f"{removed} tokens are to be removed from a compressed cache, of which {self.rows.new} are new"
            raise InputError(f"{given}; expected at most as many, because the prompt is compressed already")
        self.rows.crop(removed)
        self.length -= removed

    def reset(self) -> None:
        """Raise an `InputError`: a compressed prompt cannot become an empty cache of the same shape."""
        raise InputError("a compressed cache cannot be reset; expected a new one for each prompt")

    offload = prefetch = lambda self: None  # its entries stay on the device


@dataclass(eq=False)
class Eviction:
    """Sizes of the cache of one prompt, or batch of prompts, and the time that eviction took."""

    prompt: tuple[int, ...] = ()  # tokens of each sequence
    full_bytes: int = 0  # bytes of keys and values before eviction
    kept_bytes: int = 0  # bytes after it
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # begin and end of each part: seconds, or CUDA events

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time of the block; on a GPU that of the device, which does not wait for it."""
        begin = _mark(device)
        yield
        self.marks.append((begin, _mark(device)))

    @property
    def seconds(self) -> float:
        """Time that selection and packing took; on a GPU this waits for the device."""
        total = 0.0
        for begin, end in self.marks:
            if isinstance(end, float):
                total += end - begin
            else:
                end.synchronize()
                total += 1e-3 * begin.elapsed_time(end)
        return total


def _mark(device: torch.device) -> Any:
    """Present time in seconds or, on a GPU, an event in its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class CompressedCache(DynamicCache):
    """Key/value cache of transformers whose layers are compressed by a plan when they have read the prompt.

    `limitlens.apply` makes one for each prompt; it works only inside that block, which attends to its entries.
    """

    def __init__(self, block: Compression) -> None:
        super().__init__(config=block.model.config)
        self.block = block
        self.evicted = block.evicted = Eviction()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens in a layer, and announce them to the attention that follows."""
        if not self.block.open:
            given = "this compressed cache was made in an `ll.apply` block that has ended"
            raise InputError(f"{given}; expected it to be used inside the block")
        self.block.running[get_ident()] = self
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def join(self, others: Sequence[CompressedCache]) -> None:
        """Append the sequences of other caches, of prompts of the same padded length, and empty the other caches."""
        own = self.block.evicted = self.evicted
        for other in others:
            own.prompt += other.evicted.prompt
            own.full_bytes += other.evicted.full_bytes
            own.kept_bytes += other.evicted.kept_bytes
            own.marks += other.evicted.marks
        layer: Any
        for index, layer in enumerate(self.layers):
            parts: list[Any] = [layer, *(other.layers[index] for other in others)]
            if len(set(map(type, parts))) > 1:
                raise InputError(f"layer {index} could not be compressed for all sequences; expected a smaller batch")
            if isinstance(layer, CompressedLayer):
                layer.rows = RaggedRows.joined([part.rows for part in parts])
            elif layer.is_initialized:
                layer.keys, layer.values = (torch.cat([getattr(part, name) for part in parts])
                                            for name in ("keys", "values"))  # fmt: skip
            for other in others:
                other.layers[index] = DynamicLayer()  # type: ignore[no-untyped-call]  # frees memory


def layer_bytes(layer: Any) -> int:
    """Bytes that a layer of any cache holds: keys and values, and log-weights of sampling policies."""
    if isinstance(layer, CompressedLayer):
        return layer.rows.bytes
    parts = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def check_plan(plan: Plan, model: PreTrainedModel | LoadedModel, force: bool = False) -> None:
    """Raise an `InputError` if a plan was made for another model, by shapes and, unless `force`, digests of weights."""
    stack = model.model if isinstance(model, LoadedModel) else model
    name = model.name if isinstance(model, LoadedModel) else type(model).__name__
    if not force and plan.model_sha256 is not None:
        known = plan.model_sha256  # of a model of transformers whose files are not here, nothing can be compared
        found = model.sha256 if isinstance(model, LoadedModel) else weights_digest(stack.name_or_path or "") or known
        if found != known:
            given = f"the weights of {name} differ from those of the plan (by their digest)"
            raise InputError(f"{given}; plan again, or use force=True for a fine-tuned version of the plan's model")
    shape, planned = kv_shape(stack), (len(plan.budgets), max(map(len, plan.budgets)))
    if planned != shape:
        given = f"the plan has {planned} layers and key/value heads, {name} has {shape}"
        raise InputError(f"{given}; expected the model of the plan")


def budgets_for(plan: Plan, length: int) -> list[list[int]]:
    """Entries that each head keeps of a prompt, [layer][kv_head]: its budget, or its share of a longer prompt.

    A head keeps the whole of a prompt that is no longer than its budget.
    """
    longer = max(length, plan.context)
    return [[min(length, (budget * longer + plan.context // 2) // plan.context) for budget in row]
            for row in plan.budgets]  # fmt: skip


def pack(call: Captured, tokens: list[Tensor], selections: list[Selection], sizes: list[list[int]]) -> RaggedRows:
    """Copy the selected keys and values of a layer into one buffer, heads one after the other.

    `tokens` are the indices (n,) of the tokens of each sequence, and `selections` masks (1, H, 1, n) among them, of
    which head h of sequence b keeps `sizes[b][h]`. Nothing here waits for a GPU.
    """
    batch, heads = len(tokens), call.key.shape[1]
    places = [_places(kept.mask[0, :, 0], sum(size)) for kept, size in zip(selections, sizes, strict=True)]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        """Kept entries of parts (H, n, ...) of each sequence, put in the order of heads, then sequences."""
        found = [part.flatten(0, 1).index_select(0, place) for part, place in zip(parts, places, strict=True)]
        if batch == 1:
            return found[0]
        pieces = [torch.split(part, size) for part, size in zip(found, sizes, strict=True)]
        return torch.cat([pieces[b][head] for head in range(heads) for b in range(batch)])

    def entries(part: Tensor) -> Tensor:
        rows = [part[b] if len(own) == part.shape[2] else part[b][:, own] for b, own in enumerate(tokens)]
        return joined(rows).detach()

    weight = position = None
    weights = [kept.log_weights[0, :, 0] for kept in selections if kept.log_weights is not None]
    if weights:  # of all sequences, since they have the same policies
        each = [part.expand(heads, len(own)).float() for part, own in zip(weights, tokens, strict=True)]
        weight = joined(each)
        weight = weight if bool(weight.any()) else None
    if call.sliding_window is not None:
        position = joined([own.int().expand(heads, len(own)) for own in tokens])
    kept = tuple(sizes[b][head] for head in range(heads) for b in range(batch))
    return RaggedRows(entries(call.key), entries(call.value), kept, batch, weight, position)


def _places(mask: Tensor, count: int) -> Tensor:
    """Indices (count,) of the `count` true entries of a mask, without waiting for a GPU to count them."""
    flat = mask.flatten()
    to = torch.where(flat, flat.cumsum(0) - 1, count)
    return to.new_zeros(count + 1).scatter_(0, to, torch.arange(len(flat), device=to.device))[:count]
