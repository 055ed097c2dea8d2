"""Data that a probe collects for each layer, in memory that does not grow with the length of the corpus."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels import JobQueries, attend_jobs
from limitlens.attention.kernels.split import chunk_sums, put_rows
from limitlens.attention.state import Peak, State
from limitlens.models import Captured
from limitlens.probing.pilot import Layer
from limitlens.sampling.assignment import Assignment, BlockAssignment, ForwardSlice

JOINED_NUMBERS = 1 << 29  # most numbers in the states of layers that are measured together: 4 GB

# Tasks by name. A task may return a function that adds its sums to the totals; callers run these in a fixed order.
Work: TypeAlias = dict[str, Callable[[], Callable[[], None] | None]]


class Moments:
    """Running mean and covariance, for each head, of vectors of dimension d that arrive in blocks.

    `rough_mean` (heads, d) is subtracted from all vectors first, so that no digits cancel.
    """

    def __init__(self, rough_mean: Tensor) -> None:
        heads, dim = rough_mean.shape
        self.shift = rough_mean
        self.count = torch.zeros((), dtype=torch.int64)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=rough_mean.device)
        self.products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=rough_mean.device)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Moments of several layers, concatenated along the heads; all layers must have seen equally many vectors."""
        whole = copy.copy(parts[0])
        for name in ("shift", "total", "products"):
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole

    def sum(self, rows: Tensor) -> Callable[[], None]:
        """Sum n vectors per head, `rows` (n, heads, d), and return a function that adds the sums to these moments."""
        count = len(rows)  # the function must not keep the vectors in memory
        sums = [[part.sum(0, dtype=torch.float64) for part in pair] for pair in chunk_sums(rows, self.shift)]

        def add() -> None:
            self.count += count
            for total, products in sums:
                self.total += total
                self.products += products

        return add

    def tensors(self) -> dict[str, Tensor]:
        """The running sums by name, as a checkpoint saves them."""
        return {"count": self.count, "total": self.total, "products": self.products}

    @property
    def mean(self) -> Tensor:
        """Mean of the vectors added so far, (heads, d), float64."""
        return self.shift + self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance of the vectors added so far, (heads, d, d), with divisor n; positive semi-definite to rounding."""
        mean = self.total / self.count
        raw = self.products / self.count - mean[:, :, None] * mean[:, None, :]
        return (raw + raw.mT) / 2


class Collector:
    """Data that a probe collects for one layer, from which the errors of the layer's heads are computed.

    Samples grow from size to size. If a sample grows by few tokens to a size, their keys and values are stored. If it
    grows by many, they are merged into one attention state (log-sum-exp and output of each query). `fused` switches the
    Triton kernels on or off; by default they run where the device and the layer allow.
    """

    def __init__(self, layer: Layer, assignment: Assignment, fused: bool | None = None) -> None:
        self.layer, self.assignment = layer, assignment
        query = layer.flat_query
        key, value = (layer.traits.tokens[name] for name in ("key", "value"))
        heads, m, v = query.shape[0], query.shape[1], value.shape[-1]
        detail = torch.arange(m, device=query.device).view(-1, layer.query.shape[2])[:, layer.detail].flatten()
        self.queries = JobQueries.of(query, detail, value, layer.kernel, layer.traits.softcap, fused)
        # moments of the "query", the "key" and, where it is known, the "hidden" state of the tokens read
        self.moments = {name: Moments(mean) for name, mean in layer.traits.rough_mean.items()}
        # Keys and values: tokens stored to the end, then those of the current block, then copies of its special tokens.
        rows = assignment.slots + assignment.wait + assignment.marks
        self.stores = tuple(tokens.new_zeros(rows, *tokens.shape[1:]) for tokens in (key, value))
        self.key, self.value = (store[: assignment.slots] for store in self.stores)
        hidden = layer.traits.rough_mean.get("hidden")
        # (stored, d): hidden states of the first stored tokens
        self.hidden = None if hidden is None else query.new_zeros(assignment.hidden, hidden.shape[-1])
        # Attention (·, Hkv, G · m) and largest scores (·, Hkv, G · q) over merged tokens; last, over special tokens.
        self.states = State.empty((assignment.states + 1, heads), m, v, device=query.device)
        self.peaks = Peak.empty((assignment.states + 1, heads), len(detail), v, like=query)
        # (2, Hkv): largest absolute number in the block's keys and values, by which the Triton kernel scales them
        self.largest = None if self.queries.halves is None else query.new_zeros(2, heads)

    def work(self, captured: Captured, part: ForwardSlice, positions: slice, special: Tensor, marks: int) -> Work:
        """List the tasks that store a layer's tokens from one forward pass and add them to its means and covariances.

        The tokens are those at `positions` of each window; `part` says where each is stored. `special` (s,) are indices
        of special tokens (such as CLS) among them. `marks` special tokens are stored from earlier forward passes.
        """
        key, value = (tokens_of(tensor[:, :, positions]) for tensor in (captured.key, captured.value))
        first = self.assignment.slots + self.assignment.wait + marks
        largest = (None, None) if self.largest is None else self.largest
        work: Work = {
            name: partial(put_rows, store, tokens, part.rows, special, first, size)
            for name, store, tokens, size in zip(("keys", "values"), self.stores, (key, value), largest, strict=True)
        }
        if part.counted:
            query = tokens_of(captured.query[:, :, positions])
            work["key moments"] = partial(self.moments["key"].sum, key)
            work["query moments"] = partial(self.moments["query"].sum, query)
        if captured.hidden is not None:
            work["hidden"] = partial(self._add_hidden, captured.hidden[:, positions].flatten(0, 1), part)
        return work

    def cells(self, block: BlockAssignment, marks: int) -> list[Callable[[], None]]:
        """List the tasks that compute attention over a block of text, and again over its `marks` special tokens."""
        wait, last = self.assignment.wait, self.assignment.states
        jobs = np.array([(last, wait, wait + marks), *block.streamed])
        step = 1 if self.queries.halves is None else len(jobs)
        return [partial(self._attend, jobs[start : start + step]) for start in range(0, len(jobs), step)]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the layer has collected, by name, not copied; valid between two blocks of tokens."""
        found = {"key": self.key, "value": self.value}
        if self.hidden is not None:
            found["hidden"] = self.hidden
        held: dict[str, State | Peak | Moments] = {"state": self.states, "peak": self.peaks, **self.moments}
        return found | {f"{name}.{part}": t for name, one in held.items() for part, t in one.tensors().items()}

    def settle(self, copy: bool) -> None:
        """Finish collecting: convert stored keys and values to float32; `copy` frees the memory of all other tokens."""
        self.key, self.value = (tokens.to(torch.float32, copy=copy) for tokens in (self.key, self.value))
        self.stores = ()

    def _attend(self, jobs: NDArray[np.int64]) -> None:
        """Compute attention over stored tokens and merge it into running states, for `jobs` (state, start, stop)."""
        key, value = (store[self.assignment.slots :] for store in self.stores)
        state, peak = attend_jobs(self.queries, key, value, jobs[:, 1:], largest=self.largest)
        first = int(jobs[0, 0])
        cells = slice(first, first + 1) if len(jobs) == 1 else to_device(jobs[:, 0].copy(), key.device)
        merged = self.states[cells].merge(state).tensors() | self.peaks[cells].merge(peak).tensors()
        for name, tensor in (self.states.tensors() | self.peaks.tensors()).items():  # allocates nothing
            tensor[cells] = merged[name]
        if self.largest is not None:
            self.largest.zero_()

    def _add_hidden(self, hidden: Tensor, part: ForwardSlice) -> Callable[[], None] | None:
        if self.hidden is not None:
            self.hidden.index_copy_(0, part.rows[part.hidden], hidden[part.hidden].float())
        return self.moments["hidden"].sum(hidden[part.subset, None].float()) if part.counted else None

    @classmethod
    def joined(cls, collectors: Sequence[Self]) -> Self:
        """Merge collectors of layers of equal shape into one with the heads of all, to measure them in one call."""
        if len(collectors) == 1:
            return collectors[0]
        whole = copy.copy(collectors[0])
        layers = [collector.layer for collector in collectors]
        atoms = [layer.atom for layer in layers if layer.atom is not None]
        query = torch.cat([layer.query for layer in layers])
        whole.layer = replace(layers[0], query=query, atom=State.joined(atoms) if atoms else None)
        whole.queries = JobQueries.joined([each.queries for each in collectors])
        whole.key, whole.value = (
            torch.cat([getattr(each, name) for each in collectors], 1) for name in ("key", "value")
        )
        whole.states = State.joined([each.states for each in collectors], 1)
        whole.peaks = Peak.joined([each.peaks for each in collectors], 1)
        whole.moments = {name: Moments.joined([each.moments[name] for each in collectors]) for name in whole.moments}
        return whole


def groups(collectors: Iterable[Collector], bounded: bool = False) -> list[list[Collector]]:
    """Group consecutive layers of equal shape that a GPU measures in one call; single layers if memory is `bounded`."""

    def shapes(collector: Collector) -> tuple[object, ...]:
        layer, fused = collector.layer, collector.queries.halves is not None
        return fused, layer.query.shape, collector.value.shape, layer.atom is None, tuple(collector.moments)

    found: list[list[Collector]] = []
    for collector in collectors:
        alike = bool(found) and not bounded and shapes(found[-1][0]) == shapes(collector)
        numbers = collector.states.output.numel()
        if alike and collector.queries.halves is not None and numbers * (len(found[-1]) + 1) <= JOINED_NUMBERS:
            found[-1].append(collector)
        else:
            found.append([collector])
    return found


def tokens_of(tensor: Tensor) -> Tensor:
    """Reshape keys or values (B, H, L, k) of a batch of windows to one row per token, (B · L, H, k)."""
    return tensor.transpose(1, 2).flatten(0, 1)
