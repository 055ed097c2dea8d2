"""What earlier queries tell of the weight each key will have: two guesses, each a choice of keys.

Both are of the mean weight of a key over queries and query heads, times the norm of its value: a large weight on a
small value moves no output.
"""

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool1d

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms
from limitlens.errors import InputError

WINDOW = 64  # last queries whose attention is added up
SMOOTH = 7  # keys over which it is smoothed: neighbours of a key that was needed are needed together
LAW = 256  # last queries whose mean and covariance stand for the law of those to come


class _Past(KeyPolicy):
    needs_past = True

    def weight(self, sight: PolicyInput) -> Tensor:
        """The weight each key is guessed to have, (..., n), all positive."""
        raise NotImplementedError

    def past(self, sight: PolicyInput, number: int) -> Tensor:
        """The last queries, (..., g, p, k)."""
        if sight.past is None:
            raise InputError(f"no earlier queries were given; {self.name!r} chooses by them, so read the context first")
        return sight.past[..., -number:, :]

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """The weight itself."""
        return self.weight(sight)[None, ..., None, :]


class Accumulated(_Past):
    """The keys that drew most of the attention of the last queries."""

    name = "accumulated"
    words = "attention of the last queries"

    def weight(self, sight: PolicyInput) -> Tensor:
        """Mean of softmax weights over the last queries that see a key, smoothed over neighbours, times |v|."""
        query, there = self.past(sight, WINDOW), sight.key.shape[-2]
        place = torch.arange(there, device=query.device)
        seen = place <= place[there - query.shape[-2] :, None]
        weight = sight.score(query).masked_fill(~seen, float("-inf")).softmax(-1).mean(-3).sum(-2) / seen.sum(-2)
        smooth = avg_pool1d(weight.flatten(0, -2)[:, None], SMOOTH, 1, SMOOTH // 2, count_include_pad=False)
        return smooth.view_as(weight) * norms(sight.value)


class Expected(_Past):
    """The keys that draw most attention in expectation, under the Gaussian law of the last queries.

    With q ~ N(μ, Σ) the mean of e^{<q,k>} is e^{<μ,k> + <k,Σk>/2} (exact for Gaussian queries: proved; real queries are
    not, so as a guess at their weights it is a heuristic).
    """

    name = "expected"
    words = "expected attention under the law of queries"

    def weight(self, sight: PolicyInput) -> Tensor:
        """Normalised over the keys for each query head, averaged over these, times |v|."""
        query = self.past(sight, LAW)
        mean = query.mean(-2, keepdim=True)
        spread = (query - mean) @ sight.key[..., None, :, :].mT  # (..., g, p, n): no covariance has to be formed
        exponent = (mean @ sight.key[..., None, :, :].mT)[..., 0, :] + spread.square().mean(-2) / 2
        return exponent.softmax(-1).mean(-2) * norms(sight.value)
