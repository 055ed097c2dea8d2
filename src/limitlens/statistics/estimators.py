"""Estimators of the error of attention over n tokens from few queries, without the upward bias by their noise.

The queries are q of the n tokens. At them, Y = Γ_n are outputs over the sample and G = Γ infinite-token limits, which
serve as a control variate. The mean of Y over all n tokens is estimated by mean_q(Y − G) + mean_n(G), its covariance by
cov_q(Y) − cov_q(G) + cov_n(G). Shapes: r replicates (samples), q queries, v output coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.attention.head import Head
from limitlens.errors import Array
from limitlens.measures import Gaussian

LEAST_KEPT = 0.02  # smallest share of a squared error left after its noise is subtracted
_SQUARINGS = 20
FEWEST_REPLICATES = 30  # per coefficient of a control variate; with fewer, one outlier can increase the variance
PARTS = (1, 2, 4)  # the queries are used whole, in halves and in quarters, to extrapolate in their number


@dataclass(frozen=True)
class TokenSums:
    """Sums Σ z and Σ zzᵀ over the tokens of each of r samples, where z is a vector for each token."""

    count: int  # number n of tokens
    first: Tensor  # (r, f)
    second: Tensor  # (r, f, f)

    @classmethod
    def zero(cls, replicates: int, like: Tensor) -> TokenSums:
        """Sums over no tokens, with the dimension f, type and device of `like` (..., f)."""
        dim = like.shape[-1]
        return cls(0, like.new_zeros(replicates, dim), like.new_zeros(replicates, dim, dim))

    def add(self, vectors: Tensor) -> TokenSums:
        """Sums after b more tokens, with vectors (r, b, f), are added."""
        # On a GPU tokens are split into parts, to keep all its cores busy.
        parts = math.gcd(vectors.shape[1], 1 if vectors.device.type == "cpu" else 32)
        pieces = vectors.reshape(len(vectors), parts, -1, vectors.shape[-1])
        second = self.second + (pieces.mT @ pieces).sum(1)
        return TokenSums(self.count + vectors.shape[1], self.first + vectors.sum(1), second)

    def mapped(self, slope: Tensor, offset: Tensor) -> TokenSums:
        """Sums over the same tokens of the vectors slope z + offset."""
        moved = self.first @ slope.T
        cross = moved[:, :, None] * offset
        second = slope @ self.second @ slope.T + cross + cross.mT + self.count * torch.outer(offset, offset)
        return TokenSums(self.count, moved + self.count * offset, second)


@dataclass(frozen=True)
class QuerySums:
    """Sums of centred vectors (r, q, v) and of their products, over each quarter of the queries (every fourth one)."""

    counts: tuple[int, ...]  # queries in each quarter
    centre: Tensor  # (r, v): the mean of the vectors
    first: Tensor  # (r, 4, v) and (r, 4, v, v)
    second: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> QuerySums:
        """Compute the sums from vectors (r, q, v), after subtracting their mean over queries."""
        centre = vectors.mean(1)
        centred = vectors - centre[:, None]
        parts = [centred[:, k :: PARTS[-1]] for k in range(PARTS[-1])]
        sums = ([part.sum(1) for part in parts], [part.mT @ part for part in parts])
        return cls(tuple(part.shape[1] for part in parts), centre, *(torch.stack(of, 1) for of in sums))

    def part(self, k: int, parts: int) -> tuple[Tensor, Tensor]:
        """Mean (r, v) and covariance (r, v, v) of the vectors over part k of the queries, of 1, 2 or 4 `parts`."""
        count, first = sum(self.counts[k::parts]), self.first[:, k::parts].sum(1)
        scatter = self.second[:, k::parts].sum(1) - first[:, :, None] * first[:, None, :] / count
        return self.centre + first / count, scatter / max(count - 1, 1)


def norm_by_squaring(symmetric: Tensor) -> Tensor:
    """Largest absolute eigenvalue (r,) of symmetric matrices (r, v, v) by repeated squaring, which suits a GPU.

    Also valid for a product of two positive definite matrices. The relative error is below 4e-6 for v = 64.
    """
    power = symmetric
    for _ in range(_SQUARINGS // 4):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(torch.finfo(power.dtype).tiny)
        for _ in range(4):  # of norm 1 and largest eigenvalue at least 1/√v: no underflow
            power = power @ power
    longest = power.norm(dim=-2).argmax(-1)
    column = power.gather(-1, longest[:, None, None].expand(-1, power.shape[-2], 1))
    size = column.norm(dim=(-2, -1))
    return torch.where(size > 0, (symmetric @ column).norm(dim=(-2, -1)) / size.clamp_min(1e-300), 0.0)


def replicate_errors(
    Y: Tensor, G: Tensor, limits: QuerySums, sums: TokenSums, mean: Tensor, covariance: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Errors of attention in each of r samples, the noise of few queries in their squares, and errors by fewer queries.

    Outputs `Y` and limits `G` at the queries are (r, q, v). `limits` are sums of G over the queries, `sums` over all n
    tokens. `mean` and `covariance` are the limit's, under the distribution of tokens. The errors (r,) are norms by
    name: "mean" and "covariance" are of the outputs' mean and covariance, "output" is the root mean square over
    queries. The noise (r,) is the bias of the squares of the first two. Errors from fewer queries (r, 2) are means over
    halves and over quarters of the queries; for "mean", means of their squares follow (r, 4).
    """
    q, n, outputs = Y.shape[1], sums.count, QuerySums.of(Y)
    limit_mean = sums.first / n
    limit_spread = sums.second / n - limit_mean[:, :, None] * limit_mean[:, None, :]
    means, squares, covariances = [], [], []
    for parts in PARTS:
        split = parts if q >= 2 * parts else 1  # a covariance needs two queries
        centres, spreads = [], []
        for k in range(split):
            (Y_mean, Y_spread), (G_mean, G_spread) = outputs.part(k, split), limits.part(k, split)
            centres.append(Y_mean - G_mean + limit_mean - mean)
            # Normalised to be unbiased for the covariance over all n tokens, and equal to it if all are queries.
            spreads.append((Y_spread - G_spread) * ((n - 1) / n) + limit_spread - covariance)
        centre = torch.stack(centres)
        means.append(centre.norm(dim=-1).mean(0))
        squares.append(centre.square().sum(-1).mean(0))
        covariances.append(torch.linalg.matrix_norm(torch.stack(spreads)).mean(0))
    fewer = {"mean": torch.stack(means[1:] + squares[1:], -1), "covariance": torch.stack(covariances[1:], -1)}
    output = (Y - G).square().sum(-1).mean(-1).sqrt()
    errors = {"mean": means[0], "covariance": covariances[0], "output": output}
    correction = 1 - q / n  # queries are drawn without replacement from the n tokens
    return errors, {name: part * correction for name, part in _noise(Y - G, G).items()}, fewer


