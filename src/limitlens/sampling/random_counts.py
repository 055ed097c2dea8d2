"""Random assignment of a stream of tokens to cells (replicate, size step), in one pass.

Each token goes to at most one cell, so replicates are disjoint samples without replacement. Only counts are kept in
memory: the number of tokens of a block that go to each cell is drawn from the places still open.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import InputError
from limitlens.sampling.cells import Cells


def draw_counts(blocks: list[int], cells: Cells, replicates: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Draw, for each block of the given lengths, how many of its tokens go to each cell, (replicates, steps).

    Every replicate fills its cells exactly, so replicates · n_max ≤ N, the sum of the blocks. Given the counts,
    `assign` distributes the tokens of a block in uniformly random order; together this is a uniformly random assignment
    of the whole stream.
    """
    total, needed = sum(blocks), replicates * cells.sizes[-1]
    if needed > total:
        given = f"{replicates} replicates of {cells.sizes[-1]} tokens need {needed} tokens and the stream has {total}"
        raise InputError(f"{given}; give more tokens, or lower the replicates or the largest size")
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xDEA1]))
    places = np.tile(np.asarray(cells.steps, dtype=np.int64), replicates)
    left = np.append(places, total - needed)  # the last entry is "no cell": tokens of the reference alone
    for size in blocks:
        taken = generator.multivariate_hypergeometric(left, size, method="marginals")
        left -= taken
        yield taken[:-1].reshape(replicates, len(cells.steps))


def assign(counts: NDArray[np.int64], block: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Split a random order of a block's tokens by counts: indices for each cell, row by row, then those of no cell."""
    order = generator.permutation(block)
    return np.split(order, np.cumsum(counts.ravel()))
