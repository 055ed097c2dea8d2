"""Errors of one size from few queries, without upward bias.

Queries are the first q ≤ n tokens of a sample of n; Y = Γ_n and G = Γ there. The limit is the control variate: the mean
of Y over all n tokens is estimated by mean_q(Y − G) + mean_n(G), its covariance by cov_q(Y) − cov_q(G) + cov_n(G), so
that only the small difference is left to the queries. What noise remains is measured by halving the queries: the
difference of two halves, squared and divided by 4, has the expectation of the noise in the squared error of the whole.
For a mean over queries the average over all ways to halve them is known: it is the variance of one query over their
number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array

LEAST_KEPT = 0.02  # of a squared error when its noise is taken out: beyond, there is nothing to see


@dataclass(frozen=True)
class TokenSums:
    """Sums over the tokens seen so far of vectors z, their limits or themselves: n, Σ z (r, f) and Σ zzᵀ (r, f, f)."""

    count: int
    first: Tensor
    second: Tensor

    @classmethod
    def zero(cls, replicates: int, dim: int) -> TokenSums:
        """The sums over no tokens."""
        shape = (replicates, dim)
        return cls(0, torch.zeros(shape, dtype=torch.float64), torch.zeros((*shape, dim), dtype=torch.float64))

    def add(self, vectors: Tensor) -> TokenSums:
        """The sums after a block of these (r, b, f)."""
        first, second = vectors.sum(1), vectors.mT @ vectors
        return TokenSums(self.count + vectors.shape[1], self.first + first, self.second + second)

    def mapped(self, slope: Tensor, offset: Tensor) -> TokenSums:
        """The sums of slope z + offset."""
        moved = self.first @ slope.T
        cross = moved[:, :, None] * offset
        second = slope @ self.second @ slope.T + cross + cross.mT + self.count * torch.outer(offset, offset)
        return TokenSums(self.count, moved + self.count * offset, second)


def moment_errors(Y: Tensor, G: Tensor, sums: TokenSums, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Errors (r, v) and (r, v, v) of the outputs' mean and covariance over all tokens, from the queries Y, G (r, q, v).

    Sums are of the limits at all tokens.
    """
    q, n = Y.shape[1], sums.count
    limit_mean = sums.first / n
    average = (Y - G).mean(1) + limit_mean
    limit_spread = sums.second / n - limit_mean[:, :, None] * limit_mean[:, None, :]
    # Normalised to be unbiased for the covariance of all n tokens, and equal to it when the queries are all of them.
    scale = (n - 1) / n / max(q - 1, 1)
    spread = (_scatter(Y) - _scatter(G)) * scale + limit_spread
    return average - mean, spread - covariance


def _operator_norm(symmetric: Tensor) -> Tensor:
    """Largest singular value of symmetric matrices (r, v, v), which is their largest |eigenvalue|: (r,)."""
    values: Tensor = torch.linalg.eigvalsh(symmetric)
    return values[:, (0, -1)].abs().amax(-1)


def _scatter(X: Tensor) -> Tensor:
    """Sum of centred outer products over the queries: (r, q, v) to (r, v, v)."""
    centred = X - X.mean(1, keepdim=True)
    return centred.mT @ centred


def replicate_errors(
    Y: Tensor, G: Tensor, sums: TokenSums, mean: Tensor, covariance: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Error norms of each replicate by name, and the noise expected in the squares of those few queries make noisy.

    The norms (r,) are `mean` |·|, `covariance` ‖·‖_F, `covariance_operator` ‖·‖₂, and `output`, root mean square over
    the queries. The noise, subtracted from the square of `mean` or `covariance`, takes its bias away (for the operator
    norm it is a bound); it is 0 when the queries are all the tokens.
    """
    centre, spread = moment_errors(Y, G, sums, mean, covariance)
    errors = {
        "mean": centre.norm(dim=-1),
        "covariance": torch.linalg.matrix_norm(spread),
        "covariance_operator": _operator_norm(spread),
        "output": (Y - G).square().sum(-1).mean(-1).sqrt(),
    }
    left_out = 1 - Y.shape[1] / sums.count  # queries are drawn without replacement from the n tokens
    even, odd = (moment_errors(Y[:, k::2], G[:, k::2], sums, mean, covariance)[1] for k in (0, 1))
    noise = {name: part * left_out for name, part in _noise(Y - G, G).items()}
    noise["covariance_operator"] = _operator_norm(even - odd).square() * (left_out / 4)
    return errors, noise


def _noise(D: Tensor, G: Tensor) -> dict[str, Tensor]:
    """Variance (r,) of the mean over queries of D, and of YYᵀ − GGᵀ for Y = G + D, both centred; all (r, q, v).

    |YYᵀ − GGᵀ|² = 2|G|²|D|² + 2<G,D>² + 4<G,D>|D|² + |D|⁴, in which nothing cancels when D is small.
    """
    q = D.shape[1]
    D, G = (part - part.mean(1, keepdim=True) for part in (D, G))
    square, cross = D.square().sum(-1), (G * D).sum(-1)
    single = 2 * G.square().sum(-1) * square + 2 * cross.square() + 4 * cross * square + square.square()
    half = (G.mT @ D + D.mT @ D / 2) / q
    average = (half + half.mT).square().sum((-1, -2))
    return {
        "mean": square.mean(-1) / max(q - 1, 1),
        "covariance": (single.mean(-1) - average).clamp_min(0) / max(q - 1, 1),
    }


def kept_share(errors: Array, noise: Array) -> Array:
    """The share of the mean squared error that is not query noise: rows (replicates, sizes) to (sizes,)."""
    squared = np.maximum((errors**2).mean(0), np.finfo(float).tiny)
    return np.asarray(np.clip(1 - noise.mean(0) / squared, LEAST_KEPT, 1))


def denoised(errors: Array, noise: Array) -> Array:
    """Rows (replicates, sizes) whose mean is the mean error freed of query noise.

    An error whose square is too large by the share s of itself is too large by 1/√(1 − s). Each row also carries what
    it did to that factor, to first order, so that the scatter of rows is that of the corrected error.
    """
    squared, kept = np.maximum((errors**2).mean(0), np.finfo(float).tiny), kept_share(errors, noise)
    swing = ((1 - kept) * (errors**2 - squared) - (noise - noise.mean(0))) / (2 * kept * squared)
    return np.asarray(np.sqrt(kept) * (errors + errors.mean(0) * swing))
