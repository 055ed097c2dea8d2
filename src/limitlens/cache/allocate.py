"""How a cache of B entries is shared out among key/value heads: evenly, at one error, or at the least total cost."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from limitlens.cache.cut import keys_below
from limitlens.errors import Array

ALLOCATIONS = ("uniform", "equal error", "least cost")  # same number, same error, least summed effect on the logits
_STEPS = 60  # of bisection


def uniform(shape: tuple[int, ...], total: int) -> NDArray[np.intp]:
    """The same number of keys for every head, rounded down."""
    return np.full(shape, total // int(np.prod(shape)), dtype=np.intp)


def equal_error(curves: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """The smallest error that all heads reach with `total` keys together, by bisection: curves (..., sizes)."""
    low, high = 0.0, float(np.nanmax(curves)) + 1
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if keys_below(curves, sizes, middle).sum() <= total else (middle, high)
    return keys_below(curves, sizes, high)


def least_cost(costs: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """Keys n_h that minimise Σ c_h(n_h) under Σ n_h = `total`, for costs (..., sizes) made convex.

    Equal marginals are optimal for convex costs alone, so each curve is replaced by its lower convex hull, whose
    stretches are bought in the order of what a key saves. The last one is cut where the keys run out.
    """
    stretches = []
    for head, cost in enumerate(costs.reshape(-1, len(sizes))):
        corners = _hull(sizes, cost)
        for left, right in pairwise(corners):
            width = sizes[right] - sizes[left]
            stretches.append(((cost[left] - cost[right]) / width, head, width))
    given = np.full(costs.shape[:-1], sizes[0], dtype=np.intp)
    left_over = total - int(given.sum())
    for gain, head, width in sorted(stretches, key=lambda stretch: -stretch[0]):
        taken = min(width, left_over)
        if gain <= 0 or taken <= 0:
            break
        given.flat[head] += taken
        left_over -= taken
    return given


def _hull(sizes: Sequence[int], cost: Array) -> list[int]:
    """Corners of the lower convex hull of points (size, cost), from left to right."""
    corners: list[int] = []
    for new in range(len(sizes)):
        while len(corners) > 1:
            first, middle = corners[-2:]
            rise = (cost[new] - cost[first]) * (sizes[middle] - sizes[first])
            if (cost[middle] - cost[first]) * (sizes[new] - sizes[first]) < rise:
                break
            corners.pop()
        corners.append(new)
    return corners