def _noise(D: Tensor, G: Tensor) -> dict[str, Tensor]:
    """Variance (r,) of the mean over queries of D, and of YYᵀ − GGᵀ with Y = G + D, for D and G (r, q, v), centred.

    |YYᵀ − GGᵀ|² = 2|G|²|D|² + 2<G,D>² + 4<G,D>|D|² + |D|⁴, without cancellation for small D.
    """
    q = D.shape[1]
    D, G = (part - part.mean(1, keepdim=True) for part in (D, G))
    square, cross = D.square().sum(-1), (G * D).sum(-1)
    single = 2 * G.square().sum(-1) * square + 2 * cross.square() + 4 * cross * square + square.square()
    half = (G.mT @ D + D.mT @ D / 2) / q
    average = (half + half.mT).square().sum((-1, -2))
    variances = {"mean": square.mean(-1), "covariance": (single.mean(-1) - average).clamp_min(0)}
    return {name: variance / max(q - 1, 1) for name, variance in variances.items()}


def denoised(errors: Array, noise: Array | None, fewer: Array, queries: int, sizes: Sequence[int]) -> Array:
    """Remove the bias by few queries from errors: rows (replicates, sizes) whose mean is the mean error without it.

    With q of n queries the noise has a variance proportional to u = 1/q − 1/n. A parabola in u through (E|error|)² with
    all, half and a quarter of the queries, `fewer` (replicates, sizes, 2), is extrapolated to u = 0. If the `noise` in
    the squares is known, and `fewer` has the squares too (4), it is subtracted from E|error|², and only the ratio
    (E|error|)²/E|error|² is extrapolated. The variance of the rows is that of the corrected error. Verified: the error
    of the covariance is 4% to 8% too large before, and within 0.7% after (d = 4, H = 0.4, n ≤ 800, 32 queries).
    """
    norms, weights = np.concatenate((errors[..., None], fewer[..., :2]), -1), _at_no_noise(queries, sizes)
    means, tiny = norms.mean(0), np.finfo(float).tiny
    if noise is None or fewer.shape[-1] < 4:
        square = np.sum(weights * means**2, -1)
        clean = np.sqrt(np.maximum(square, np.maximum(LEAST_KEPT * means[:, 0] ** 2, tiny)))
        return np.asarray(clean + np.sum(weights * means * (norms - means), -1) / clean)
    squares = np.concatenate((errors[..., None] ** 2, fewer[..., 2:]), -1)
    level, of = np.maximum(squares.mean(0), tiny), squares[..., 0] - noise
    square = np.maximum(of.mean(0), np.maximum(LEAST_KEPT * level[:, 0], tiny))
    shape = weights * means**2 / level
    ratio = np.maximum(shape.sum(-1), LEAST_KEPT)
    moved = shape * (2 * (norms - means) / np.maximum(means, tiny) - (squares - level) / level)
    return np.asarray(np.sqrt(square * ratio) * (1 + ((of - of.mean(0)) / square + moved.sum(-1) / ratio) / 2))


