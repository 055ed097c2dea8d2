"""Random assignment of a stream of tokens to disjoint samples (replicates) of nested sizes n₁ < n₂ < ....

The tokens that a replicate gains from size n_{j−1} to size n_j are its cell j. A small cell keeps its tokens. A large
cell keeps only its attention state, into which tokens are merged, so memory does not grow with the stream.
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

KEPT_STEP = 512  # most tokens of a cell that keeps them: with 256 queries they take as much memory as a state
KEPT_TOKENS = 1 << 14  # tokens that whole replicates may hold together, if there are several
WHOLE_REPLICATES = 2  # largest number of replicates that keep all their tokens
LEFT_OVER = 4  # states that share the tokens assigned to no cell, so that workers can attend to them in parallel
SUBSET = 4  # `ForwardSlice.subset` holds one in this many tokens
HIDDEN = 4096  # largest number of kept tokens whose hidden states are stored
GOLDEN = 0.6180339887498949  # golden ratio − 1: its first k multiples modulo 1 are evenly spread for every k
SAMPLINGS = ("pooled", "document", "contiguous")  # random in all windows, random in one, or consecutive in one
COUNTED = 1 << 20  # number of first tokens of the stream that enter means and covariances: 0.2% precision


@dataclass(frozen=True, eq=False)
class ForwardSlice:
    """Where to store the t tokens of one forward pass of the model, as indices on the model's device."""

    rows: Tensor  # (t,): storage index of each token; tokens of large cells wait behind the kept ones
    subset: Tensor  # (s,): one in `SUBSET` of the tokens, at random
    hidden: Tensor  # (f,): tokens whose hidden states are stored
    counted: bool  # whether the tokens enter means and covariances
    before: int  # number of tokens of earlier slices that are still waiting
    completed: BlockAssignment | None  # assignment of the waiting tokens, if attention is computed after these
    ends_block: bool  # whether these are the last tokens of their block

    def cut(self, at: int) -> tuple[ForwardSlice, ForwardSlice]:
        """Split the slice into its first `at` tokens and the rest."""
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
    """Assignment of the tokens of one block of the stream to cells (the tokens between two sizes of a sample)."""

    order: NDArray[np.int64]  # (block,): indices of kept tokens, then those of large cells, then of no cell
    slots: NDArray[np.int64]  # (kept,): storage indices of the kept tokens
    streamed: list[tuple[int, int, int]]  # (state, start, stop) in `order` after the kept tokens
    counted: bool  # whether the block enters means and covariances

    def slices(self, length: int, assignment: Assignment, device: torch.device | str = "cpu") -> Iterator[ForwardSlice]:
        """Cut the block into slices for forward passes of `length` tokens each; the last slice may be shorter."""
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
            chosen = mine - kept  # random numbers, which choose a random subset
            chosen[~streams] = slots
            indices = (rows, np.flatnonzero(chosen % SUBSET == 0), np.flatnonzero(rows < assignment.hidden))
            sent = to_device(np.concatenate(indices), device)  # one copy to a GPU, then views
            rows_there, subset, hidden = torch.split(sent, [len(index) for index in indices])
            completed = block if start + length >= min(begin + wait, len(place)) else None
            ends_block = start + length >= len(place)
            yield ForwardSlice(rows_there, subset, hidden, self.counted, start - begin, completed, ends_block)


class Assignment:
    """Random assignment of a stream of tokens, block by block, to R replicates (disjoint samples) of J nested sizes."""

    single = False  # whether each replicate is one document

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int,
        *, kept_step: int = KEPT_STEP, whole_replicates: int = WHOLE_REPLICATES,
    ) -> None:  # fmt: skip
        self.blocks, self.cells, self.replicates, self.seed = blocks, cells, replicates, seed
        self.wait = max(blocks)  # tokens that may wait before attention over them: a block, unless memory is short
        self.marks = 0  # number of special tokens among `wait` tokens
        steps = np.asarray(cells.steps)
        self.whole = min(replicates, whole_replicates, max(1, KEPT_TOKENS // cells.sizes[-1]))
        self.kept = np.tile(steps <= kept_step, (replicates, 1))  # (R, J): cells that keep their tokens
        self.kept[: self.whole] = True  # replicates r < whole keep all their tokens, from slot r·n_max on
        held = np.where(self.kept, steps, 0).ravel()
        self.start = (np.cumsum(held) - held).reshape(self.kept.shape)  # (R, J): first slot of a kept cell
        self.slots = int(held.sum())
        self.origin = np.zeros(self.slots, np.int64)  # position in the stream of the token in each slot
        self.hidden = min(HIDDEN, cells.sizes[-1])  # slots whose hidden states are stored: the first of replicate 0
        self.number = np.cumsum(~self.kept.T).reshape(self.kept.T.shape).T - 1  # (R, J): state of a large cell
        self.states = int((~self.kept).sum()) + LEFT_OVER  # the last states are of tokens of no cell
        self.filled = np.zeros_like(self.start)  # (R, J): tokens assigned so far, those of the latest block included
        self.seen = 0  # tokens of the stream so far, those of no cell included

    def slots_of(self, cells: Any) -> NDArray[np.int64]:
        """Storage indices of the kept tokens of one replicate, or of a boolean mask (R, J) of replicates and sizes."""
        pairs = zip(self.start[cells], self.filled[cells], strict=True)
        return np.concatenate([start + np.arange(filled) for start, filled in pairs])

    def random_slots(self, count: int) -> NDArray[np.int64]:
        """Storage indices of at most `count` kept tokens, in random order: a random sample of the stream."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0x5107]))
        return generator.permutation(self.slots_of(self.kept)[:count])

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Draw a uniformly random assignment to cells (r, j), the tokens that sample r gains at its j-th size.

        Yields, for each block, the numbers (R, J) of tokens and their indices cell by cell, those of no cell last.
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
        """Yield the assignment of each block of the stream in turn, and count the tokens assigned so far."""
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
    """Assignment in which each sample comes from one document of `length` tokens; blocks hold whole documents.

    A sample has random tokens of its document or, if `contiguous`, consecutive ones that wrap around at the end. Tokens
    of one document are not independent, so even a whole document differs from the limit of all documents.
    """

    single = True

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int, length: int, contiguous: bool, **kept: int
    ) -> None:
        super().__init__(blocks, cells, replicates, seed, **kept)
        self.length, self.contiguous = length, contiguous

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Yield token numbers (R, J) and indices for each block, like the base class, from evenly spaced documents."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0xD0C5]))
        spread = np.argsort(np.argsort(np.arange(self.replicates) * GOLDEN % 1))  # any few are far apart
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
