"""Hardmax attention of real heads: the value at the largest score among n tokens, against that among all of the pool.

The largest score is mergeable (`attention.state.Peak`), so the cells of every replicate give the whole curve in the one
pass. For Gaussian tokens the error falls like a power of ln n, not of n (`theory.hardmax`): the fit says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import to_numpy
from limitlens.attention.scores import scores_of
from limitlens.attention.state import Peak
from limitlens.probing.moment_errors import Squares, members
from limitlens.probing.pilot import DETAIL_QUERIES, Layer

SCORES_AT_ONCE = 1 << 18  # scores formed at a time, few enough to stay in cache
DEVICE_TIMES = 256  # as many on a GPU


def peak_over(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> Peak:
    """The largest score of queries (..., q, k) over tokens (..., n, ·), and its value.

    A state with its detail would say the same for fifteen times the work: the argmax needs no exponentials.
    """
    if not key.shape[-2]:
        return Peak.empty(tuple(key.shape[:-2]), query.shape[-2], value.shape[-1], like=value)
    scores = SCORES_AT_ONCE * (1 if key.device.type == "cpu" else DEVICE_TIMES)
    chunk = max(1, scores // max(1, key.shape[:-2].numel() * query.shape[-2]))
    starts = range(0, key.shape[-2], chunk)
    parts = ((start, scores_of(query, key[..., start : start + chunk, :], softcap)) for start in starts)
    return Peak.among(parts, value)


def hardmax_errors(layer: Layer, peaks: Sequence[Peak]) -> Squares:
    """Squared errors of the argmax of the heads that read h key/value heads, relative to its value over the pool.

    `peaks` are those of the cells of every replicate (R, h, G · q), for each step of the sizes, and at last those of
    the tokens of no cell (·, h, G · q).
    """
    best = Peak.joined(peaks).union().value
    _, clusters = np.unique(layer.clusters[layer.places(DETAIL_QUERIES)], return_inverse=True)
    member = members(clusters, best.device)
    member = member * (member.shape[1] / len(member))

    def of(vectors: Tensor) -> Tensor:
        """Mean squared norms in every cluster, (..., h, G · q, v) to (..., h · G, C)."""
        found: Tensor = torch.linalg.vecdot(vectors, vectors)
        return found.double().reshape(*vectors.shape[:-3], -1, len(member)) @ member

    squares = torch.stack(
        [of(peak.value - best) for peak in accumulate(peaks[:-1], Peak.merge)], -1
    )  # (R, h · G, C, J)
    own = of(best)[..., None].expand(*squares.shape[1:])
    scale = own.mean(1)
    outputs = own / scale[:, None].clamp_min(1e-300)
    return Squares(*to_numpy(squares.permute(1, 2, 0, 3), outputs, scale.sqrt()))
