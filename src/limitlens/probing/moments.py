"""Means and covariances of vectors that arrive in blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from limitlens.attention.kernels.split import chunk_sums
from limitlens.sampling.workers import InTurn


class Moments:
    """Mean and covariance of vectors (heads, d) seen in blocks.

    Sums within a chunk are float32, sums of chunks float64. Vectors are taken relative to a rough mean, so that nothing
    cancels.
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
        """The moments of several layers, each of the same number of vectors, as those of one with all their heads."""
        whole = copy.copy(parts[0])
        for name in ("shift", "total", "products"):
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole

    def add(self, rows: Tensor, turn: int | None = None) -> None:
        """Add rows (n, heads, d); forwards that run side by side are added in the order of their turns."""
        sums = [[part.sum(0, dtype=torch.float64) for part in pair] for pair in chunk_sums(rows, self.shift)]

        def add() -> None:  # the sums exist by now: where memory runs out nothing was changed
            self.count += len(rows)
            for total, products in sums:
                self.total += total
                self.products += products

        if turn is None:
            add()
        else:
            self.in_turn(turn, add)

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far."""
        return {"count": self.count, "total": self.total, "products": self.products}

    @property
    def mean(self) -> Tensor:
        """Mean, (heads, d), float64."""
        return self.shift + self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance, (heads, d, d), divided by the number of vectors; positive semi-definite up to rounding."""
        mean = self.total / self.count
        raw = self.products / self.count - mean[:, :, None] * mean[:, None, :]
        return (raw + raw.mT) / 2
