"""Assignment of the tokens of a stream to cells (tokens of one replicate and size step), and the storage of each cell.

A cell of few tokens is smaller than its attention state (queries · (values + 1) numbers a head), so it keeps its tokens
until the stream ends, in numbered slots. A cell of many tokens is streamed: it holds one state, into which every block
is merged; its tokens wait in further rows of the store until then. The first replicates keep all their tokens (whole
replicates), for diagnostics that need every score. Memory depends on the sizes, not on the length of the stream. Each
token goes to at most one cell, so replicates are disjoint samples without replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.errors import InputError
from limitlens.sampling.cells import Cells

KEPT_STEP = 512  # largest step whose cells keep their tokens: with 256 queries about the size of a state
KEPT_TOKENS = 1 << 14  # tokens that whole replicates may hold together, if there are several
WHOLE_REPLICATES = 2  # largest number of replicates that keep all their tokens
LEFT_OVER = 4  # states that share the tokens assigned to no cell, so that workers can attend to them in parallel
SUBSET = 4  # `ForwardSlice.subset` holds one in this many tokens
HIDDEN = 4096  # largest number of kept tokens whose hidden states are stored
GOLDEN = 0.6180339887498949  # golden ratio − 1: its first k multiples modulo 1 are evenly spread for every k
# Random tokens of all windows, random tokens of one window, or consecutive tokens of one window.
SAMPLINGS = ("pooled", "document", "contiguous")
COUNTED = 1 << 20  # number of first tokens of the stream that enter means and covariances: 0.2% precision


@dataclass(frozen=True, eq=False)
class ForwardSlice:
    """Indices, on the model's device, that say where to store the t tokens of one forward pass, a slice of a block."""

    rows: Tensor  # (t,): row of the store for each token: its slot if it is kept, else a row of the waiting area
    subset: Tensor  # (s,): one in `SUBSET` tokens of the forward, at random
    hidden: Tensor  # (f,): tokens whose hidden states are stored
    counted: bool  # whether the tokens enter means and covariances
    before: int  # number of tokens of earlier slices that are still waiting
    completed: BlockAssignment | None  # the block assignment that these tokens complete
    ends_block: bool  # whether these are the last tokens of their block

    def cut(self, at: int) -> tuple[ForwardSlice, ForwardSlice]:
        """Split the slice into two: the first `at` tokens of the forward pass, and the other tokens."""
        subset, hidden = self.subset < at, self.hidden < at
        first = replace(
            self, rows=self.rows[:at], subset=self.subset[subset], hidden=self.hidden[hidden],
            completed=None, ends_block=False,
        )  # fmt: skip
        rest = replace(
            self, rows=self.rows[at:], subset=self.subset[~subset] - at, hidden=self.hidden[~hidden] - at,
            before=self.before + at,
        )  # fmt: skip
        return first, rest


