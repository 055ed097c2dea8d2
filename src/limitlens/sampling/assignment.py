"""Which token of the stream goes to which cell, and what a cell keeps of it.

A cell of few tokens is smaller than its state (queries · (values + 1) numbers a head), so it keeps its tokens until
the stream has ended; a cell of many tokens keeps a state that each block is merged into. The first replicates keep all
their tokens, for the diagnostics that need every score. Either way memory is set by the sizes, not by the length of the
stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.sampling.cells import Cells
from limitlens.sampling.random_counts import assign, deal

KEPT_STEP = 512  # tokens up to which a cell keeps them: at the usual 256 queries about the size of its state
KEPT_TOKENS = 1 << 14  # tokens that the whole replicates may hold together, where that is more than one of them
WHOLE_REPLICATES = 2  # and the most of these there are
LEFT_OVER = 4  # states that share the tokens of no cell, so that these can be attended at the same time
SOME = 4  # one in so many tokens is among `ForwardSlice.some`
FIRST = 4096  # kept tokens that are among the first
COUNTED = 1 << 20  # tokens of the stream, the first ones and so random ones, of which moments are taken: to 0.2%


@dataclass(frozen=True, eq=False)
class ForwardSlice:
    """What one forward brings of a block, as indices on the model's device."""

    rows: Tensor  # (t,): where its tokens go: to a slot, or beyond all slots to wait for the rest of their block
    some: Tensor  # (s,): one in `SOME` tokens of the forward: their places are random, so they are a random part
    first: Tensor  # (f,), (f,): those of the kept tokens that are among the first ones, and where
    first_slots: Tensor
    spans: Tensor  # (cells, 3): `BlockAssignment.streamed` of the hand that is complete
    counted: bool  # whether moments are taken of them
    before: int  # tokens that came since others waited
    complete: BlockAssignment | None  # the hand whose last tokens these are
    ends: bool  # whether they are the last of their block too

    def cut(self, at: int) -> tuple[ForwardSlice, ForwardSlice]:
        """The part of the first `at` tokens of the forward, and that of the others."""
        halves = []
        for less, early in ((0, True), (at, False)):
            some, first = ((index < at) == early for index in (self.some, self.first))
            own = (self.some[some] - less, self.first[first] - less, self.first_slots[first])
            rows = self.rows[:at] if early else self.rows[at:]
            halves.append((rows, *own, self.spans, self.counted, self.before + less))
        return ForwardSlice(*halves[0], None, False), ForwardSlice(*halves[1], self.complete, self.ends)


@dataclass(frozen=True, eq=False)
class BlockAssignment:
    """Where the tokens of one block go."""

    order: NDArray[np.int64]  # (block,), by place in it: the kept tokens, then those of streamed cells, then the others
    slots: NDArray[np.int64]  # (kept,): where the first of these are put among the kept tokens
    streamed: list[tuple[int, int, int]]  # (number of a state, start, stop) among the others; those of no cell are last
    counted: bool  # whether moments are taken of the block

    def parts(self, length: int, deck: Assignment, device: torch.device | str = "cpu") -> Iterator[ForwardSlice]:
        """The hand as forwards of `length` pooled tokens each bring it, the last one perhaps of fewer.

        After `deck.wait` tokens, a multiple of that, those that wait are attended to: a hand of its own is complete.
        """
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(self.order))
        kept, hand = len(self.slots), self
        rank = np.arange(len(place) - kept)  # of those that wait, among those that wait with them: all of the block
        for start in range(0, len(place), length):
            mine, begin = place[start : start + length], start - start % deck.wait
            if start == begin and deck.wait < len(place):
                there_wait = np.sort(place[begin : begin + deck.wait])
                there_wait = there_wait[np.searchsorted(there_wait, kept) :] - kept
                rank[there_wait] = np.arange(len(there_wait))
                spans = [(number, *np.searchsorted(there_wait, span).tolist()) for number, *span in self.streamed]
                hand = replace(self, streamed=[span for span in spans if span[1] < span[2]])
            last = start + length >= min(begin + deck.wait, len(place))
            streams = mine >= kept
            rows = np.empty_like(mine)
            rows[streams] = deck.slots + rank[mine[streams] - kept]
            rows[~streams] = slots = self.slots[mine[~streams]]
            chosen = mine - kept
            chosen[~streams] = slots
            first, streamed = np.flatnonzero(rows < deck.first), np.array(hand.streamed if last else [], np.int64)
            indices = (rows, np.flatnonzero(chosen % SOME == 0), first, rows[first], streamed.ravel())
            sizes = [len(index) for index in indices]
            all_rows, some, early, slots_there, spans_there = torch.split(
                to_device(np.concatenate(indices), device), sizes
            )
            ends = start + length >= len(place)
            own = (all_rows, some, early, slots_there, spans_there.view(-1, 3))
            yield ForwardSlice(*own, self.counted, start - begin, hand if last else None, ends)


