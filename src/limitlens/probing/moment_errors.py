"""Errors of the mean and the covariance of a head's outputs over the queries, as the literature fits them on BERT.

With D = Γ_n − Γ at the queries, the mean errs by D̄ and the covariance by Δ = mean of DHᵀ + HDᵀ, where H = Γ + D/2 and
both are centred: nothing cancels. The squares |D̄|² and ‖Δ‖²_F of few queries are too large by their noise, and queries
of one window share it. So only pairs of queries from different windows are counted: with S_c the sum over window c,

    |Σ S_c|² − Σ |S_c|² over the number of these pairs

is the mean over all ways to take the two factors from two halves of the windows, and unbiased for the mean; centring
leaves the covariance a bias of 1/(number of windows) of what it is. Single numbers may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.curves.error_curve import ErrorCurve
from limitlens.errors import Array

MOMENTS = ("mean", "covariance")
CLEAR = 4  # an error of fewer standard errors, whose square may be 0, is not fitted


@dataclass(frozen=True, eq=False)
class Squares:
    """Squared errors of every head of a layer, in one way to look at its samples."""

    # (heads, C, R, J): of each replicate, such that the mean over C clusters of queries is that over all of them;
    # against the pool, so smaller than against the law by 1 − n/N
    squares: Array
    outputs: Array  # (heads, C, J): the square of what errors are relative to in each cluster, over that of all
    scale: Array  # (heads, J): what errors are relative to, the size of the limit

    def curve(self, head: int, sizes: Array, **known: Any) -> ErrorCurve:
        """The curve of a head's relative errors: for squares the finite pool's correction is exact."""
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.where(self.scale[head] > 0, self.squares[head] / self.scale[head] ** 2, np.nan)
        return ErrorCurve(tuple(int(size) for size in sizes), powers, self.outputs[head], **known)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The errors of all key/value heads as those of all query heads."""
        return cls(*(np.concatenate([getattr(part, own.name) for part in parts]) for own in fields(cls)))


def above_noise(curve: ErrorCurve) -> ErrorCurve:
    """The same curve, whose floor keeps sizes out of its rate where query noise leaves nothing to see."""
    return replace(curve, floor=np.where(curve.error > CLEAR * curve.stderr, curve.floor, np.inf))


class OutputMoments:
    """Both moments of the outputs of G heads at the same m queries, against their limit (G · m, v), as samples come."""

    def __init__(self, limit: Tensor, clusters: NDArray[np.intp], replicates: int, sizes: int) -> None:
        m, v = len(clusters), limit.shape[-1]
        self.limit = limit.reshape(-1, m, v)
        self.centred = (self.limit - self.limit.mean(1, keepdim=True)).float()
        counts = np.bincount(clusters)
        self.found = np.empty((2, len(self.limit), len(counts), replicates, sizes))  # as in `Squares`, of `MOMENTS`
        self.pairs = m**2 - int(np.square(counts).sum())
        # (C, s): the queries of each cluster, filled up with some whose weight is 0
        place = np.arange(counts.max()) + (np.cumsum(counts) - counts)[:, None]
        there = np.arange(counts.max()) < counts[:, None]
        order = np.argsort(clusters, kind="stable")
        self.member = torch.as_tensor(order[np.where(there, place, 0)], device=limit.device)
        self.there = torch.as_tensor(there, device=limit.device, dtype=torch.float32)[..., None]

    def add(self, replicates: slice, j: int, difference: Tensor) -> None:
        """Take in Γ_n − Γ (r, G · m, v) of these replicates at one size."""
        self.found[..., replicates, j] = self._squares(difference).permute(0, 2, 3, 1).cpu()

    def squares(self) -> tuple[Squares, ...]:
        """Errors of both moments, relative to the norms of the limit's."""
        spread = self.centred.double()
        norms = (self.limit.mean(1).norm(dim=-1), torch.linalg.matrix_norm(spread.mT @ spread / spread.shape[1]))
        scales = [np.repeat(np.asarray(norm.cpu())[:, None], self.found.shape[-1], 1) for norm in norms]
        alike = np.ones_like(self.found[0, :, :, 0])  # the limit's moments are taken for known
        return tuple(Squares(found, alike, scale) for found, scale in zip(self.found, scales, strict=True))

    def _squares(self, difference: Tensor) -> Tensor:
        """Squared errors of both moments, (2, r, G, C); NaN where there is one cluster.

        The share of each cluster is twice what its pairs say less once the whole, so that leaving it out moves the mean
        over clusters as it moves the squared error, to first order.
        """
        errors = difference.reshape(len(difference), *self.limit.shape).float()
        D = self._clustered(errors)
        total = D.sum((-3, -2), keepdim=True)
        own = D.sum(-2, keepdim=True)
        mean = (own * (total - own)).sum((-1, -2))
        D = self._clustered(errors - errors.mean(-2, keepdim=True))
        H = self._clustered(self.centred.expand_as(errors)) + D / 2
        product = D.flatten(-3, -2).mT @ H.flatten(-3, -2)
        whole = 2 * ((D.flatten(-3, -2) @ (product + product.mT)).reshape(D.shape) * H).sum((-1, -2))
        cross = D @ H.mT
        inner = 2 * ((D @ D.mT) * (H @ H.mT) + cross * cross.mT).sum((-1, -2))
        found = torch.stack((mean, whole - inner)).double()
        shares = found * (found.shape[-1] / self.pairs if self.pairs else float("nan"))
        return 2 * shares - shares.mean(-1, keepdim=True)

    def _clustered(self, vectors: Tensor) -> Tensor:
        """Vectors (r, G, m, v) by cluster, (r, G, C, s, v), 0 where a cluster has fewer."""
        return vectors[:, :, self.member] * self.there
