"""Critical inverse temperatures on a GPU: `statistics.gap_counting`, for all rows of scores and all sizes at once.

On a CPU rows that are solved are left out of the next step; a GPU would have to be waited for to know them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import array_like
from limitlens.statistics.gap_counting import CLOSE, KEYS, STEPS

_BLIND = 10  # Newton's steps before the device is asked whether more are needed: on real heads these suffice


def device_rows(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """The critical factor of each row of scores (..., N) among its first tokens, as many as each size: (J, ...)."""
    rows = scores.reshape(-1, scores.shape[-1])
    size = array_like(scores, np.asarray(sizes))[:, None]
    beyond = torch.arange(rows.shape[1], device=scores.device) >= size  # (J, N)
    others = beyond.sum(-1, keepdim=True)  # they count as ties, and are taken off again
    best = torch.stack([rows[:, :n].amax(-1) for n in sizes])
    gaps = (best[..., None] - rows).masked_fill(beyond[:, None], 0.0)  # (J, rows, N)
    tied = ((gaps <= 0).sum(-1) - others >= KEYS) & (size > KEYS)
    beta = torch.zeros(tied.shape, dtype=torch.float64, device=scores.device)
    open_rows = ~tied & (size > KEYS)
    for turn in range(1, STEPS + 1):
        weight = torch.exp(-beta[..., None].to(gaps.dtype) * gaps)
        mass = weight.sum(-1, dtype=torch.float64) - others
        step = torch.log(mass / KEYS) * mass / torch.linalg.vecdot(weight, gaps)
        beta = torch.where(open_rows, beta + step, beta)
        open_rows = open_rows & (step > CLOSE * beta)
        if turn % _BLIND == 0 and not bool(open_rows.any()):
            break
    return beta.masked_fill(tied, float("inf")).reshape(len(sizes), *scores.shape[:-1])
