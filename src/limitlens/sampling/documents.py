"""Assignment of single documents to replicates: replicate r holds n₁ < n₂ < ... tokens of one document.

Tokens of one document are not independent, so its samples approach the limit of the pool of all documents more slowly
than samples of the pool, and a whole document still differs from that limit. The bootstrap resamples whole replicates,
and so whole documents.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells

GOLDEN = 0.6180339887498949  # multiples modulo 1 are evenly spread, for any number of them
# Random tokens of all windows, random tokens of one window, or consecutive tokens of one window.
SAMPLINGS = ("pooled", "document", "contiguous")


class DocumentAssignment(Assignment):
    """An assignment whose replicates are documents of `length` tokens each; blocks hold whole documents.

    A sample has random positions of its document or, if `contiguous`, consecutive ones from a random position on,
    continued at the beginning of the document where it ends.
    """

    single = True

    def __init__(
        self, blocks: list[int], cells: Cells, replicates: int, seed: int, length: int, contiguous: bool, **kept: int
    ) -> None:
        super().__init__(blocks, cells, replicates, seed, **kept)
        self.length, self.contiguous = length, contiguous

    def draw(self) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
        """Assign evenly spaced documents to replicates; their remaining tokens and other documents go to no cell."""
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
