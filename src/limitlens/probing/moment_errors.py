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
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.errors import Array
from limitlens.statistics.error_curve import ErrorCurve

MOMENTS = ("mean", "covariance")
MIN_SNR = 4.0  # an error of fewer standard errors, whose square may be 0, is not fitted


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
        return ErrorCurve(tuple(map(int, sizes)), self._powers[head], self.outputs[head], **known)

    @cached_property
    def _powers(self) -> Array:
        """Squares of relative errors of every head."""
        scale = self.scale[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(scale > 0, self.squares / scale**2, np.nan)

    def of(self, heads: slice) -> Self:
        """Those of some heads."""
        return type(self)(*(getattr(self, own.name)[heads] for own in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The errors of all key/value heads as those of all query heads."""
        return cls(*(np.concatenate([getattr(part, own.name) for part in parts]) for own in fields(cls)))


def members(clusters: NDArray[np.intp], device: torch.device) -> Tensor:
    """Which queries (m,) are in which cluster, (m, C): 1 or 0."""
    return to_device(np.eye(clusters.max() + 1)[clusters], device)


class OutputMoments:
    """Both moments of the outputs of heads at m queries against their limit (..., G · m, v), as samples come."""

    def __init__(self, limit: Tensor, clusters: NDArray[np.intp], replicates: int, sizes: int) -> None:
        m, v = len(clusters), limit.shape[-1]
        self.limit = limit.reshape(-1, m, v)
        self.centred = (self.limit - self.limit.mean(1, keepdim=True)).float()
        counts = np.bincount(clusters)
        # as in `Squares`, of `MOMENTS`
        self.found = limit.new_empty(2, len(self.limit), len(counts), replicates, sizes, dtype=torch.float64)
        self.pairs = m**2 - int(np.square(counts).sum())
        self.member = members(clusters, limit.device).float()
        self.counts = self.member.sum(0)[:, None]
        # (m,): the row of each query's D where every cluster has s rows, as many as the largest, and then s of Γ; in
        # eights, whose products take half as long
        self.most = 8 * -(-int(counts.max()) // 8)
        order, first = np.argsort(clusters, kind="stable"), np.cumsum(counts) - counts
        rows = np.empty(m, np.int64)
        rows[order] = 2 * self.most * clusters[order] + np.arange(m) - first[clusters[order]]
        self.rows = to_device(rows, limit.device)
        self.stacked = self.centred.new_zeros(0)  # those rows, (r · G, C, 2 s, v): what is not written stays 0

    def add(self, replicates: slice, sizes: slice, difference: Tensor) -> None:
        """Take in Γ_n − Γ (s, r, ..., G · m, v) of these sizes and replicates."""
        found = self._squares(difference)
        self.found[..., replicates, sizes] = found.reshape(2, *difference.shape[:2], *found.shape[2:]).permute(
            0, 3, 4, 2, 1
        )

    def squares(self) -> tuple[Squares, ...]:
        """Errors of both moments, relative to the norms of the limit's."""
        spread = self.centred.double()
        norms = (self.limit.mean(1).norm(dim=-1), torch.linalg.matrix_norm(spread.mT @ spread / spread.shape[1]))
        alike = torch.ones_like(self.found[0, :, :, 0])  # the limit's moments are taken for known
        parts = (
            (found, alike, norm[:, None].expand(-1, found.shape[-1]))
            for found, norm in zip(self.found, norms, strict=True)
        )
        return tuple(Squares(*to_numpy(*part)) for part in parts)

    def _squares(self, difference: Tensor) -> Tensor:
        """Squared errors of both moments, (2, r, G, C); NaN where there is one cluster.

        The share of each cluster is twice what its pairs say less once the whole, so that leaving it out moves the mean
        over clusters as it moves the squared error, to first order.
        """
        errors = difference.float().reshape(-1, *self.limit.shape[1:])  # (r · G, m, v)
        middle = errors.mean(1, keepdim=True)
        D = errors - middle
        H = torch.add(self.centred, D.reshape(-1, *self.limit.shape), alpha=0.5).flatten(0, 1)
        product = D.mT @ H
        whole = torch.linalg.vecdot(D @ (product + product.mT), H) @ self.member
        clusters = self.member.shape[1]
        if len(self.stacked) < len(D):
            self.stacked = D.new_zeros(len(D), clusters, 2 * self.most, D.shape[-1])
            limits = self.centred.expand(len(D) // len(self.limit), *self.limit.shape).flatten(0, 1)
            self.stacked.flatten(1, 2).index_copy_(1, self.rows + self.most, limits)
            limits = self.stacked[: len(self.limit), :, self.most :]
            self.gram = limits @ limits.mT  # (G, C, s, s) of the limits alone, whose products are always the same
        stacked = self.stacked[: len(D)]
        stacked.flatten(1, 2).index_copy_(1, self.rows, D)
        own = stacked[:, :, : self.most].sum(2) + self.counts * middle  # (r · G, C, v): sums over clusters
        mean = torch.linalg.vecdot(own, errors.shape[1] * middle - own)
        # Products of D with D and with Γ. Those with H = Γ + D/2 are sums of them, and over all pairs of a cluster
        # DD HH + DH HD comes to DD (ΓΓ + 2 DΓ + DD/2) + DΓ ΓD.
        rows = stacked.flatten(0, 1)
        product = rows[:, : self.most] @ rows.mT
        DD, DG = product[..., : self.most], product[..., self.most :]
        HH = torch.add(self.gram, DG.reshape(-1, *self.gram.shape), alpha=2).flatten(0, 2).add_(DD, alpha=0.5)
        inner = torch.addcmul(HH.mul_(DD), DG, DG.mT).sum((-1, -2)).reshape(len(D), clusters)
        found = torch.stack((mean, 2 * (whole - inner))).double().reshape(2, -1, len(self.limit), clusters)
        shares = found * (found.shape[-1] / self.pairs if self.pairs else float("nan"))
        return 2 * shares - shares.mean(-1, keepdim=True)
