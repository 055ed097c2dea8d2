"""Allocations: how a cache of B entries is divided among key/value heads."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from limitlens.cache.cut import keys_below
from limitlens.errors import Array

ALLOCATIONS = ("uniform", "equal_error", "fisher_weighted")  # the functions of this module
_STEPS = 60  # of bisection


def uniform(shape: tuple[int, ...], total: int) -> NDArray[np.intp]:
    """The same number of keys for every head, rounded down."""
    return np.full(shape, total // int(np.prod(shape)), dtype=np.intp)


def equal_error(errors: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """Keys (...) at the smallest error that all heads reach with `total` keys together, for errors (..., sizes)."""
    low, high = 0.0, float(np.nanmax(errors)) + 1
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if keys_below(errors, sizes, middle).sum() <= total:
            high = middle
        else:
            low = middle
    return keys_below(errors, sizes, high)


def fisher_weighted(costs: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """Keys n_h (...) that minimise Σ_h c_h(n_h) subject to Σ_h n_h = `total`, for Fisher costs (..., sizes).

    Equal marginal costs are optimal only for convex costs, so each curve is replaced by its lower convex hull. Segments
    of the hulls are taken in the order of cost saved per key; the last one is cut where the keys run out.
    """
    segments = []
    for head, cost in enumerate(costs.reshape(-1, len(sizes))):
        corners = _hull(sizes, cost)
        for left, right in pairwise(corners):
            width = sizes[right] - sizes[left]
            segments.append(((cost[left] - cost[right]) / width, head, width))
    keys = np.full(costs.shape[:-1], sizes[0], dtype=np.intp)
    left_over = total - int(keys.sum())
    for gain, head, width in sorted(segments, key=lambda segment: -segment[0]):
        taken = min(width, left_over)
        if gain <= 0 or taken <= 0:
            break
        keys.flat[head] += taken
        left_over -= taken
    return keys


def _hull(sizes: Sequence[int], cost: Array) -> list[int]:
    """Indices of the corners of the lower convex hull of points (size, cost), from left to right."""
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
