"""Cells of a layer on a GPU: all that a block brings to them attended in one launch and merged at once.

On a CPU cells are attended one by one, so that each stays in cache; on a GPU a launch for each would leave it idle.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import split
from limitlens.attention.state import Peak, State
from limitlens.sampling.placement import Hand, sent


class DeviceCells:
    """States (cells, Hkv, G · m) and peaks (cells, Hkv, G · q), which grow in place.

    They are of the streamed cells, and of all special tokens, which come last.
    """

    def __init__(self, query: Tensor, detail: Tensor, cells: int, value: Tensor, precision: split.Precision) -> None:
        heads, m, v = query.shape[0], query.shape[1], value.shape[-1]
        self.precision = precision
        self.query, self.detail = split.asked(query), detail  # which of its rows are detail queries, (G · q,)
        self.states = State.empty((cells, heads), m, v, device=query.device)
        self.peaks = Peak.empty((cells, heads), len(detail), v, like=value)

    def take(self, hand: Hand, spans: Tensor, special: tuple[int, int], key: Tensor, value: Tensor) -> None:
        """Attend to what has waited for every cell of a hand (cells, 3), and for that of the special tokens.

        Keys and values are (n, Hkv, ·).
        """
        heads, device = self.states.lse.shape[1], key.device
        cells = torch.cat((spans, sent(np.array([[len(self.states.lse) - 1, *special]]), device)))
        head = torch.arange(heads, device=device)
        spans = cells[:, None, 1:].expand(-1, heads, -1)
        jobs = torch.cat((head[None, :, None].expand(len(cells), -1, 2), spans), -1).flatten(0, 1)
        longest = max(stop - start for start, stop in (special, *(span[1:] for span in hand.streamed)))
        tokens = key.transpose(0, 1), value.transpose(0, 1)
        found = split.attend_jobs(
            self.query, tokens[0], tokens[1], jobs, longest=longest, more=True, precision=self.precision
        )
        assert found.peak is not None
        assert found.where is not None
        shape, which = (len(cells), heads), cells[:, 0]
        state = State(
            (cells[:, 2] - cells[:, 1])[:, None].expand(shape),
            found.lse.view(*shape, -1), found.output.view(*shape, *found.output.shape[1:]),
        )  # fmt: skip
        merged = self.states[which].merge(state)
        score, place = (part.view(*shape, -1)[..., self.detail] for part in (found.peak, found.where))
        best = Peak(score.to(value.dtype), value[place, head[None, :, None]])
        better = self.peaks[which].merge(best)
        # Once nothing is left to do that memory may not suffice for.
        for name, tensor in (self.states.tensors() | self.peaks.tensors()).items():
            tensor.index_copy_(0, which, (merged.tensors() | better.tensors())[name])
