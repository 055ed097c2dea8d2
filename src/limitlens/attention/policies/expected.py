"""Key policy that keeps keys of largest expected attention under Gaussian queries (Devoto et al. 2025)."""

import torch
from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms

LAW = 256  # number of last queries from which the mean and covariance of later queries are estimated
FUTURE = 512  # number of later positions over which rotations are averaged


class Expected(KeyPolicy):
    """Keep the keys of largest expected attention weight times value norm, as if queries were Gaussian.

    For q ~ N(μ, Σ), E e^{<q,k>} = e^{<μ,k> + <k,Σk>/2} (proved). Real queries are not Gaussian, so this is a heuristic.
    With rotary positions μ and Σ are those of R̄ q, for queries q before rotation and R̄ the mean rotation over the next
    `FUTURE` positions, as in kvpress's `ExpectedAttentionPress` (which takes all queries but the first four, not the
    last `LAW`, and leaves the first four keys out of the softmax).
    """

    name = "expected"
    label = "expected attention under the law of queries"
    needs_past = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key: E e^{<q,k>}, normalised over keys, averaged over query heads, times the value norm |v|."""
        query = inputs.last_queries(LAW, self.name)
        if inputs.frequencies is not None:
            query = future_queries(query, inputs.frequencies, inputs.key.shape[-2])
        mean = query.mean(-2, keepdim=True)
        apart, key = query - mean, inputs.key
        half = apart.mT @ apart / (2 * query.shape[-2])  # half the covariance, (..., g, k, k)
        moved = (key @ half.transpose(-3, -2).flatten(-2)).view(*key.shape[:-1], -1, key.shape[-1])  # (..., n, g, k)
        exponent = (moved.add_(mean.transpose(-3, -2)) * key[..., None, :]).sum(-1).mT  # (..., g, n)
        weight: Tensor = exponent.softmax(-1).mean(-2) * norms(inputs.value)
        return weight[None, ..., None, :]


def future_queries(query: Tensor, frequencies: Tensor, context: int) -> Tensor:
    """Rotated queries (..., p, k) of the last positions of a context, moved to the mean of the next positions.

    A query at position s is rotated by the mean over t = context, ..., context + `FUTURE` − 1 of the rotations from
    s to t; `frequencies` (r,) are the angles per token of the pairs of dimensions (i, i + r).
    """
    pairs, theta = len(frequencies), frequencies.double()
    here = torch.arange(context - query.shape[-2], context, device=theta.device)
    there = torch.arange(context, context + FUTURE, device=theta.device)
    mean = torch.polar(torch.ones_like(theta), there[:, None] * theta).mean(0)
    turn = (mean * torch.polar(torch.ones_like(theta), -here[:, None] * theta)).to(torch.complex64)
    turned = torch.complex(query[..., :pairs], query[..., pairs : 2 * pairs]) * turn
    return torch.cat([turned.real, turned.imag, query[..., 2 * pairs :]], -1)
