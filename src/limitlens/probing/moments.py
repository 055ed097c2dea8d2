"""Means and covariances of vectors that stream by."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from limitlens.attention.kernels.split import missing, padded, programs
from limitlens.sampling.workers import InTurn

CHUNK = 1024  # rows whose products are summed in float32
BLOCK = 32  # and how many of them at a time on a device
NARROW = 64  # vectors up to this long are multiplied by a program of ours: libraries are slow at many small products


class Moments:
    """Mean and covariance of vectors (heads, d) seen in blocks.

    Sums within a chunk are float32, sums of these float64. Vectors are taken relative to a rough mean that is given, so
    that nothing cancels.
    """

    def __init__(self, rough_mean: Tensor) -> None:
        heads, dim = rough_mean.shape
        self.shift = rough_mean
        self.count = torch.zeros((), dtype=torch.int64)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=rough_mean.device)
        self.products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=rough_mean.device)
        self.in_turn = InTurn()

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Those of the same number of vectors each as of one with the heads of all."""
        whole = copy.copy(parts[0])
        for name in ("shift", "total", "products"):
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole

    def add(self, rows: Tensor, turn: int | None = None) -> None:
        """Take in rows (n, heads, d), whose turn may not have come."""
        if rows.device.type != "cpu" and rows.shape[-1] <= NARROW and missing() is None:
            sums = [self._on_device(rows)]
        else:
            sums = self._in_chunks(rows)
        add = partial(self._add, rows.shape[0], sums)  # nothing is changed before: memory may run out there
        if turn is None:
            add()
        else:
            self.in_turn(turn, add)

    def _add(self, count: int, sums: list[tuple[Tensor, Tensor]]) -> None:
        self.count += count
        for total, products in sums:
            self.total += total
            self.products += products

    def _in_chunks(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Sums and sums of products, float64, of whole chunks and of what is left."""
        chunk = max(CHUNK, 4 * rows.shape[-1])
        whole = len(rows) - len(rows) % chunk
        parts = [rows[:whole].reshape(-1, chunk, *rows.shape[1:]), rows[None, whole:]]
        return [self._sums(part) for part in parts if part.numel()]

    def _on_device(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same by a program of its own."""
        n, heads, d = rows.shape
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        chunks = -(-n // CHUNK)
        first, second = (self.shift.new_empty(chunks, heads, d, *own, dtype=torch.float32) for own in ((), (d,)))
        programs.products[(chunks, heads)](
            rows, self.shift.contiguous(), first, second, n, heads, d, *rows.stride()[:2], CHUNK, padded(d), BLOCK,
            num_warps=2, num_stages=3,
        )  # fmt: skip
        return first.sum(0, dtype=torch.float64), second.sum(0, dtype=torch.float64)

    def _sums(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sums and sums of products of rows (chunks, n, heads, d), float64."""
        chunks, n, heads, dim = rows.shape
        # Heads before rows, so that every product reads its own in one piece.
        centred = torch.sub(rows.transpose(1, 2), self.shift[:, None], out=self.shift.new_empty(chunks, heads, n, dim))
        return centred.sum(2).sum(0, dtype=torch.float64), (centred.mT @ centred).sum(0, dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """What was gathered so far."""
        return {"count": self.count, "total": self.total, "products": self.products}

    @property
    def mean(self) -> Tensor:
        """Shape (heads, d), float64."""
        return self.shift + self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Shape (heads, d, d), divided by the number of vectors; positive semi-definite but for what was rounded."""
        mean = self.total / self.count
        raw = self.products / self.count - mean[:, :, None] * mean[:, None, :]
        return (raw + raw.mT) / 2
