"""Means and covariances of vectors that stream by."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Mean and covariance of vectors (heads, d) seen in blocks.

    Sums within a block are float32, sums of these float64. Vectors are taken relative to a rough mean that is given, so
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
        centred = (rows - self.shift).transpose(0, 1)
        total, products = centred.sum(1), centred.mT @ centred  # before anything is changed: memory may run out here
        self.count += rows.shape[0]
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
        """Shape (heads, d, d), divided by the number of vectors; positive semi-definite whatever was rounded."""
        values, axes = self.spectrum()
        return (axes * values[:, None]) @ axes.mT

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the covariance in increasing order, (heads, d), and its axes as columns, (heads, d, d)."""
        mean = self.total / self.count
        raw = self.products / self.count - mean[:, :, None] * mean[:, None, :]
        values, axes = torch.linalg.eigh((raw + raw.mT) / 2)
        return values.clamp_min(0), axes