def _at_no_noise(queries: int, sizes: Sequence[int]) -> Array:
    """Lagrange weights (sizes, 3) that extrapolate values from all, half and a quarter of the queries to no noise."""
    n = np.asarray(sizes, dtype=float)
    q = np.minimum(queries, n)
    u = np.stack([parts / q - 1 / n for parts in PARTS], -1)
    weights = np.ones_like(u)
    for i, j in permutations(range(len(PARTS)), 2):
        weights[:, i] *= u[:, j] / (u[:, j] - u[:, i])
    return weights


def members(clusters: NDArray[np.intp], device: torch.device) -> Tensor:
    """Indicator matrix (m, C) of the cluster that each of m queries belongs to, from cluster numbers (m,)."""
    return to_device(np.eye(clusters.max() + 1)[clusters], device)


class ClusteredMoments:
    """Squared errors of the mean and of the covariance of attention outputs over m queries, without upward bias.

    Let D = Γ_n − Γ at the queries, Γ the infinite-token limit. The error of the mean is D̄, and that of the covariance
    is the mean of DHᵀ + HDᵀ, H = Γ + D/2, with D and H centred. Queries of one cluster (a window of text) share their
    noise, so squares sum over pairs of queries from different clusters only, and may be negative. The mean's is
    unbiased; the covariance's keeps a relative bias of 1/(number of clusters). `limit` is Γ (..., G · m, v) of G heads.
    """

    def __init__(self, limit: Tensor, clusters: NDArray[np.intp], replicates: int, sizes: int) -> None:
        m, v = len(clusters), limit.shape[-1]
        self.limit = limit.reshape(-1, m, v)
        self.centred = (self.limit - self.limit.mean(1, keepdim=True)).float()
        counts = np.bincount(clusters)
        # (2, heads, C, R, J): squared errors of the mean and of the covariance
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
        """Store the squared errors of some replicates and sizes, from differences Γ_n − Γ (s, r, ..., G · m, v).

        Each cluster of queries gets a jackknife pseudovalue (to first order) of the squared error; NaN if there is one.
        """
        pairs = self._pairs(difference.float().reshape(-1, *self.limit.shape[1:])).double()
        pairs = pairs.reshape(2, *difference.shape[:2], len(self.limit), -1)  # (2, s, r, G, C)
        shares = pairs * (pairs.shape[-1] / self.pairs if self.pairs else float("nan"))
        self.found[..., replicates, sizes] = (2 * shares - shares.mean(-1, keepdim=True)).permute(0, 3, 4, 2, 1)

    def squares(self) -> dict[str, list[Array]]:
        """Squared errors of the outputs' "mean" and "covariance", with weights and with scales for relative errors.

        Shapes are (heads, C, R, J), (heads, C, J) and (heads, J), for C clusters of queries, R replicates and J sizes.
        Weights are 1. Scales are the norms of the limit's mean and covariance.
        """
        spread = self.centred.double()
        norms = (self.limit.mean(1).norm(dim=-1), torch.linalg.matrix_norm(spread.mT @ spread / spread.shape[1]))
        known = torch.ones_like(self.found[0, :, :, 0])
        return {
            name: to_numpy(found, known, norm[:, None].expand(-1, known.shape[-1]))
            for name, found, norm in zip(("mean", "covariance"), self.found, norms, strict=True)
        }

    def _pairs(self, errors: Tensor) -> Tensor:
        """Sums over pairs of queries, one in each cluster and one in another: errors (·, m, v) to (2, ·, C)."""
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
        return torch.stack((mean, 2 * (whole - inner)))


