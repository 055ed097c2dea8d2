"""Deal a stream of unknown tokens to cells (replicate, size step), at random and in one pass.

Each token goes to at most one cell, so replicates are disjoint samples without replacement, and memory holds counts
only: a token's cell is drawn with the probabilities of the places still open, as cards are dealt from a shuffled deck.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import InputError
from limitlens.sampling.cells import Cells


def deal(blocks: list[int], cells: Cells, replicates: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """For each block of tokens, given their lengths in order, how many go to each cell: (replicates, steps).

    Every replicate fills its cells exactly, so that replicates · n_max ≤ N, the sum of the blocks. Given the counts,
    the tokens of a block are assigned by a uniformly random order of it (`assign`): together this is a uniformly random
    deal of the whole stream.
    """
    total, needed = sum(blocks), replicates * cells.sizes[-1]
    if needed > total:
        given = f"{replicates} replicates of {cells.sizes[-1]} tokens need {needed} tokens and the stream has {total}"
        raise InputError(f"{given}; bring more tokens, or lower the replicates or the largest size")
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xDEA1]))
    places = np.tile(np.asarray(cells.steps, dtype=np.int64), replicates)
    left = np.append(places, total - needed)  # the last place is "no cell": tokens only the reference sees
    for size in blocks:
        taken = generator.multivariate_hypergeometric(left, size, method="marginals")
        left -= taken
        yield taken[:-1].reshape(replicates, len(cells.steps))


def assign(counts: NDArray[np.int64], block: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Indices of a block's tokens for each cell in row-major order, then for no cell: a random order, cut by counts."""
    order = generator.permutation(block)
    return np.split(order, np.cumsum(counts.ravel()))
