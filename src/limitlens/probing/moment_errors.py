"""Errors of the mean and the covariance of a head's outputs over queries, as published fits on BERT use them.

With D = Γ_n − Γ at the queries, the error of the mean is D̄ and that of the covariance is Δ = mean of DHᵀ + HDᵀ, where
H = Γ + D/2 and both are centred: nothing cancels. The squares |D̄|² and ‖Δ‖²_F of few queries are biased upwards by
noise, which queries of one window share. So only pairs of queries from different windows count: with S_c the sum over
window c,

    |Σ S_c|² − Σ |S_c|² over the number of these pairs

is unbiased for the mean; centring leaves the covariance a relative bias of 1/(number of windows). Single values may be
negative.
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
MIN_SNR = 4.0  # errors below so many standard errors, whose squares may be 0, are not fitted


@dataclass(frozen=True, eq=False)
class Squares:
    """Squared errors of every head of a layer."""

    # (heads, C, R, J): by replicate and cluster of queries; their mean over C clusters is that over all queries. They
    # are errors against the pool, smaller than those against the law by 1 − n/N.
    squares: Array
    outputs: Array  # (heads, C, J): squared size of the limit in each cluster, relative to that over all queries
    scale: Array  # (heads, J): size of the limit, by which errors are divided

    def curve(self, head: int, sizes: Array, **known: Any) -> ErrorCurve:
        """Curve of a head's relative errors; the finite population correction is exact for squares."""
        return ErrorCurve(tuple(map(int, sizes)), self._powers[head], self.outputs[head], **known)

    @cached_property
    def _powers(self) -> Array:
        """Squared relative errors of every head."""
        scale = self.scale[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(scale > 0, self.squares / scale**2, np.nan)

    def of(self, heads: slice) -> Self:
        """Restrict to some heads."""
        return type(self)(*(getattr(self, own.name)[heads] for own in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the errors of several groups of heads."""
        return cls(*(np.concatenate([getattr(part, own.name) for part in parts]) for own in fields(cls)))


def members(clusters: NDArray[np.intp], device: torch.device) -> Tensor:
    """Membership of queries (m,) in clusters as 1 or 0, (m, C)."""
    return to_device(np.eye(clusters.max() + 1)[clusters], device)


class OutputMoments:
    """Errors of the moments of outputs at m queries against their limit (..., G · m, v), sample by sample."""

    def __init__(self, limit: Tensor, clusters: NDArray[np.intp], replicates: int, sizes: int) -> None:
        m, v = len(clusters), limit.shape[-1]
        self.limit = limit.reshape(-1, m, v)
        self.centred = (self.limit - self.limit.mean(1, keepdim=True)).float()
        counts = np.bincount(clusters)
        # `Squares.squares` for each of `MOMENTS`
        self.found = limit.new_empty(2, len(self.limit), len(counts), replicates, sizes, dtype=torch.float64)
        self.pairs = m**2 - int(np.square(counts).sum())
        self.member = members(clusters, limit.device).float()
        self.counts = self.member.sum(0)[:, None]
        # (m,): row of each query's D in a layout where every cluster has s rows of D and then s of Γ; s is the size of
        # the largest cluster rounded up to a multiple of 8, which halves the time of products
        self.most = 8 * -(-int(counts.max()) // 8)
        order, first = np.argsort(clusters, kind="stable"), np.cumsum(counts) - counts
        rows = np.empty(m, np.int64)
        rows[order] = 2 * self.most * clusters[order] + np.arange(m) - first[clusters[order]]
        self.rows = to_device(rows, limit.device)
        self.stacked = self.centred.new_zeros(0)  # that layout, (r · G, C, 2 s, v); padding stays 0

    def add(self, replicates: slice, sizes: slice, difference: Tensor) -> None:
        """Add the differences Γ_n − Γ (s, r, ..., G · m, v) of these sizes and replicates."""
        found = self._squares(difference)
        self.found[..., replicates, sizes] = found.reshape(2, *difference.shape[:2], *found.shape[2:]).permute(
            0, 3, 4, 2, 1
        )

    def squares(self) -> tuple[Squares, ...]:
        """Squared errors of both moments, with the norms of the limit's moments as scales."""
        spread = self.centred.double()
        norms = (self.limit.mean(1).norm(dim=-1), torch.linalg.matrix_norm(spread.mT @ spread / spread.shape[1]))
        alike = torch.ones_like(self.found[0, :, :, 0])  # the moments of the limit count as known
        parts = (
            (found, alike, norm[:, None].expand(-1, found.shape[-1]))
            for found, norm in zip(self.found, norms, strict=True)
        )
        return tuple(Squares(*to_numpy(*part)) for part in parts)

    def _squares(self, difference: Tensor) -> Tensor:
        """Squared errors of both moments, (2, r, G, C); NaN where there is one cluster.

        The value of a cluster is twice the mean over its pairs minus that over all pairs: leaving it out then moves the
        mean over clusters as it moves the squared error, to first order.
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
            self.gram = limits @ limits.mT  # (G, C, s, s): products of the limits, always the same
        stacked = self.stacked[: len(D)]
        stacked.flatten(1, 2).index_copy_(1, self.rows, D)
        own = stacked[:, :, : self.most].sum(2) + self.counts * middle  # (r · G, C, v): sums over clusters
        mean = torch.linalg.vecdot(own, errors.shape[1] * middle - own)
        # Products of D with D and with Γ give those with H = Γ + D/2: summed over all pairs of a cluster,
        # DD HH + DH HD = DD (ΓΓ + 2 DΓ + DD/2) + DΓ ΓD.
        rows = stacked.flatten(0, 1)
        product = rows[:, : self.most] @ rows.mT
        DD, DG = product[..., : self.most], product[..., self.most :]
        HH = torch.add(self.gram, DG.reshape(-1, *self.gram.shape), alpha=2).flatten(0, 2).add_(DD, alpha=0.5)
        inner = torch.addcmul(HH.mul_(DD), DG, DG.mT).sum((-1, -2)).reshape(len(D), clusters)
        found = torch.stack((mean, 2 * (whole - inner))).double().reshape(2, -1, len(self.limit), clusters)
        shares = found * (found.shape[-1] / self.pairs if self.pairs else float("nan"))
        return 2 * shares - shares.mean(-1, keepdim=True)