class GaussianControls:
    """Control variates for Gaussian tokens: numbers of mean zero that correlate with the errors of a sample (proved).

    Let x̄ and S be the mean and covariance of the sample, Σ that of the law, Δ = S − Σ, g = VΣA and M = AΣgᵀ. To first
    order the error of the outputs' mean is V (I + ΣA) (x̄ − E x), that of their covariance T(Δ) = VΔM + MᵀΔVᵀ + gΔgᵀ.
    The expected squares of both are known, so each square minus its expectation is a control variate. They remove
    nearly all variance of the mean's error where H = ‖Σ^{1/2} A Σ^{1/2}‖₂ is small, none far beyond H = 1.
    """

    def __init__(self, measure: Gaussian, head: Head, device: torch.device | str = "cpu") -> None:
        known = (measure.covariance, head.A, head.V, measure.mean)
        sigma, A, V, mean = (torch.from_numpy(np.asarray(part)).to(device) for part in known)
        self.mean, self.covariance = mean, sigma
        slope = V @ sigma @ A
        M = A @ sigma @ slope.T
        self.pull = V + slope
        self.terms = ((V, M), (M.T, V.T), (slope, slope.T))
        self.pull_square = float(((self.pull @ sigma) * self.pull).sum())  # n E|V (I + ΣA) (x̄ − E x)|²
        self.spread_square = 0.0  # (n − 1) E‖T(Δ)‖², by inner products, from (n − 1) E ΔCΔ = Σ tr(CΣ) + ΣCᵀΣ
        for (L, R), (left, right) in product(self.terms, repeat=2):
            C = R @ right.T
            self.spread_square += float((L @ (sigma * torch.sum(C * sigma) + sigma @ C.T @ sigma) * left).sum())

    def of(self, sums: TokenSums) -> Tensor:
        """Control variates (r, 2) of r samples, from sums over their tokens; 0 where the expected square is 0."""
        n, average = sums.count, sums.first / sums.count
        found = average.new_zeros(len(average), 2)
        if self.pull_square > 0:
            pull = (average - self.mean) @ self.pull.T
            found[:, 0] = pull.square().sum(-1) * (n / self.pull_square) - 1
        if self.spread_square > 0 and n > 1:
            delta = (sums.second - n * average[:, :, None] * average[:, None, :]) / (n - 1) - self.covariance
            spread = sum(L @ delta @ R for L, R in self.terms)
            found[:, 1] = torch.as_tensor(spread).square().sum((-1, -2)) * ((n - 1) / self.spread_square) - 1
        return found


def controlled(rows: Array, controls: Array) -> Array:
    """Reduce the variance of rows (replicates, sizes) by regression on control variates (replicates, sizes, F).

    Each row is corrected with the fit to all other rows, so its expectation does not change (proved). With fewer than
    30 replicates per coefficient, rows are returned unchanged.
    """
    count, sizes, known = controls.shape
    if not known or count < FEWEST_REPLICATES * (known + 1):
        return rows
    design = np.concatenate((np.ones((sizes, count, 1)), controls.transpose(1, 0, 2)), -1)
    inverse = np.linalg.pinv(design)  # (sizes, F + 1, replicates): column r is (XᵀX)⁻¹xᵣ
    coefficients = inverse @ rows.T[..., None]
    residual = rows.T - (design @ coefficients)[..., 0]
    leverage = np.einsum("jrf,jfr->jr", design, inverse)
    share = residual / np.maximum(1 - leverage, 1e-9)
    without = coefficients[:, 1:] - inverse[:, 1:] * share[:, None]
    return np.asarray(rows - np.einsum("rjf,jfr->rj", controls, without))
