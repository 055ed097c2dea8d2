"""Attention over sets of tokens, in a form that can be merged.

A state holds the log-sum-exp of the scores and the attention output, for a batch of queries. The states of two disjoint
sets of tokens merge exactly, in any order (docs/the-merge.md):

    lse = log(e^{lse₁} + e^{lse₂}),    output = e^{lse₁ − lse} output₁ + e^{lse₂ − lse} output₂.

The log-sum-exps at q and 2q give the effective number of tokens, 1/Σw² = e^{2 lse(q) − lse(2q)}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


class Batch:
    """Base class of dataclasses whose fields are tensors with the same leading (batch) axes."""

    def tensors(self) -> dict[str, Tensor]:
        """Fields by name as contiguous tensors, for a safetensors file; `cls(**tensors)` restores the object."""
        return {name: tensor.contiguous() for name, tensor in vars(self).items()}

    @classmethod
    def joined(cls, parts: Sequence[Self], axis: int = 0) -> Self:
        """Concatenate batches of the same class along one of their batch axes."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(torch.cat(column, axis) for column in columns))

    def __getitem__(self, index: Any) -> Self:
        return type(self)(*(tensor[index] for tensor in vars(self).values()))


@dataclass(frozen=True)
class State(Batch):
    """Softmax attention of m queries over a set of tokens, in float64; merges exactly with that over another set."""

    count: Tensor  # (...): number of tokens in the set; `...` are batch axes
    lse: Tensor  # (..., m): log-sum-exp of the scores; −inf for the empty set
    output: Tensor  # (..., m, v): attention output; 0 for the empty set

    @classmethod
    def empty(
        cls, batch: tuple[int, ...], queries: int, value_dim: int, *, device: str | torch.device = "cpu"
    ) -> State:
        """Attention over no tokens, with batch axes `batch`; merging it changes no other state."""
        lse = torch.full((*batch, queries), float("-inf"), dtype=torch.float64, device=device)
        return cls(torch.zeros(batch, dtype=torch.int64, device=device), lse, lse.new_zeros(*lse.shape, value_dim))

    def merge(self, other: State) -> State:
        """Attention over the union of this state's tokens and those of `other`, which must be disjoint."""
        lse = torch.logaddexp(self.lse, other.lse)
        share = torch.exp(other.lse - lse.masked_fill(torch.isneginf(lse), 0.0))  # 0 if both are empty
        share = share[..., None].to(self.output.dtype)
        return State(self.count + other.count, lse, torch.lerp(self.output, other.output, share))

    def union(self) -> State:
        """Attention over the union of the disjoint token sets along the first batch axis; not all may be empty."""
        shares = torch.softmax(self.lse, 0)[..., None]
        if self.lse.device.type != "cpu":
            return State(self.count.sum(0), self.lse.logsumexp(0), (shares * self.output).sum(0))
        output = torch.zeros_like(self.output[0])
        for share, one in zip(shares, self.output, strict=True):  # one at a time, so that the sum stays in the cache
            output.addcmul_(share, one)
        return State(self.count.sum(0), self.lse.logsumexp(0), output)

    def thinned(self, share: Tensor) -> State:
        """States (shares, ...) as if only a `share` of the tokens existed: log(share) is added to the log-sum-exps."""
        shift = share.log().reshape(-1, *(1,) * self.lse.ndim)
        counts = (share.reshape(-1, *(1,) * self.count.ndim) * self.count).round().to(self.count.dtype)
        return State(counts, self.lse + shift, self.output.expand(len(share), *self.output.shape))


@dataclass(frozen=True)
class Peak(Batch):
    """Largest score of each query over a set of tokens, and the value of that token (hardmax attention); mergeable."""

    score: Tensor  # (..., m)
    value: Tensor  # (..., m, v)

    @classmethod
    def empty(cls, batch: tuple[int, ...], queries: int, value_dim: int, *, like: Tensor) -> Peak:
        """Result for no tokens (score −∞, value 0), on the device and with the precision of the tensor `like`."""
        score = like.new_full((*batch, queries), float("-inf"))
        return cls(score, like.new_zeros(*batch, queries, value_dim))

    @classmethod
    def of(cls, parts: Iterable[Tensor], value: Tensor) -> Peak:
        """Largest score of m queries over n ≥ 1 tokens, and the value (..., n, v) of that token; the first wins a tie.

        `parts` are the scores of consecutive blocks of tokens, each (..., m, tokens of the block).
        """
        found: tuple[Tensor, Tensor] | None = None
        start = 0
        for scores in parts:
            # NumPy's argmax is eight times as fast as torch's on a CPU.
            cpu = scores.device.type == "cpu"
            place = (torch.from_numpy(scores.numpy().argmax(-1)) if cpu else scores.argmax(-1))[..., None]
            best = scores.gather(-1, place), place + start
            if found is not None:
                better = best[0] > found[0]
                best = torch.where(better, best[0], found[0]), torch.where(better, best[1], found[1])
            found = best
            start += scores.shape[-1]
        assert found is not None
        score, place = found
        if value.device.type == "cpu":  # index_select copies whole rows, which is faster
            batch, (tokens, width) = place.shape[:-2], value.shape[-2:]
            rows = place[..., 0] + tokens * torch.arange(batch.numel()).reshape(*batch, 1)
            chosen = value.reshape(-1, width).index_select(0, rows.flatten())
            return cls(score[..., 0], chosen.reshape(*rows.shape, width))
        return cls(score[..., 0], value.gather(-2, place.expand(*place.shape[:-1], value.shape[-1])))

    def union(self) -> Peak:
        """Largest scores over the union of the token sets along the first batch axis; the first set wins a tie."""
        score, best = self.score.max(0, keepdim=True)
        return Peak(score[0], self.value.gather(0, best[..., None].expand(1, *self.value.shape[1:]))[0])

    def merge(self, other: Peak) -> Peak:
        """Largest scores over the union of two sets of tokens; on a tie this object wins over `other`."""
        better = other.score > self.score
        score = torch.where(better, other.score, self.score)
        return Peak(score, torch.where(better[..., None], other.value, self.value))
