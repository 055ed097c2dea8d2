"""Cells of single documents: replicate r is a sample of n₁ < n₂ < ... tokens of the r-th document alone.

Tokens of one document are not independent, so that its samples approach the limit of the pool, of all documents, more
slowly than samples of the pool do, and a whole document is still apart from it. Documents are the blocks that are
resampled for every interval: replicates are resampled whole, and each is one document.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, however many are taken
SAMPLINGS = ("pooled", "document", "contiguous")  # tokens of all windows; random tokens of one; a run of its tokens


class DocumentAssignment(Assignment):
    """An assignment whose replicates are documents of `length` tokens each; blocks hold whole documents.

    A sample is of random places of its document, or where `contiguous` a run that begins at a random one and
    goes on at the beginning where the document ends.
    """

    single = True

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int, length: int, contiguous: bool, **kept: int
    ) -> None:
        super().__init__(blocks, cells, replicates, seed, **kept)
        self.length, self.contiguous = length, contiguous

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Every so many documents one to a replicate; what is left of it and all others to no cell."""
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0xD0C5]))
        # Neighbouring replicates are far apart in the stream, so that a few of them stand for all of it.
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
                    *own, order = np.split(order, self.cells.sizes)
                    parts[row * steps : (row + 1) * steps] = [first + places for places in own]
                rest.append(first + order)
                passed += 1
            yield counts, [*parts, np.concatenate(rest)]
