"""One layer while the corpus streams by: cell states, kept tokens, moments.

Everything a layer needs later is gathered from each block as it passes; nothing grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.state import Peak, State
from limitlens.models import Captured
from limitlens.probing.moments import Moments
from limitlens.probing.peaks import peak_over
from limitlens.probing.pilot import Layer
from limitlens.sampling.placement import Deck, Part
from limitlens.sampling.workers import Workers

HIDDEN_EVERY = 4  # hidden states enter their covariance one in so many: each costs d² products
HIDDEN_KEPT = 4096  # hidden states kept to judge their tails


class Collector:
    """What one layer has seen of the pool."""

    def __init__(self, layer: Layer, deck: Deck, workers: Workers) -> None:
        self.layer, self.deck, self.workers = layer, deck, workers
        self.query = layer.flat_query
        self.detail_query = layer.query[:, :, layer.detail].flatten(1, 2)
        # of "query", "key" and, where there are any, "hidden"
        self.moments = {name: Moments(mean) for name, mean in layer.traits.rough_mean.items()}
        # of the streamed cells, (Hkv, G · m) each; the last ones of the tokens of no cell
        self.states: list[State] = []
        self.special = State.empty((), 0, 0)  # of the pooled special tokens, which their cells hold too
        self.key = self.value = torch.empty(0)  # the kept tokens, (slots, Hkv, k) and (slots, Hkv, v)
        self.waiting: tuple[Tensor, ...] = ()  # keys and values that wait for the rest of their block
        self.hidden: Tensor | None = None  # (kept, d): hidden states of the first kept tokens
        self.peaks: list[Peak] = []  # of the same cells, (Hkv, G · q): for each of q detail queries

    def add(self, captured: Captured, part: Part, positions: slice, special: Tensor) -> None:
        """Take in what the layer captured in one forward.

        `part` says where the pooled tokens go, which are those at `positions` of the forward's windows laid end to end;
        `special` (s,) are those of them that are special tokens.
        """
        seen = (captured.query, captured.key, captured.value)
        query, key, value = (tokens_of(tensor[:, :, positions]) for tensor in seen)
        hidden = None if captured.hidden is None else captured.hidden[:, positions].flatten(0, 1)
        if not self.states:
            self._prepare(key, value, hidden)
        work: list[Callable[[], None]] = [
            lambda: self._put(0, key, part),
            lambda: self._put(1, value, part),
            lambda: self.moments["key"].add(key),
            lambda: self.moments["query"].add(query),
            lambda: self._add_special(key[special], value[special]),
        ]
        if hidden is not None:
            work.append(lambda: self._add_hidden(hidden, part))
        list(self.workers(lambda piece: piece(), work))
        if part.complete is not None:
            list(self.workers(self._stream, part.complete.streamed))

    def kept(self, slots: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values (n, ·) of one key/value head in these slots (n,)."""
        return self.key[:, head].index_select(0, slots), self.value[:, head].index_select(0, slots)

    def _put(self, which: int, tokens: Tensor, part: Part) -> None:
        """Keep the tokens that are kept, and let the others wait for the rest of their block."""
        kept, waiting = (self.key, self.value)[which], self.waiting[which]
        for store, chosen, places in ((kept, part.kept, part.slots), (waiting, part.streamed, part.places)):
            found = tokens.index_select(0, torch.as_tensor(chosen, device=tokens.device))
            store.index_copy_(0, torch.as_tensor(places, device=tokens.device), found)

    def _stream(self, cell: tuple[int, int, int]) -> None:
        """Attend to what has waited for one cell."""
        number, start, stop = cell
        key, value = (tokens[start:stop] for tokens in self.waiting)
        self.states[number] = self.states[number].merge(self._attend(key, value))
        tokens = (key.transpose(0, 1), value.transpose(0, 1))
        peak = peak_over(self.detail_query, *tokens, self.layer.traits.softcap)
        self.peaks[number] = self.peaks[number].merge(peak)

    def _add_hidden(self, hidden: Tensor, part: Part) -> None:
        # Their places are random: what these single out is a random part of the tokens.
        some = [part.kept[part.slots % HIDDEN_EVERY == 0], part.streamed[part.places % HIDDEN_EVERY == 0]]
        self.moments["hidden"].add(hidden[torch.as_tensor(np.concatenate(some), device=hidden.device), None].float())
        if self.hidden is not None:
            first = part.slots < len(self.hidden)
            slots, chosen = (torch.as_tensor(index[first], device=hidden.device) for index in (part.slots, part.kept))
            self.hidden[slots] = hidden[chosen].float()

    def _add_special(self, key: Tensor, value: Tensor) -> None:
        self.special = self.special.merge(self._attend(key, value))

    def _attend(self, key: Tensor, value: Tensor) -> State:
        """Attention over tokens (n, Hkv, ·)."""
        return state_of(self.query, key.transpose(0, 1), value.transpose(0, 1), kernel=self.layer.kernel)

    def _prepare(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        deck, device = self.deck, key.device
        shared, m, v = self.query.shape[0], self.query.shape[1], value.shape[-1]
        self.states = [State.empty((shared,), m, v, device=device) for _ in range(deck.states)]
        self.special = State.empty((shared,), m, v, device=device)
        self.key = key.new_zeros(deck.slots, *key.shape[1:])
        self.value = value.new_zeros(deck.slots, *value.shape[1:])
        self.waiting = tuple(tokens.new_zeros(max(deck.blocks), *tokens.shape[1:]) for tokens in (key, value))
        q = self.detail_query.shape[1]
        self.peaks = [Peak.empty((shared,), q, v, like=value) for _ in range(deck.states)]
        if hidden is not None:
            self.hidden = key.new_zeros(min(HIDDEN_KEPT, deck.cells.sizes[-1]), hidden.shape[-1])


def tokens_of(tensor: Tensor) -> Tensor:
    """(B, H, L, k) as one row a token, (B · L, H, k), float32."""
    return tensor.transpose(1, 2).flatten(0, 1).float()
