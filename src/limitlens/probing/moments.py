"""Means and covariances of vectors that stream by."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1024  # rows whose products are summed in float32


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

    def add(self, rows: Tensor) -> None:
        """Take in rows (n, heads, d)."""
        chunk = max(CHUNK, 4 * rows.shape[-1])
        whole = len(rows) - len(rows) % chunk
        total, products = torch.zeros_like(self.total), torch.zeros_like(self.products)
        for part in (rows[:whole].reshape(-1, chunk, *rows.shape[1:]), rows[None, whole:]):
            if part.numel():
                shape = (len(part), part.shape[2], part.shape[1], part.shape[3])
                # Heads before rows, so that every product reads its own in one piece.
                centred = torch.sub(part.transpose(1, 2), self.shift[:, None], out=rows.new_empty(shape))
                total += centred.sum(2).sum(0, dtype=torch.float64)
                products += (centred.mT @ centred).sum(0, dtype=torch.float64)
        self.count += rows.shape[0]  # nothing is changed before: memory may run out there
        self.total += total
        self.products += products

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
