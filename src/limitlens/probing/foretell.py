"""What tokens that a layer has kept foretell of its heads at any n (`theory.pilot_law`, `curves.foresight`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels.split import missing
from limitlens.curves.foresight import Foresight
from limitlens.probing.gathering import together
from limitlens.probing.pilot import Layer, scores_of
from limitlens.sampling.workers import Workers, one_after_another, product
from limitlens.theory.pilot_law import PilotErrors, pilot_errors

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

    def of(head: int) -> tuple[Foresight, ...]:
        pair, group = divmod(head, groups)
        scores = scores_of(layer.query[pair, group, chosen], key[:, pair], layer.traits.softcap).cpu()
        atom = None
        if layer.atom is not None:
            own = layer.atom[pair]
            atom = tuple(np.asarray(part[group * m + chosen].cpu()) for part in (own.lse, own.output))
        values = np.asarray(value[:, pair].double().cpu())
        found = pilot_errors(np.asarray(scores), values, wanted, atom, quarters=quarters, matmul=product)  # type: ignore[arg-type]
        return next(foreseen(found))

    if key.device.type == "cpu" or missing() is not None:  # one head after the other: what each needs stays in cache
        return list(workers(of, range(shared * groups)))
    at_once = together(layer, key, value, wanted, chosen, quarters)
    return [one for found in at_once for one in foreseen(found)]
