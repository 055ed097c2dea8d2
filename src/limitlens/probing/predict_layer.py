"""What tokens that a layer has kept foretell of its heads at any n (`theory.exact_bootstrap`, `curves.foresight`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels.split import missing
from limitlens.attention.scores import scores_of
from limitlens.probing.binned_law_cuda import together
from limitlens.probing.pilot import Layer
from limitlens.sampling.workers import Workers, one_after_another, product, summed
from limitlens.statistics.predicted_curve import Foresight
from limitlens.theory.exact_bootstrap import PilotErrors, pilot_errors

TOKENS = 8192  # of the pilot within a probe
QUERIES = 64  # of a head, spread over the windows that gave queries
NEAREST, FARTHEST = 8, 64  # foretold from the smallest size over this to the largest times that


def foretold_sizes(sizes: Sequence[float]) -> list[int]:
    """The sizes given, and doublings on either side of them."""
    low, high = float(sizes[0]), float(sizes[-1])
    below = [low / 2**k for k in range(int(np.log2(NEAREST)), 0, -1)]
    above = [high * 2**k for k in range(1, int(np.log2(FARTHEST)) + 1)]
    return sorted({round(size) for size in (*below, *sizes, *above) if size >= 2})


def foretell(
    layer: Layer, key: Tensor, value: Tensor, sizes: Sequence[float],
    *, queries: int = QUERIES, quarters: NDArray[np.intp] | None = None, few: bool = False, seed: int = 0,
    workers: Workers = one_after_another,
) -> list[tuple[Foresight, ...]]:  # fmt: skip
    """For each head of a layer what keys and values (M, Hkv, ·) foretell: bare, and beside the atom.

    `quarters` (M,) of the text they come from; without them they are in random order. `few` windows of text say less
    than their tokens promise (`Foresight.of`).
    """
    wanted = np.asarray(foretold_sizes(sizes), dtype=float)
    shared, groups, m, _ = layer.query.shape
    chosen = layer.places(queries)
    clusters = layer.clusters[chosen]

    def foreseen(found: tuple[PilotErrors, ...]) -> Iterator[tuple[Foresight, ...]]:
        return zip(*(Foresight.of(wanted, one, clusters, len(key), seed, few) for one in found), strict=True)

    def of(pair: int) -> list[tuple[Foresight, ...]]:
        query = layer.query[pair, :, chosen].flatten(0, 1)
        scores = scores_of(key[:, pair], query, layer.traits.softcap).T.cpu()  # a token's side by side
        atom = None
        if layer.atom is not None:
            own, rows = layer.atom[pair], (m * np.arange(groups)[:, None] + chosen).ravel()
            atom = tuple(np.asarray(part[rows].cpu()) for part in (own.lse, own.output))
        given = {"quarters": quarters, "matmul": product, "bags": summed}
        values = np.asarray(value[:, pair].double().cpu())
        return list(foreseen(pilot_errors(np.asarray(scores), values, wanted, atom, **given)))  # type: ignore[arg-type]

    if key.device.type == "cpu" or missing() is not None:  # heads that share keys together: what they need is in cache
        return list(chain.from_iterable(workers(of, range(shared))))
    at_once = together(layer, key, value, wanted, chosen, quarters)
    return [one for found in at_once for one in foreseen(found)]
