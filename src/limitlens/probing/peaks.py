"""Hardmax attention of real heads: the value at the largest score among n tokens, against that in the whole pool.

The largest score is mergeable (`attention.state.Peak`), so the cells of every replicate give the whole curve in one
pass. For Gaussian tokens the error falls like a power of ln n, not of n (`theory.hardmax`): the fit decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import to_numpy
from limitlens.attention.state import Peak
from limitlens.probing.moment_errors import Squares, members
from limitlens.probing.pilot import DETAIL_QUERIES, Layer


def hardmax_errors(layer: Layer, peaks: Sequence[Peak]) -> Squares:
    """Squared errors of the value at the largest score, relative to the value over the pool, for h key/value heads.

    `peaks` has for each step those of the cells of every replicate, (R, h, G · q), and last those of the tokens of no
    cell, (·, h, G · q).
    """
    best = Peak.joined(peaks).union().value
    _, clusters = np.unique(layer.clusters[layer.places(DETAIL_QUERIES)], return_inverse=True)
    member = members(clusters, best.device)
    member = member * (member.shape[1] / len(member))

    def mean_squares(vectors: Tensor) -> Tensor:
        """Mean squared norms in every cluster, (..., h, G · q, v) to (..., h · G, C)."""
        found: Tensor = torch.linalg.vecdot(vectors, vectors)
        return found.double().reshape(*vectors.shape[:-3], -1, len(member)) @ member

    squares = torch.stack(
        [mean_squares(peak.value - best) for peak in accumulate(peaks[:-1], Peak.merge)], -1
    )  # (R, h · G, C, J)
    own = mean_squares(best)[..., None].expand(*squares.shape[1:])
    scale = own.mean(1)
    outputs = own / scale[:, None].clamp_min(1e-300)
    return Squares(*to_numpy(squares.permute(1, 2, 0, 3), outputs, scale.sqrt()))
