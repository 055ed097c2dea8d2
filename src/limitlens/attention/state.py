"""Attention over a set of tokens is a mergeable state.

For a batch of queries, keep the log-sum-exp of the scores and the weighted mean of the values. Two disjoint sets of
tokens merge exactly (docs/the-merge.md):

    lse = log(e^{lse₁} + e^{lse₂}),    output = e^{lse₁ − lse} output₁ + e^{lse₂ − lse} output₂.

The operation is associative and commutative and the empty set is its identity, so streams, checkpoints, cores and
machines are all the same loop. Every average that the diagnostics need obeys the same rule: those weighted by e^{score}
travel with `lse`, those weighted by e^{2 score} with `lse2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class Detail:
    """What diagnostics need beyond the output; it merges like the state it belongs to."""

    score: Tensor  # (..., m): mean score under the attention weights
    lse2: Tensor  # (..., m): log-sum-exp of twice the scores
    mean2: Tensor  # (..., m, v): means of v and of v² under weights proportional to e^{2 score}
    square2: Tensor
    top_scores: Tensor  # (..., m, k): the k largest scores, descending, padded with −inf
    top_value: Tensor  # (..., m, v): mean value over the tokens with the largest score, the output of hardmax attention
    ties: Tensor  # (..., m): how many tokens have that score


@dataclass(frozen=True)
class State:
    """Softmax attention of m queries over a set of tokens, ready to merge with another set.

    Leading axes (replicates, heads, cells, ...) are batch axes. Numbers are float64.
    """

    count: Tensor  # (...): number of tokens in the set
    lse: Tensor  # (..., m): log-sum-exp of the scores; −inf for the empty set
    output: Tensor  # (..., m, v): attention output; 0 for the empty set
    detail: Detail | None = None  # everything else the diagnostics need

    @classmethod
    def empty(
        cls, batch: tuple[int, ...], queries: int, value_dim: int, *, top: int = 0, device: str | torch.device = "cpu"
    ) -> State:
        """The identity of `merge`: attention over no tokens. With `top` > 0 it carries a `Detail` of `top` scores."""

        def full(value: float, *shape: int) -> Tensor:
            return torch.full((*batch, *shape), value, dtype=torch.float64, device=device)

        m, v, void = queries, value_dim, float("-inf")
        detail = None
        if top:
            nothing = full(0, m, v)
            detail = Detail(full(0, m), full(void, m), nothing, nothing, full(void, m, top), nothing, full(0, m))
        count = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(count, full(void, m), full(0, m, v), detail)

    def merge(self, other: State) -> State:
        """The state of the union of two disjoint sets of tokens."""
        if (self.detail is None) != (other.detail is None):
            raise ValueError("one state carries a detail and the other does not; compute both with the same `top`")
        lse, here, there = _shares(self.lse, other.lse)
        output = torch.lerp(self.output, other.output, there[..., None])
        detail = None
        if self.detail is not None and other.detail is not None:
            a, b = self.detail, other.detail
            lse2, here2, there2 = _shares(a.lse2, b.lse2)
            top = max(a.top_scores.shape[-1], b.top_scores.shape[-1])
            best, rival = a.top_scores[..., 0], b.top_scores[..., 0]
            ties, others = a.ties * (best >= rival), b.ties * (rival >= best)
            winners = (ties + others).clamp_min(1)
            detail = Detail(
                score=here * a.score + there * b.score,
                lse2=lse2,
                mean2=here2[..., None] * a.mean2 + there2[..., None] * b.mean2,
                square2=here2[..., None] * a.square2 + there2[..., None] * b.square2,
                top_scores=torch.cat((a.top_scores, b.top_scores), -1).sort(-1, descending=True).values[..., :top],
                top_value=(ties / winners)[..., None] * a.top_value + (others / winners)[..., None] * b.top_value,
                ties=ties + others,
            )
        return State(self.count + other.count, lse, output, detail)

    @classmethod
    def joined(cls, states: Sequence[State], axis: int = 0) -> State:
        """States one after the other along a batch axis."""
        if len(states) == 1:
            return states[0]
        parts = [state.tensors() for state in states]
        return cls.of({name: torch.cat([part[name] for part in parts], axis) for name in parts[0]})

    def union(self) -> State:
        """The union of the disjoint sets along the first batch axis, not all of them empty."""
        if self.detail is not None:
            return reduce(State.merge, (self[i] for i in range(len(self.lse))))
        shares = torch.softmax(self.lse, 0)
        return State(self.count.sum(0), self.lse.logsumexp(0), (shares[..., None] * self.output).sum(0))

    def thinned(self, share: Tensor) -> State:
        """The set as if it held each of these shares of its tokens, (shares, ...): weights fall, the output stays."""
        shift = share.log().reshape(-1, *(1,) * self.lse.ndim)
        counts = (share.reshape(-1, *(1,) * self.count.ndim) * self.count).round().to(self.count.dtype)
        return State(counts, self.lse + shift, self.output.expand(len(share), *self.output.shape))

    def spread(self, centre: Tensor) -> Tensor:
        """Σ w² (v − centre)² per coordinate, (..., m, v): about the output it is the plug-in variance."""
        detail = self._detail
        square = detail.square2 - 2 * centre * detail.mean2 + centre**2
        return square.clamp_min(0) * torch.exp(detail.lse2 - 2 * _finite(self.lse))[..., None]

    @property
    def effective_sample_size(self) -> Tensor:
        """1/Σw², the number of equal weights that would spread the output as much, 0 over no tokens: (..., m)."""
        return torch.exp(2 * _finite(self.lse) - _finite(self._detail.lse2)) * ~torch.isneginf(self.lse)

    @property
    def variance(self) -> Tensor:
        """Plug-in variance of the output, Σ w² (v − output)² per coordinate: (..., m, v)."""
        return self.spread(self.output)

    @property
    def entropy(self) -> Tensor:
        """Entropy −Σ w log w of the attention weights, in nats, 0 over no tokens: (..., m)."""
        return _finite(self.lse) - self._detail.score

    @property
    def top_weights(self) -> Tensor:
        """The largest attention weights, descending, 0 where there are fewer tokens: (..., m, k)."""
        return torch.exp(self._detail.top_scores - _finite(self.lse)[..., None])

    @property
    def hardmax(self) -> Tensor:
        """Output of attention with softmax replaced by argmax: (..., m, v)."""
        return self._detail.top_value

    @property
    def _detail(self) -> Detail:
        if self.detail is None:
            raise ValueError("this state carries no detail; compute it with `top` of at least 1")
        return self.detail

    def __getitem__(self, index: object) -> State:
        """Index the batch axes."""
        part = None if self.detail is None else Detail(*(getattr(self.detail, f.name)[index] for f in fields(Detail)))
        return State(self.count[index], self.lse[index], self.output[index], part)  # type: ignore[index]

    def tensors(self) -> dict[str, Tensor]:
        """A flat dictionary of contiguous tensors, as safetensors wants it; `State.of` turns it back."""
        parts = {"count": self.count, "lse": self.lse, "output": self.output}
        if self.detail is not None:
            parts |= {f"detail.{f.name}": getattr(self.detail, f.name) for f in fields(Detail)}
        return {name: tensor.contiguous() for name, tensor in parts.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> State:
        """The state whose `tensors` these are."""
        detail = None
        if "detail.score" in tensors:
            detail = Detail(*(tensors[f"detail.{f.name}"] for f in fields(Detail)))
        return cls(tensors["count"], tensors["lse"], tensors["output"], detail)


@dataclass(frozen=True)
class Peak:
    """The largest score of each query and its value: hardmax attention alone, mergeable like a state.

    A `Detail` holds the same beside everything else; where only the argmax is asked for, no exponential is needed.
    """

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
        # NumPy's argmax is eight times as fast as torch's on a CPU.
        cpu = scores.device.type == "cpu"
        place = (torch.from_numpy(scores.numpy().argmax(-1)) if cpu else scores.argmax(-1))[..., None]
        values = value.gather(-2, place.expand(*place.shape[:-1], value.shape[-1]))
        return cls(scores.gather(-1, place)[..., 0], values)

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


def merge_all(states: Iterable[State]) -> State:
    """The union of one or more states."""
    return reduce(State.merge, states)


def _shares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log(e^a + e^b) and the share of each in the sum; (0, 0) when both are empty."""
    lse = torch.logaddexp(a, b)
    return lse, torch.exp(a - _finite(lse)), torch.exp(b - _finite(lse))


def _finite(lse: Tensor) -> Tensor:
    """`lse` with the −inf of empty sets replaced by 0, so that differences with it stay defined."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)
