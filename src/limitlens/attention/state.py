"""Attention over a set of tokens is a mergeable state.

For a batch of queries, keep the log-sum-exp of the scores and the weighted mean of the values. Two disjoint sets of
tokens merge exactly (docs/the-merge.md):

    lse = log(e^{lse₁} + e^{lse₂}),    output = e^{lse₁ − lse} output₁ + e^{lse₂ − lse} output₂.

The operation is associative and commutative and the empty set is its identity, so streams, checkpoints, cores and
machines are all the same loop. Weights e^{2 score} are those of twice the query, whose `lse` gives the effective number
of tokens, 1/Σw² = e^{2 lse(q) − lse(2q)}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """Softmax attention of m queries over a set of tokens, ready to merge with another set.

    Leading axes (replicates, heads, cells, ...) are batch axes. Numbers are float64.
    """

    count: Tensor  # (...): number of tokens in the set
    lse: Tensor  # (..., m): log-sum-exp of the scores; −inf for the empty set
    output: Tensor  # (..., m, v): attention output; 0 for the empty set

    @classmethod
    def empty(
        cls, batch: tuple[int, ...], queries: int, value_dim: int, *, device: str | torch.device = "cpu"
    ) -> State:
        """The identity of `merge`: attention over no tokens."""
        lse = torch.full((*batch, queries), float("-inf"), dtype=torch.float64, device=device)
        return cls(torch.zeros(batch, dtype=torch.int64, device=device), lse, lse.new_zeros(*lse.shape, value_dim))

    def merge(self, other: State) -> State:
        """The state of the union of two disjoint sets of tokens."""
        lse = torch.logaddexp(self.lse, other.lse)
        there = torch.exp(other.lse - lse.masked_fill(torch.isneginf(lse), 0.0))  # of both empty: 0
        there = there[..., None].to(self.output.dtype)
        return State(self.count + other.count, lse, torch.lerp(self.output, other.output, there))

    @classmethod
    def joined(cls, states: Sequence[State], axis: int = 0) -> State:
        """States one after the other along a batch axis."""
        if len(states) == 1:
            return states[0]
        parts = [state.tensors() for state in states]
        return cls.of({name: torch.cat([part[name] for part in parts], axis) for name in parts[0]})

    def union(self) -> State:
        """The union of the disjoint sets along the first batch axis, not all of them empty."""
        shares = torch.softmax(self.lse, 0)[..., None]
        if self.lse.device.type == "cpu":  # one by one, so that the sum stays in cache
            output = torch.zeros_like(self.output[0])
            for share, own in zip(shares, self.output, strict=True):
                output.addcmul_(share, own)
        else:
            output = (shares * self.output).sum(0)
        return State(self.count.sum(0), self.lse.logsumexp(0), output)

    def thinned(self, share: Tensor) -> State:
        """The set as if it held each of these shares of its tokens, (shares, ...): weights fall, the output stays."""
        shift = share.log().reshape(-1, *(1,) * self.lse.ndim)
        counts = (share.reshape(-1, *(1,) * self.count.ndim) * self.count).round().to(self.count.dtype)
        return State(counts, self.lse + shift, self.output.expand(len(share), *self.output.shape))

    def __getitem__(self, index: object) -> State:
        """Index the batch axes."""
        return State(self.count[index], self.lse[index], self.output[index])  # type: ignore[index]

    def tensors(self) -> dict[str, Tensor]:
        """Its fields as contiguous tensors, as safetensors wants them; `State.of` turns them back."""
        return {name: getattr(self, name).contiguous() for name in ("count", "lse", "output")}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> State:
        """The state whose `tensors` these are."""
        return cls(**tensors)


@dataclass(frozen=True)
class Peak:
    """The largest score of each query and its value: hardmax attention, mergeable like a state without exponentials."""

    score: Tensor  # (..., m)
    value: Tensor  # (..., m, v)

    @classmethod
    def empty(cls, batch: tuple[int, ...], queries: int, value_dim: int, *, like: Tensor) -> Peak:
        """The identity of `merge`: the peak over no tokens."""
        score = like.new_full((*batch, queries), float("-inf"))
        return cls(score, like.new_zeros(*batch, queries, value_dim))

    def tensors(self) -> dict[str, Tensor]:
        """A flat dictionary, like that of a state."""
        return {"score": self.score, "value": self.value}

    @classmethod
    def of(cls, scores: Tensor, value: Tensor) -> Peak:
        """The peak of scores (..., m, n ≥ 1) over values (..., n, v); the first token wins a tie."""
        return cls.among([(0, scores)], value)

    @classmethod
    def among(cls, parts: Iterable[tuple[int, Tensor]], value: Tensor) -> Peak:
        """The same of scores that come in parts, each with the place of its first token."""
        found: tuple[Tensor, Tensor] | None = None
        for start, scores in parts:
            # NumPy's argmax is eight times as fast as torch's on a CPU.
            cpu = scores.device.type == "cpu"
            place = (torch.from_numpy(scores.numpy().argmax(-1)) if cpu else scores.argmax(-1))[..., None]
            own = scores.gather(-1, place), place + start
            if found is not None:
                better = own[0] > found[0]
                own = torch.where(better, own[0], found[0]), torch.where(better, own[1], found[1])
            found = own
        assert found is not None
        score, place = found
        if value.device.type == "cpu":  # whole rows at a time
            batch, (tokens, width) = place.shape[:-2], value.shape[-2:]
            rows = place[..., 0] + tokens * torch.arange(batch.numel()).reshape(*batch, 1)
            chosen = value.reshape(-1, width).index_select(0, rows.flatten())
            return cls(score[..., 0], chosen.reshape(*rows.shape, width))
        return cls(score[..., 0], value.gather(-2, place.expand(*place.shape[:-1], value.shape[-1])))

    @classmethod
    def joined(cls, peaks: Sequence[Peak], axis: int = 0) -> Peak:
        """Peaks one after the other along a batch axis."""
        if len(peaks) == 1:
            return peaks[0]
        parts = zip(*((peak.score, peak.value) for peak in peaks), strict=True)
        return cls(*(torch.cat(part, axis) for part in parts))

    def union(self) -> Peak:
        """The peak over the union of the sets along the first batch axis; the first of them wins a tie."""
        score, best = self.score.max(0, keepdim=True)
        return Peak(score[0], self.value.gather(0, best[..., None].expand(1, *self.value.shape[1:]))[0])

    def __getitem__(self, index: object) -> Peak:
        """Index the batch axes."""
        return Peak(self.score[index], self.value[index])  # type: ignore[index]

    def merge(self, other: Peak) -> Peak:
        """The peak over the union of two sets of tokens."""
        better = other.score > self.score
        return Peak(
            torch.where(better, other.score, self.score), torch.where(better[..., None], other.value, self.value)
        )
