"""One layer while the corpus streams by: cell states, kept tokens, moments.

Everything a layer needs later is gathered from each block as it passes; nothing grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.state import State
from limitlens.diagnose.deck import Deck, Hand
from limitlens.diagnose.moments import Moments
from limitlens.diagnose.pilot import Layer, scores_of
from limitlens.diagnose.workers import Workers
from limitlens.models import Captured

DETAIL_QUERIES = 64  # queries of a head behind the diagnostics that need every score
HIDDEN_EVERY = 4  # hidden states enter their covariance one in so many, at random: each costs d² products
HIDDEN_KEPT = 4096  # hidden states kept to judge their tails
SCORES_AT_ONCE = 1 << 20  # scores formed at a time, few enough to stay in cache


@dataclass(frozen=True, eq=False)
class Block:
    """The pooled tokens of one forward, as places in its windows laid end to end.

    Attributes
    ----------
    hand : Hand
        Where they go.
    rows : (block,)
        The tokens in the order of the hand.
    special : (s,)
        Those of them that are special tokens.
    positions : slice
        The positions of a window that are pooled.
    """

    hand: Hand
    rows: Tensor
    special: Tensor
    positions: slice


class Collector:
    """What one layer has seen of the pool.

    Attributes
    ----------
    states : list of State
        Of the streamed cells, (Hkv, G · m) each; the last ones are of the tokens of no cell.
    special : State
        Of the pooled special tokens, which their cells hold too.
    key, value : (slots, Hkv, k), (slots, Hkv, v)
        The kept tokens.
    hidden : (kept, d) or None
        Hidden states of the first kept tokens.
    moments : dict of Moments
        Of "query", "key" and, where there are any, "hidden".
    top_score, top_value : (Hkv, G · q), (Hkv, G · q, v)
        The largest score of each of q detail queries over all of the pool, and its value.
    """

    def __init__(self, layer: Layer, deck: Deck, workers: Workers) -> None:
        self.layer, self.deck, self.workers = layer, deck, workers
        self.query = layer.flat_query
        self.detail_query = layer.query[:, :, :DETAIL_QUERIES].flatten(1, 2)
        self.moments = {name: Moments(mean) for name, mean in layer.traits.rough_mean.items()}
        self.states: list[State] = []
        self.special = State.empty((), 0, 0)
        self.key = self.value = self.top_value = torch.empty(0)
        self.hidden: Tensor | None = None
        self.top_score = torch.empty(0)

    def add(self, captured: Captured, block: Block) -> None:
        """Take in what the layer captured of a block."""
        hand, rows = block.hand, block.rows
        key, value = _tokens(captured.key), _tokens(captured.value)
        if not self.states:
            self._prepare(key, value, captured.hidden)
        special_key, special_value = key[block.special].transpose(0, 1), value[block.special].transpose(0, 1)
        key, value = key[rows], value[rows]
        query = _tokens(captured.query[:, :, block.positions])
        slots = torch.as_tensor(hand.slots, device=key.device)
        self.key[slots], self.value[slots] = key[: len(slots)], value[: len(slots)]
        by_head, values = key.transpose(0, 1), value.transpose(0, 1)
        work: list[Callable[[], None]] = [
            lambda: self._raise_top(by_head, values),
            lambda: self.moments["key"].add(key),
            lambda: self.moments["query"].add(query),
            lambda: self._add_special(special_key, special_value),
        ]
        if captured.hidden is not None and self.hidden is not None:
            hidden = captured.hidden.flatten(0, 1)
            work.append(lambda: self.moments["hidden"].add(hidden[rows[::HIDDEN_EVERY], None].float()))
            first = slots < len(self.hidden)
            self.hidden[slots[first]] = hidden[rows[: len(slots)][first]].float()

        def stream(number: int, start: int, stop: int) -> None:
            found = self._attend(by_head[:, start:stop], values[:, start:stop])
            self.states[number] = self.states[number].merge(found)

        work += [partial(stream, *part) for part in hand.streamed]
        self.workers(lambda piece: piece(), work)

    def _add_special(self, key: Tensor, value: Tensor) -> None:
        self.special = self.special.merge(self._attend(key, value))

    def _attend(self, key: Tensor, value: Tensor) -> State:
        return state_of(self.query, key, value, kernel=self.layer.kernel)

    def _prepare(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        deck, device = self.deck, key.device
        shared, m, v = self.query.shape[0], self.query.shape[1], value.shape[-1]
        self.states = [State.empty((shared,), m, v, device=device) for _ in range(deck.states)]
        self.special = State.empty((shared,), m, v, device=device)
        self.key = key.new_zeros(deck.slots, *key.shape[1:])
        self.value = value.new_zeros(deck.slots, *value.shape[1:])
        q = self.detail_query.shape[1]
        self.top_score = key.new_full((shared, q), float("-inf"))
        self.top_value = value.new_zeros(shared, q, v)
        if hidden is not None:
            self.hidden = key.new_zeros(min(HIDDEN_KEPT, deck.cells.sizes[-1]), hidden.shape[-1])

    def _raise_top(self, key: Tensor, value: Tensor) -> None:
        """Let the block's tokens (Hkv, n, ·) compete for the largest score of each detail query."""
        shared, q, _ = self.detail_query.shape
        chunk = max(1, SCORES_AT_ONCE // (shared * q))
        for start in range(0, key.shape[1], chunk):
            part = scores_of(self.detail_query, key[:, start : start + chunk], self.layer.traits.softcap)
            score, place = part.max(-1)
            found = value[:, start : start + chunk].gather(1, place[..., None].expand(-1, -1, value.shape[-1]))
            better = score > self.top_score
            self.top_score = torch.where(better, score, self.top_score)
            self.top_value = torch.where(better[..., None], found, self.top_value)


def _tokens(tensor: Tensor) -> Tensor:
    """(B, H, L, k) as one row a token, (B · L, H, k), float32."""
    return tensor.transpose(1, 2).flatten(0, 1).float()
