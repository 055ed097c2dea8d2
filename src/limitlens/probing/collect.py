"""One layer while the corpus streams by: cell states, kept tokens, moments.

Everything a layer needs later is gathered from each block as it passes; nothing grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from limitlens.attention.kernels import split, state_of
from limitlens.attention.state import Peak, State
from limitlens.models import Captured
from limitlens.probing.moments import Moments
from limitlens.probing.on_device import DeviceCells
from limitlens.probing.peaks import peak_over
from limitlens.probing.pilot import Layer
from limitlens.sampling.assignment import Assignment, BlockAssignment, ForwardSlice

Work: TypeAlias = dict[str, Callable[[], None]]  # by name: each piece is done whole or not at all


class Collector:
    """What one layer has seen of the pool."""

    def __init__(self, layer: Layer, deck: Assignment) -> None:
        self.layer, self.deck, self.lock = layer, deck, Lock()
        self.query = layer.flat_query
        self.detail_query = layer.query[:, :, layer.detail].flatten(1, 2)
        # of "query", "key" and, where there are any, "hidden"
        self.moments = {name: Moments(mean) for name, mean in layer.traits.rough_mean.items()}
        # of the streamed cells, (Hkv, G · m) each; the last ones of the tokens of no cell
        self.states: list[State] = []
        self.special = State.empty((), 0, 0)  # of the pooled special tokens, which their cells hold too
        # the kept tokens, (slots, Hkv, k) and (slots, Hkv, v), in the model's own precision until the stream has ended
        self.key = self.value = torch.empty(0)
        self.waiting: tuple[Tensor, ...] = ()  # keys and values that wait for the rest of their block
        self.stores: tuple[Tensor, ...] = ()  # what holds both, the kept tokens first
        self.hidden: Tensor | None = None  # (kept, d): hidden states of the first kept tokens
        self.peaks: list[Peak] = []  # of the same cells, (Hkv, G · q): for each of q detail queries
        self.on_device: DeviceCells | None = None  # what holds both on a GPU

    def work(
        self, captured: Captured, part: ForwardSlice, positions: slice, special: Tensor, marks: int, turn: int | None
    ) -> Work:
        """What to do with what the layer captured in one forward.

        `part` says where the pooled tokens go, which are those at `positions` of the forward's windows laid end to end;
        `special` (s,) are those of them that are special tokens, before which so many `marks` wait. Forwards side by
        side have turns.
        """
        key, value = (tokens_of(tensor[:, :, positions]) for tensor in (captured.key, captured.value))
        hidden = None if captured.hidden is None else captured.hidden[:, positions].flatten(0, 1)
        with self.lock:
            if not self.states:
                self.prepare(key, value, hidden)
        work: Work
        begin, device = self.deck.wait + marks, self.on_device
        if device is not None:
            begin += self.deck.slots
            work = {"put": lambda: device.put(self.stores, (key, value), part.rows, special, begin)}
        else:
            work = {
                "put keys": lambda: _copy_rows(self.stores[0], part.rows, key),
                "put values": lambda: _copy_rows(self.stores[1], part.rows, value),
                "special": lambda: self._mark(key, value, special, begin),
            }
        if part.counted:
            query = tokens_of(captured.query[:, :, positions])
            work["keys"] = lambda: self.moments["key"].add(key, turn)
            work["queries"] = lambda: self.moments["query"].add(query, turn)
        if hidden is not None:
            work["hidden"] = lambda: self._add_hidden(hidden, part, turn)
        return work

    def cells(self, hand: BlockAssignment, spans: Tensor, marks: int) -> list[Callable[[], None]]:
        """What to do once a hand is complete: attend to what has waited, and to so many marks."""
        device, marked = self.on_device, (self.deck.wait, self.deck.wait + marks)
        if device is not None:
            return [lambda: device.take(hand, spans, marked, *self.waiting)]
        return [partial(self._attend_marked, slice(*marked)), *(partial(self._stream, *cell) for cell in hand.streamed)]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that was gathered, between two blocks, as it lies in memory."""
        found = {"key": self.key, "value": self.value}
        if self.hidden is not None:
            found["hidden"] = self.hidden
        held: dict[str, State | Peak | Moments] = {f"state{k}": state for k, state in enumerate(self.states)}
        held |= {"special": self.special, **{f"peak{k}": peak for k, peak in enumerate(self.peaks)}, **self.moments}
        return found | {f"{name}.{part}": t for name, one in held.items() for part, t in one.tensors().items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go back to where the `tensors` were taken; there are none before the first block."""
        if saved:
            key, value = (saved[name].to(self.query.device) for name in ("key", "value"))
            self.prepare(key, value, saved.get("hidden"))
            for name, tensor in self.tensors().items():
                tensor.copy_(saved[name])

    def settle(self, copy: bool) -> None:
        """Once the stream has ended: nothing waits any more, and with a copy of what is kept its room is given back."""
        self.key, self.value = (tokens.to(torch.float32, copy=copy) for tokens in (self.key, self.value))
        self.stores = self.waiting = ()

    def _stream(self, number: int, start: int, stop: int) -> None:
        """Attend to what has waited for one cell."""
        key, value = (tokens[start:stop].float() for tokens in self.waiting)
        state = self.states[number].merge(self._attend(key, value))
        tokens = (key.transpose(0, 1), value.transpose(0, 1))
        peak = peak_over(self.detail_query, *tokens, self.layer.traits.softcap)
        self.states[number], self.peaks[number] = state, self.peaks[number].merge(peak)

    def _add_hidden(self, hidden: Tensor, part: ForwardSlice, turn: int | None) -> None:
        if self.hidden is not None:
            self.hidden.index_copy_(0, part.first_slots, hidden[part.first].float())
        if part.counted:
            self.moments["hidden"].add(hidden[part.some, None].float(), turn)

    def _mark(self, key: Tensor, value: Tensor, special: Tensor, begin: int) -> None:
        for store, tokens in zip(self.waiting, (key, value), strict=True):
            store[begin : begin + len(special)] = tokens.index_select(0, special)

    def _attend_marked(self, marked: slice) -> None:
        self.special = self.special.merge(self._attend(*(store[marked] for store in self.waiting)))

    def _attend(self, key: Tensor, value: Tensor) -> State:
        """Attention over tokens (n, Hkv, ·)."""
        tokens = (part.float().transpose(0, 1) for part in (key, value))
        return state_of(self.query, *tokens, kernel=self.layer.kernel)

    def prepare(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        """Make room for tokens such as these."""
        deck, device, kernel = self.deck, key.device, self.layer.kernel
        shared, m, v = self.query.shape[0], self.query.shape[1], value.shape[-1]
        self.special = State.empty((shared,), m, v, device=device)
        self.stores = tuple(
            tokens.new_zeros(deck.slots + deck.wait + deck.marks, *tokens.shape[1:]) for tokens in (key, value)
        )
        self.key, self.value = (store[: deck.slots] for store in self.stores)
        self.waiting = tuple(store[deck.slots :] for store in self.stores)
        if device.type != "cpu" and kernel in ("fast", "accurate") and split.unable(self.query, value) is None:
            rows = torch.arange(m, device=device).view(-1, self.layer.query.shape[2])[:, self.layer.detail].flatten()
            self.on_device = DeviceCells(self.query, rows, deck.states + 1, value, kernel)
            self.states = [self.on_device.states[cell] for cell in range(deck.states)]
            self.peaks = [self.on_device.peaks[cell] for cell in range(deck.states)]
            self.special = self.on_device.states[deck.states]
        else:
            q = self.detail_query.shape[1]
            self.states = [State.empty((shared,), m, v, device=device) for _ in range(deck.states)]
            self.peaks = [Peak.empty((shared,), q, v, like=self.query) for _ in range(deck.states)]
        if hidden is not None:
            self.hidden = self.query.new_zeros(deck.first, hidden.shape[-1])


def tokens_of(tensor: Tensor) -> Tensor:
    """(B, H, L, k) as one row a token, (B · L, H, k)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _copy_rows(store: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Rows (n, H, k) to places (n,) of a store, in pieces of 8 bytes where they can be: fewer are copied faster."""
    both = [rows.flatten(1) for rows in (store, tokens)]
    ends = (rows.element_size() * size for rows in both for size in (rows.shape[1], rows.storage_offset()))
    if all(rows.is_contiguous() for rows in both) and not any(end % 8 for end in ends):
        both = [rows.view(torch.int64) for rows in both]
    both[0].index_copy_(0, places, both[1])
