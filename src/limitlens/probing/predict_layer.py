"""Error curves of the heads of one layer, predicted from tokens that the layer has kept (`theory.exact_bootstrap`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels.split import missing
from limitlens.attention.scores import scores_of
from limitlens.probing.binned_law_cuda import layer_errors
from limitlens.probing.pilot import Layer
from limitlens.sampling.workers import Workers, one_after_another, product, summed
from limitlens.statistics.predicted_curve import PredictedErrors
from limitlens.theory.exact_bootstrap import PilotErrors, pilot_errors

TOKENS = 8192  # tokens of a probe's pool that its predictions use
QUERIES = 64  # of a head, spread over the windows that gave queries
NEAREST, FARTHEST = 8, 64  # predictions reach from the smallest size / NEAREST to the largest size × FARTHEST


def predicted_sizes(sizes: Sequence[float]) -> list[int]:
    """The sizes given, with smaller and larger ones a factor of two apart."""
    low, high = float(sizes[0]), float(sizes[-1])
    below = [low / 2**k for k in range(int(np.log2(NEAREST)), 0, -1)]
    above = [high * 2**k for k in range(1, int(np.log2(FARTHEST)) + 1)]
    return sorted({round(size) for size in (*below, *sizes, *above) if size >= 2})


def predict_layer(
    layer: Layer, key: Tensor, value: Tensor, sizes: Sequence[float],
    *, queries: int = QUERIES, quarters: NDArray[np.intp] | None = None, few_windows: bool = False, seed: int = 0,
    workers: Workers = one_after_another,
) -> list[tuple[PredictedErrors, ...]]:  # fmt: skip
    """Predict the errors of each head of a layer from keys and values (M, Hkv, ·): without its atom, and with it.

    The second prediction exists only where every context contains an atom (a sink). `quarters` (M,) says from which
    quarter of the text each token comes; without it tokens are in random order. `few_windows` says that the tokens come
    from few windows of text, which hold less information than their number suggests (`PredictedErrors.of`).
    """
    wanted = np.asarray(predicted_sizes(sizes), dtype=float)
    shared, groups, m, _ = layer.query.shape
    chosen = layer.places(queries)
    clusters = layer.clusters[chosen]

    def by_head(found: tuple[PilotErrors, ...]) -> Iterator[tuple[PredictedErrors, ...]]:
        return zip(
            *(PredictedErrors.of(wanted, one, clusters, len(key), seed, few_windows) for one in found), strict=True
        )

    def of_pair(pair: int) -> list[tuple[PredictedErrors, ...]]:
        query = layer.query[pair, :, chosen].flatten(0, 1)
        scores = scores_of(key[:, pair], query, layer.traits.softcap).T.cpu()  # the scores of a token are contiguous
        atom = None
        if layer.atom is not None:
            rows = (m * np.arange(groups)[:, None] + chosen).ravel()
            state = layer.atom[pair]
            atom = tuple(np.asarray(part[rows].cpu()) for part in (state.lse, state.output))
        options = {"quarters": quarters, "matmul": product, "bags": summed}
        values = np.asarray(value[:, pair].double().cpu())
        return list(by_head(pilot_errors(np.asarray(scores), values, wanted, atom, **options)))  # type: ignore[arg-type]

    if key.device.type == "cpu" or missing() is not None:  # heads that share keys go together, for the cache
        return list(chain.from_iterable(workers(of_pair, range(shared))))
    at_once = layer_errors(layer, key, value, wanted, chosen, quarters)
    return [head for found in at_once for head in by_head(found)]
