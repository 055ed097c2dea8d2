"""Errors of one size from few queries, without upward bias.

Queries are the first q ≤ n tokens of a sample of n; Y = Γ_n and G = Γ there. The limit is the control variate: the mean
of Y over all n tokens is estimated by mean_q(Y − G) + mean_n(G), its covariance by cov_q(Y) − cov_q(G) + cov_n(G), so
that only the small difference is left to the queries. Noise remains, and makes every norm too large. In a squared norm
it is the variance of one query's term over their number (what halving them in all ways gives), and is subtracted. The
norm itself is measured with all queries, halves and quarters of them, and followed to where there is no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array

LEAST_KEPT = 0.02  # of a squared error when its noise is taken out: beyond, there is nothing to see
_SQUARINGS = 20
PARTS = (1, 2, 4)  # into which queries are divided to see what fewer of them do


@dataclass(frozen=True)
class TokenSums:
    """Sums over the tokens seen so far of vectors z, their limits or themselves: n, Σ z (r, f) and Σ zzᵀ (r, f, f)."""

    count: int
    first: Tensor
    second: Tensor

    @classmethod
    def zero(cls, replicates: int, like: Tensor) -> TokenSums:
        """The sums over no tokens, of vectors like these (..., f)."""
        dim = like.shape[-1]
        return cls(0, like.new_zeros(replicates, dim), like.new_zeros(replicates, dim, dim))

    def add(self, vectors: Tensor) -> TokenSums:
        """The sums after a block of these (r, b, f)."""
        first, second = vectors.sum(1), _products(vectors)
        return TokenSums(self.count + vectors.shape[1], self.first + first, self.second + second)

    def mapped(self, slope: Tensor, offset: Tensor) -> TokenSums:
        """The sums of slope z + offset."""
        moved = self.first @ slope.T
        cross = moved[:, :, None] * offset
        second = slope @ self.second @ slope.T + cross + cross.mT + self.count * torch.outer(offset, offset)
        return TokenSums(self.count, moved + self.count * offset, second)


def _products(vectors: Tensor) -> Tensor:
    """Σ zzᵀ of vectors (r, b, f). On a GPU a long sum is cut into parts, without which few of its cores would work."""
    parts = math.gcd(vectors.shape[1], 1 if vectors.device.type == "cpu" else 32)
    pieces = vectors.reshape(len(vectors), parts, -1, vectors.shape[-1])
    return (pieces.mT @ pieces).sum(1) if parts > 1 else vectors.mT @ vectors


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
    if symmetric.device.type == "cpu":
        values: Tensor = torch.linalg.eigvalsh(symmetric)
        return values[:, (0, -1)].abs().amax(-1)
    # Small eigenproblems leave a GPU idle. The longest column x of a high power of M² lies in its leading space, and
    # |M x| / |x| errs by the square of what is left of the others: √v^(1/2²⁰) − 1 < 4e-6 at worst, for v = 64.
    power = symmetric
    for _ in range(_SQUARINGS // 4):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(torch.finfo(power.dtype).tiny)
        for _ in range(4):  # of a matrix of norm 1, whose largest eigenvalue is at least 1/√v: nothing vanishes
            power = power @ power
    longest = power.norm(dim=-2).argmax(-1)
    column = power.gather(-1, longest[:, None, None].expand(-1, power.shape[-2], 1))
    size = column.norm(dim=(-2, -1))
    return torch.where(size > 0, (symmetric @ column).norm(dim=(-2, -1)) / size.clamp_min(1e-300), 0.0)


def _scatter(X: Tensor) -> Tensor:
    """Sum of centred outer products over the queries: (r, q, v) to (r, v, v)."""
    centred = X - X.mean(1, keepdim=True)
    return centred.mT @ centred


def replicate_errors(
    Y: Tensor, G: Tensor, sums: TokenSums, mean: Tensor, covariance: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Error norms of each replicate by name, the noise in their squares, and the norms that fewer queries give.

    The norms (r,) are `mean` |·|, `covariance` ‖·‖_F, `covariance_operator` ‖·‖₂, and `output`, root mean square over
    the queries. The noise, subtracted from the square of `mean` or `covariance`, takes its bias away; it is 0 when the
    queries are all the tokens. The norms of fewer queries (r, 2) are averages over their halves and over their quarters
    (of the operator norm one half and one quarter, since eigenvalues of large matrices cost as much as attention).
    """
    q = Y.shape[1]
    errors = _norms([moment_errors(Y, G, sums, mean, covariance)])
    fewer: dict[str, list[Tensor]] = {name: [] for name in errors}
    for parts in PARTS[1:]:
        split = parts if q >= 2 * parts else 1  # a covariance takes two queries
        found = [moment_errors(Y[:, k::split], G[:, k::split], sums, mean, covariance) for k in range(split)]
        for name, norm in _norms(found).items():
            fewer[name].append(norm)
    left_out = 1 - q / sums.count  # queries are drawn without replacement from the n tokens
    noise = {name: part * left_out for name, part in _noise(Y - G, G).items()}
    errors["output"] = (Y - G).square().sum(-1).mean(-1).sqrt()
    return errors, noise, {name: torch.stack(norms, -1) for name, norms in fewer.items()}


def _norms(errors: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Norms (r,) of errors (r, v) and (r, v, v) of the moments, averaged over the parts they come from."""
    centre, spread = (torch.stack(parts) for parts in zip(*errors, strict=True))
    frobenius, operator = torch.linalg.matrix_norm(spread).mean(0), _operator_norm(spread[0])
    return {"mean": centre.norm(dim=-1).mean(0), "covariance": frobenius, "covariance_operator": operator}


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


def denoised(errors: Array, fewer: Array, queries: int, sizes: Sequence[int]) -> Array:
    """Rows (replicates, sizes) whose mean is the mean norm freed of query noise [V].

    The noise of q of n tokens has a variance proportional to u = 1/q − 1/n. For a Gaussian scalar, and for a vector
    whose norm hardly scatters, (E|error|)² is a straight line in u; otherwise it bends a little. So the parabola
    through its values with all queries, with halves and with quarters of them, `fewer` (replicates, sizes, 2), is
    followed to u = 0. Each row also carries what it did to that, to first order, so that the scatter of rows is that of
    the corrected error. Held against every token as a query, d = 4, H = 0.4, n = 100 to 800, 32 queries: the error of
    the covariance is 4% to 8% too large before, and 0.2% to 0.7% (± 0.4%) after.
    """
    norms = np.concatenate((errors[..., None], fewer), -1)
    means, weights = norms.mean(0), _at_no_noise(queries, sizes)
    square = np.sum(weights * means**2, -1)
    clean = np.sqrt(np.maximum(square, np.maximum(LEAST_KEPT * means[:, 0] ** 2, np.finfo(float).tiny)))
    return np.asarray(clean + np.sum(weights * means * (norms - means), -1) / clean)


def _at_no_noise(queries: int, sizes: Sequence[int]) -> Array:
    """Lagrange's weights (sizes, 3) of values with all queries, halves and quarters of them in that of u = 0."""
    n = np.asarray(sizes, dtype=float)
    q = np.minimum(queries, n)
    u = np.stack([parts / q - 1 / n for parts in PARTS], -1)
    weights = np.ones_like(u)
    for i, j in permutations(range(len(PARTS)), 2):
        weights[:, i] *= u[:, j] / (u[:, j] - u[:, i])
    return weights