@dataclass(frozen=True, eq=False)
class BlockAssignment:
    """Assignment of the tokens of one block of the stream to cells."""

    order: NDArray[np.int64]  # (block,): token indices: first the kept ones, then those of streamed cells, then others
    slots: NDArray[np.int64]  # (kept,): slots of the kept tokens
    streamed: list[tuple[int, int, int]]  # (cell, start, stop) among the tokens not kept; tokens of no cell come last
    counted: bool  # whether the block enters means and covariances

    def slices(self, length: int, assignment: Assignment, device: torch.device | str = "cpu") -> Iterator[ForwardSlice]:
        """Cut the block into slices for forward passes of `length` tokens each; the last slice may be shorter.

        After every `assignment.wait` tokens, a multiple of `length`, attention is computed over the waiting tokens: the
        slice then carries (`completed`) the assignment of these tokens alone.
        """
        wait = assignment.wait
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(self.order))
        kept, block = len(self.slots), self
        rank = np.arange(len(place) - kept)  # row of each token in the waiting area
        for start in range(0, len(place), length):
            mine, begin = place[start : start + length], start - start % wait
            if start == begin and wait < len(place):
                waiting = np.sort(place[begin : begin + wait])
                waiting = waiting[np.searchsorted(waiting, kept) :] - kept
                rank[waiting] = np.arange(len(waiting))
                spans = [(cell, *np.searchsorted(waiting, span).tolist()) for cell, *span in self.streamed]
                block = replace(self, streamed=[span for span in spans if span[1] < span[2]])
            streams = mine >= kept
            rows = np.empty_like(mine)
            rows[streams] = assignment.slots + rank[mine[streams] - kept]
            rows[~streams] = slots = self.slots[mine[~streams]]
            chosen = mine - kept  # random numbers, so that a quarter of them is a random subset
            chosen[~streams] = slots
            indices = (rows, np.flatnonzero(chosen % SUBSET == 0), np.flatnonzero(rows < assignment.hidden))
            sent = to_device(np.concatenate(indices), device)  # one copy to a GPU, then views
            rows_there, subset, hidden = torch.split(sent, [len(index) for index in indices])
            completed = block if start + length >= min(begin + wait, len(place)) else None
            ends_block = start + length >= len(place)
            yield ForwardSlice(rows_there, subset, hidden, self.counted, start - begin, completed, ends_block)


