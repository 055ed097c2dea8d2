"""Cells of a layer on a GPU: all that a block brings to them attended in one launch and merged at once.

On a CPU cells are attended one by one, so that each stays in cache; on a GPU a launch for each would leave it idle.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels import split
from limitlens.attention.state import Peak, State
from limitlens.sampling.assignment import LEFT_OVER, Assignment, BlockAssignment

ROWS = 128  # that a program puts


class DeviceCells:
    """States (cells, Hkv, G · m) and peaks (cells, Hkv, G · q), which grow in place.

    They are of the streamed cells, and of all special tokens, which come last.
    """

    def __init__(self, query: Tensor, detail: Tensor, cells: int, value: Tensor, precision: split.Precision) -> None:
        heads, m, v = query.shape[0], query.shape[1], value.shape[-1]
        self.precision = precision
        self.query, self.detail = split.asked(query), detail  # which of its rows are detail queries, (G · q,)
        self.states = State.empty((cells, heads), m, v, device=query.device)
        self.peaks = Peak.empty((cells, heads), len(detail), v, like=query)
        self.sizes = query.new_zeros(2, heads, dtype=torch.float32)  # the largest |number| of keys and values that wait

    @classmethod
    def joined(cls, parts: Sequence[DeviceCells]) -> DeviceCells:
        """Those of several layers as of one with the heads of all."""
        whole = copy.copy(parts[0])
        names = ("hi", "lo", "unit")
        whole.query = split.Halves(*(torch.cat([getattr(part.query, name) for part in parts]) for name in names))
        whole.states = State.joined([part.states for part in parts], 1)
        whole.peaks = Peak.joined([part.peaks for part in parts], 1)
        return whole

    def put(self, stores: Sequence[Tensor], tokens: Sequence[Tensor], rows: Tensor, special: Tensor, base: int) -> None:
        """Keys and values (n, Hkv, ·) to rows (n,) of their stores, and the special ones to others, from `base` on."""
        for store, given, size in zip(stores, tokens, self.sizes, strict=True):
            n, heads, d = given.shape
            own = given if given.stride()[1:] == (d, 1) else given.contiguous()
            split.programs.put[(-(-(n + len(special)) // ROWS), heads)](
                own, store, size, rows, special, n, len(special), base, heads, d, own.stride(0),
                split.padded(d), ROWS,
            )  # fmt: skip

    def take(self, hand: BlockAssignment, spans: Tensor, special: tuple[int, int], key: Tensor, value: Tensor) -> None:
        """Attend to what has waited for every cell of a hand (cells, 3), and for that of the special tokens.

        Keys and values are (n, Hkv, ·), as they were put.
        """
        cells = torch.cat((spans, to_device(np.array([[len(self.states.lse) - 1, *special]]), key.device)))
        longest = max(stop - start for start, stop in (special, *(span[1:] for span in hand.streamed)))
        which, (state, best) = cells[:, 0], self.attend(cells[:, 1:], longest, key, value, sizes=self.sizes)
        merged, better = self.states[which].merge(state), self.peaks[which].merge(best)
        # Once nothing is left to do that memory may not suffice for.
        for name, tensor in (self.states.tensors() | self.peaks.tensors()).items():
            tensor.index_copy_(0, which, (merged.tensors() | better.tensors())[name])
        self.sizes.zero_()

    def attend(
        self, spans: Tensor, longest: int, key: Tensor, value: Tensor, heads: slice = slice(None),
        sizes: Tensor | None = None,
    ) -> tuple[State, Peak]:  # fmt: skip
        """States and peaks (cells, h, ·) of keys and values (n, Hkv, ·) from start to stop, for spans (cells, 2)."""
        head = torch.arange(key.shape[1], device=key.device)[heads]
        shape = (len(spans), len(head))
        jobs = torch.cat((head[:, None].expand(*shape, 2), spans[:, None].expand(*shape, 2)), -1).flatten(0, 1)
        tokens = key.transpose(0, 1), value.transpose(0, 1)
        found = split.attend_jobs(
            self.query, tokens[0], tokens[1], jobs, longest=longest, more=1, precision=self.precision, sizes=sizes
        )
        assert found.peak is not None
        assert found.where is not None
        count = (spans[:, 1] - spans[:, 0])[:, None].expand(shape)
        state = State(count, found.lse.view(*shape, -1), found.output.view(*shape, *found.output.shape[1:]))
        score, place = (part.view(*shape, -1)[..., self.detail] for part in (found.peak, found.where))
        return state, Peak(score.float(), value[place, head[None, :, None]].float())

    def steps(self, deck: Assignment, key: Tensor, value: Tensor, heads: slice) -> list[tuple[State, Peak]]:
        """Those of every step of the replicates (R, h, ·), of kept tokens (slots, Hkv, ·) too; of no cell at last."""
        start, filled, device = deck.start[deck.kept], deck.filled[deck.kept], key.device
        spans = to_device(np.stack((start, start + filled), 1), device)
        states, peaks = self.attend(spans, int(filled.max()), key, value, heads)
        state, peak = State.joined([self.states[:, heads], states]), Peak.joined([self.peaks[:, heads], peaks])
        beside = len(self.states.lse) + np.cumsum(deck.kept).reshape(deck.kept.shape) - 1
        steps = to_device(np.ascontiguousarray(np.where(deck.kept, beside, deck.number).T), device)
        left_over = slice(deck.states - LEFT_OVER, deck.states)
        return [(state[row], peak[row]) for row in (*steps, left_over)]