class Assignment:
    """Cells (replicate r, step j) for a stream of known block lengths, and how many tokens each has so far."""

    single = False  # whether replicates are single documents

    def __init__(self, blocks: list[int], cells: Cells, replicates: int, seed: int) -> None:
        self.blocks, self.cells, self.replicates, self.seed = blocks, cells, replicates, seed
        self.wait = max(blocks)  # tokens that may wait to be attended to: a block, unless memory is short
        self.marks = 0  # special tokens among so many
        steps = np.asarray(cells.steps)
        # Replicates 0 .. whole − 1 keep all their tokens, replicate r in slots r·n_max .. (r + 1)·n_max − 1.
        self.whole = min(replicates, WHOLE_REPLICATES, max(1, KEPT_TOKENS // cells.sizes[-1]))
        self.kept = np.tile(steps <= KEPT_STEP, (replicates, 1))  # (R, J): cells that keep their tokens
        self.kept[: self.whole] = True
        held = np.where(self.kept, steps, 0).ravel()
        self.start = (np.cumsum(held) - held).reshape(self.kept.shape)  # (R, J): first slot of a kept cell
        self.slots = int(held.sum())  # all there are
        self.origin = np.zeros(self.slots, np.int64)  # of the token in each slot: its place in the stream
        self.first = min(FIRST, cells.sizes[-1])  # the first ones, of replicate 0
        self.number = np.cumsum(~self.kept).reshape(self.kept.shape) - 1  # (R, J): the state of a streamed cell
        self.states = int((~self.kept).sum()) + LEFT_OVER  # all there are; the last are of the tokens of no cell
        self.filled = np.zeros_like(self.start)  # (R, J): tokens dealt so far, those of the last hand included
        self.seen = 0  # tokens dealt so far, those of no cell included

    def slots_of(self, replicate: int) -> NDArray[np.int64]:
        """The slots of a whole replicate's tokens, in the order of its nested samples."""
        cells = zip(self.start[replicate], self.filled[replicate], strict=True)
        return np.concatenate([start + np.arange(filled) for start, filled in cells])

    def some_slots(self, count: int) -> NDArray[np.int64]:
        """The slots of so many kept tokens, or of all there are, in random order: a random part of the stream."""
        cells = [(int(self.start[cell]), int(self.filled[cell])) for cell in zip(*np.nonzero(self.kept), strict=True)]
        slots = np.concatenate([start + np.arange(filled) for start, filled in cells])[:count]
        return np.random.default_rng(np.random.SeedSequence([self.seed, 0x5107])).permutation(slots)

    def deals(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """For each block how many tokens go to each cell (R, J), and which: a random deal of the whole stream."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0x0DE5]))
        counted = deal(self.blocks, self.cells, self.replicates, self.seed)
        for block, counts in zip(self.blocks, counted, strict=True):
            yield counts, assign(counts, block, generator)

    def hands(self) -> Iterator[BlockAssignment]:
        """One hand for each block, in order."""
        for block, (counts, parts) in zip(self.blocks, self.deals(), strict=True):
            kept, streamed = np.flatnonzero(self.kept), np.flatnonzero(~self.kept)
            free = (self.start + self.filled).ravel()
            slots = [free[cell] + np.arange(len(parts[cell])) for cell in kept]
            others = [*(parts[cell] for cell in streamed), *np.array_split(parts[-1], LEFT_OVER)]
            numbers = [*self.number.ravel()[streamed], *range(self.states - LEFT_OVER, self.states)]
            stops = np.cumsum([len(part) for part in others])
            order = np.concatenate([*(parts[cell] for cell in kept), *others])
            taken = np.concatenate([np.empty(0, np.int64), *slots])
            self.origin[taken] = self.seen + order[: len(taken)]
            spans = [
                (int(number), int(stop) - len(part), int(stop))
                for number, part, stop in zip(numbers, others, stops, strict=True)
                if len(part)
            ]
            hand = BlockAssignment(order, taken, spans, self.seen < COUNTED)
            self.filled = self.filled + counts
            self.seen += block
            yield hand