class Assignment:
    """Random assignment of a stream of tokens, in blocks of known lengths, to cells (replicate r, size step j)."""

    single = False  # whether each replicate is one document

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int,
        *, kept_step: int = KEPT_STEP, whole_replicates: int = WHOLE_REPLICATES,
    ) -> None:  # fmt: skip
        self.blocks, self.cells, self.replicates, self.seed = blocks, cells, replicates, seed
        self.wait = max(blocks)  # tokens that may wait before attention over them: a block, unless memory is short
        self.marks = 0  # number of special tokens among `wait` tokens
        steps = np.asarray(cells.steps)
        # Replicates 0 .. whole − 1 keep all their tokens, replicate r in slots r·n_max .. (r + 1)·n_max − 1.
        self.whole = min(replicates, whole_replicates, max(1, KEPT_TOKENS // cells.sizes[-1]))
        self.kept = np.tile(steps <= kept_step, (replicates, 1))  # (R, J): cells that keep their tokens
        self.kept[: self.whole] = True
        held = np.where(self.kept, steps, 0).ravel()
        self.start = (np.cumsum(held) - held).reshape(self.kept.shape)  # (R, J): first slot of a kept cell
        self.slots = int(held.sum())
        self.origin = np.zeros(self.slots, np.int64)  # position in the stream of the token in each slot
        self.hidden = min(HIDDEN, cells.sizes[-1])  # slots whose hidden states are stored: the first of replicate 0
        # (R, J): index of a streamed cell's state; those of one step are neighbours
        self.number = np.cumsum(~self.kept.T).reshape(self.kept.T.shape).T - 1
        # number of states; the last ones are of the tokens of no cell
        self.states = int((~self.kept).sum()) + LEFT_OVER
        self.filled = np.zeros_like(self.start)  # (R, J): tokens assigned so far, those of the latest block included
        self.seen = 0  # tokens of the stream so far, those of no cell included

    def slots_of(self, cells: Any) -> NDArray[np.int64]:
        """Slots (n,) of the tokens in kept `cells`: a replicate, with nested samples in order, or a mask of cells."""
        pairs = zip(self.start[cells], self.filled[cells], strict=True)
        return np.concatenate([start + np.arange(filled) for start, filled in pairs])

    def random_slots(self, count: int) -> NDArray[np.int64]:
        """Slots of at most `count` kept tokens, in random order: a random sample of the tokens of the stream."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0x5107]))
        return generator.permutation(self.slots_of(self.kept)[:count])

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Yield, for each block, the numbers of its tokens (replicates, steps) and their indices, by cell.

        Indices of tokens that go to no cell come last. Every replicate fills its cells exactly. The numbers are drawn
        from the places still open, and the tokens in random order; together this is a uniformly random assignment.
        """
        total, needed = sum(self.blocks), self.replicates * self.cells.sizes[-1]
        if needed > total:
            given = f"{self.replicates} replicates of {self.cells.sizes[-1]} tokens need {needed} tokens"
            remedy = "give more tokens, or lower the replicates or the largest size"
            raise InputError(f"{given} and the stream has {total}; {remedy}")
        numbers, order = (np.random.default_rng(np.random.SeedSequence([self.seed, use])) for use in (0xDEA1, 0x0DE5))
        places = np.tile(np.asarray(self.cells.steps, dtype=np.int64), self.replicates)
        left = np.append(places, total - needed)  # the last entry is "no cell": tokens of the reference alone
        for block in self.blocks:
            taken = numbers.multivariate_hypergeometric(left, block, method="marginals")
            left -= taken
            yield taken[:-1].reshape(self.filled.shape), np.split(order.permutation(block), np.cumsum(taken[:-1]))

    def assign_blocks(self) -> Iterator[BlockAssignment]:
        """Yield the assignment of the tokens of each block in turn, and update the counts of tokens in the cells."""
        for block, (counts, parts) in zip(self.blocks, self.draw(), strict=True):
            kept, streamed = np.flatnonzero(self.kept), np.flatnonzero(~self.kept)
            free = (self.start + self.filled).ravel()
            slots = [free[cell] + np.arange(len(parts[cell])) for cell in kept]
            others = [*(parts[cell] for cell in streamed), *np.array_split(parts[-1], LEFT_OVER)]
            numbers = [*self.number.ravel()[streamed], *range(self.states - LEFT_OVER, self.states)]
            order = np.concatenate([*(parts[cell] for cell in kept), *others])
            taken = np.concatenate([np.empty(0, np.int64), *slots])
            self.origin[taken] = self.seen + order[: len(taken)]
            stops = np.cumsum([len(part) for part in others]).tolist()
            spans = zip(map(int, numbers), [0, *stops], stops, strict=False)
            streams = [span for span in spans if span[1] < span[2]]  # without empty cells
            assigned = BlockAssignment(order, taken, streams, self.seen < COUNTED)
            self.filled = self.filled + counts
            self.seen += block
            yield assigned


class DocumentAssignment(Assignment):
    """Assignment in which each replicate is one document of `length` tokens; blocks hold whole documents.

    A sample has random positions of its document or, if `contiguous`, consecutive ones from a random position on,
    continued at the beginning of the document. Tokens of one document are not independent, so samples approach the
    limit of all documents more slowly, and even a whole document differs from it.
    """

    single = True

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int, length: int, contiguous: bool, **kept: int
    ) -> None:
        super().__init__(blocks, cells, replicates, seed, **kept)
        self.length, self.contiguous = length, contiguous

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Yield counts and token indices of the cells for each block, with evenly spaced documents as replicates."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0xD0C5]))
        # Neighbouring replicates are far apart in the stream, so that any few of them represent all of it.
        spread = np.argsort(np.argsort(np.arange(self.replicates) * GOLDEN % 1))
        rows = {int(rank) * (sum(self.blocks) // self.length) // self.replicates: r for r, rank in enumerate(spread)}
        (_, steps), passed = self.filled.shape, 0
        for block in self.blocks:
            counts, parts, rest = np.zeros_like(self.filled), [np.empty(0, np.int64)] * self.filled.size, []
            for first in range(0, block, self.length):
                order = generator.permutation(self.length)
                if self.contiguous:
                    order = (np.arange(self.length) + generator.integers(self.length)) % self.length
                if (row := rows.get(passed)) is not None:
                    counts[row] = self.cells.steps
                    *samples, order = np.split(order, self.cells.sizes)
                    parts[row * steps : (row + 1) * steps] = [first + places for places in samples]
                rest.append(first + order)
                passed += 1
            yield counts, [*parts, np.concatenate(rest)]
