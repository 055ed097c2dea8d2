"""Errors of one size from few queries, without upward bias.

Queries are the first q ≤ n tokens of a sample of n; Y = Γ_n and G = Γ there. The limit is the control variate: the mean
of Y over all n tokens is estimated by mean_q(Y − G) + mean_n(G), its covariance by cov_q(Y) − cov_q(G) + cov_n(G), so
that only the small difference is left to the queries. What noise remains is measured from two halves of the queries:
their difference, squared and divided by 4, has the expectation of the noise in the squared error of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSums:
    """Sums of the limit over the tokens seen so far: n, Σ G (r, v) and Σ GGᵀ (r, v, v) for each replicate."""

    count: int
    first: Tensor
    second: Tensor

    @classmethod
    def zero(cls, replicates: int, value_dim: int) -> TokenSums:
        """The sums over no tokens."""
        shape = (replicates, value_dim)
        return cls(0, torch.zeros(shape, dtype=torch.float64), torch.zeros((*shape, value_dim), dtype=torch.float64))

    def add(self, limits: Tensor) -> TokenSums:
        """The sums after a block with these limits (r, b, v)."""
        first, second = limits.sum(1), limits.transpose(1, 2) @ limits
        return TokenSums(self.count + limits.shape[1], self.first + first, self.second + second)


@dataclass(frozen=True)
class Moments:
    """Errors of mean and covariance of the outputs: vectors (r, v) and matrices (r, v, v)."""

    mean: Tensor
    covariance: Tensor


def moment_errors(Y: Tensor, G: Tensor, sums: TokenSums, mean: Tensor, covariance: Tensor) -> Moments:
    """Errors of the outputs' mean and covariance over all tokens, estimated from the queries Y, G: (r, q, v)."""
    q, n = Y.shape[1], sums.count
    average = (Y - G).mean(1) + sums.first / n
    limit_mean = sums.first / n
    limit_spread = sums.second / n - limit_mean[:, :, None] * limit_mean[:, None, :]
    # Normalised to be unbiased for the covariance of all n tokens, and equal to it when the queries are all of them.
    scale = (n - 1) / n / max(q - 1, 1)
    spread = (_scatter(Y) - _scatter(G)) * scale + limit_spread
    return Moments(average - mean, spread - covariance)


def _operator_norm(symmetric: Tensor) -> Tensor:
    """Largest singular value of symmetric matrices (r, v, v), which is their largest |eigenvalue|: (r,)."""
    values: Tensor = torch.linalg.eigvalsh(symmetric)
    return values[:, (0, -1)].abs().amax(-1)


def _scatter(X: Tensor) -> Tensor:
    """Sum of centred outer products over the queries: (r, q, v) to (r, v, v)."""
    centred = X - X.mean(1, keepdim=True)
    return centred.transpose(1, 2) @ centred


def replicate_errors(
    Y: Tensor, G: Tensor, sums: TokenSums, mean: Tensor, covariance: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Error norms of each replicate, and the expected noise in the squares of those that few queries make noisy.

    Returns
    -------
    errors : name -> (r,)
        `mean` |·|, `covariance` ‖·‖_F, `covariance_operator` ‖·‖₂, `output` root mean square over the queries.
    noise : name -> (r,)
        Subtract from the square of `mean` or `covariance` to be free of bias (for the operator norm it is a bound).
        Zero when the queries are all the tokens.
    """
    whole = moment_errors(Y, G, sums, mean, covariance)
    errors = {
        "mean": whole.mean.norm(dim=-1),
        "covariance": torch.linalg.matrix_norm(whole.covariance),
        "covariance_operator": _operator_norm(whole.covariance),
        "output": (Y - G).square().sum(-1).mean(-1).sqrt(),
    }
    even, odd = (moment_errors(Y[:, k::2], G[:, k::2], sums, mean, covariance) for k in (0, 1))
    left_out = (1 - Y.shape[1] / sums.count) / 4  # queries are drawn without replacement from the n tokens
    gap = even.covariance - odd.covariance
    noise = {
        "mean": (even.mean - odd.mean).square().sum(-1) * left_out,
        "covariance": gap.square().sum((-1, -2)) * left_out,
        "covariance_operator": _operator_norm(gap).square() * left_out,
    }
    return errors, noise
