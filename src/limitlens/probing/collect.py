"""The samples of one layer while the corpus streams by.

Memory depends on the sizes, replicates and queries, and not on the number of blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

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
from limitlens.sampling.workers import InTurn

JOINED_NUMBERS = 1 << 29  # numbers in the states of layers that are measured together: 4 GB

Work: TypeAlias = dict[str, Callable[[], None]]  # named pieces of work; each is done as a whole or not at all


class Moments:
    """Mean and covariance of vectors (heads, d) that arrive in blocks.

    Sums within a chunk are float32, sums of chunks float64. Vectors are taken relative to a rough mean, so that nothing
    cancels.
    """

    def __init__(self, rough_mean: Tensor) -> None:
        heads, dim = rough_mean.shape
        self.shift = rough_mean
        self.count = torch.zeros((), dtype=torch.int64)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=rough_mean.device)
        self.products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=rough_mean.device)
        self.in_turn = InTurn()

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """The moments of several layers, each of the same number of vectors, as those of one with all their heads."""
        whole = copy.copy(parts[0])
        for name in ("shift", "total", "products"):
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole

    def add(self, rows: Tensor, turn: int | None = None) -> None:
        """Add rows (n, heads, d); forwards that run side by side are added in the order of their turns."""
        sums = [[part.sum(0, dtype=torch.float64) for part in pair] for pair in chunk_sums(rows, self.shift)]

        def add() -> None:  # the sums exist by now: where memory runs out nothing was changed
            self.count += len(rows)
            for total, products in sums:
                self.total += total
                self.products += products

        if turn is None:
            add()
        else:
            self.in_turn(turn, add)

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far."""
        return {"count": self.count, "total": self.total, "products": self.products}

    @property
    def mean(self) -> Tensor:
        """Mean, (heads, d), float64."""
        return self.shift + self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance, (heads, d, d), divided by the number of vectors; positive semi-definite up to rounding."""
        mean = self.total / self.count
        raw = self.products / self.count - mean[:, :, None] * mean[:, None, :]
        return (raw + raw.mT) / 2


class Collector:
    """What one layer has seen of the pool: kept tokens, states of cells, moments.

    `fused` chooses the Triton programs; by default they run where the device and the layer allow.
    """

    def __init__(self, layer: Layer, assignment: Assignment, fused: bool | None = None) -> None:
        self.layer, self.assignment = layer, assignment
        query = layer.flat_query
        key, value = (layer.traits.tokens[name] for name in ("key", "value"))
        heads, m, v = query.shape[0], query.shape[1], value.shape[-1]
        detail = torch.arange(m, device=query.device).view(-1, layer.query.shape[2])[:, layer.detail].flatten()
        self.queries = JobQueries.of(query, detail, value, layer.kernel, layer.traits.softcap, fused)
        # moments of "query", "key" and, where they are known, "hidden" states
        self.moments = {name: Moments(mean) for name, mean in layer.traits.rough_mean.items()}
        # Keys and values, (rows, Hkv, ·), in the model's precision: first the kept tokens in their slots, then those
        # that wait for the rest of their block, then the special ones among them.
        rows = assignment.slots + assignment.wait + assignment.marks
        self.stores = tuple(tokens.new_zeros(rows, *tokens.shape[1:]) for tokens in (key, value))
        self.key, self.value = (store[: assignment.slots] for store in self.stores)
        hidden = layer.traits.rough_mean.get("hidden")
        # (kept, d): hidden states of the first kept tokens
        self.hidden = None if hidden is None else query.new_zeros(assignment.hidden, hidden.shape[-1])
        # States (cells + 1, Hkv, G · m) and peaks (cells + 1, Hkv, G · q) of the streamed cells; the last entry is of
        # all special tokens, which are in their cells too.
        self.states = State.empty((assignment.states + 1, heads), m, v, device=query.device)
        self.peaks = Peak.empty((assignment.states + 1, heads), len(detail), v, like=query)
        # (2, Hkv): largest |number| of the keys and values that wait, which the Triton kernel scales by
        self.largest = None if self.queries.halves is None else query.new_zeros(2, heads)

    @property
    def query(self) -> Tensor:
        """Queries, (Hkv, G · m, k)."""
        return self.queries.query

    @property
    def detail_query(self) -> Tensor:
        """Queries of the diagnostics, (Hkv, G · q, k)."""
        return self.queries.detail_query

    def work(
        self, captured: Captured, part: ForwardSlice, positions: slice, special: Tensor, marks: int, turn: int | None
    ) -> Work:
        """List the work for what the layer captured in one forward.

        The pooled tokens are those at `positions` of the forward's windows; `part` says where they go. `special` (s,)
        are the special ones among them, of which `marks` are waiting already. Forwards side by side have turns.
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
            work["key moments"] = partial(self.moments["key"].add, key, turn)
            work["query moments"] = partial(self.moments["query"].add, query, turn)
        if captured.hidden is not None:
            work["hidden"] = partial(self._add_hidden, captured.hidden[:, positions].flatten(0, 1), part, turn)
        return work

    def cells(self, block: BlockAssignment, marks: int) -> list[Callable[[], None]]:
        """List the work once an assignment is complete: attend to the waiting tokens and to `marks` special ones.

        On a CPU each cell is a piece of its own, for the workers; a GPU takes all of them in one launch.
        """
        wait, last = self.assignment.wait, self.assignment.states
        jobs = np.array([(last, wait, wait + marks), *block.streamed])
        step = 1 if self.queries.halves is None else len(jobs)
        return [partial(self._attend, jobs[start : start + step]) for start in range(0, len(jobs), step)]

    def tensors(self) -> dict[str, Tensor]:
        """Everything collected, between two blocks, without copies."""
        found = {"key": self.key, "value": self.value}
        if self.hidden is not None:
            found["hidden"] = self.hidden
        held: dict[str, State | Peak | Moments] = {"state": self.states, "peak": self.peaks, **self.moments}
        return found | {f"{name}.{part}": t for name, one in held.items() for part, t in one.tensors().items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go back to where `tensors` were saved."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])

    def settle(self, copy: bool) -> None:
        """End the stream: convert kept tokens to float32 and free the others, which takes a copy of the kept ones."""
        self.key, self.value = (tokens.to(torch.float32, copy=copy) for tokens in (self.key, self.value))
        self.stores = ()

    def attend(self, jobs: NDArray[np.int64], heads: slice) -> tuple[State, Peak]:
        """Attend to kept tokens, from slot start to slot stop for each of jobs (J, 2): (J, h, ·)."""
        return attend_jobs(self.queries, self.key, self.value, jobs, heads=heads)

    def _attend(self, jobs: NDArray[np.int64]) -> None:
        """Merge the attention over waiting tokens into cells, for jobs (cell, start, stop)."""
        key, value = (store[self.assignment.slots :] for store in self.stores)
        state, peak = attend_jobs(self.queries, key, value, jobs[:, 1:], largest=self.largest)
        first = int(jobs[0, 0])
        cells = slice(first, first + 1) if len(jobs) == 1 else to_device(jobs[:, 0].copy(), key.device)
        merged = self.states[cells].merge(state).tensors() | self.peaks[cells].merge(peak).tensors()
        for name, tensor in (self.states.tensors() | self.peaks.tensors()).items():  # no memory is needed from here on
            tensor[cells] = merged[name]
        if self.largest is not None:
            self.largest.zero_()

    def _add_hidden(self, hidden: Tensor, part: ForwardSlice, turn: int | None) -> None:
        if self.hidden is not None:
            self.hidden.index_copy_(0, part.hidden_slots, hidden[part.hidden].float())
        if part.counted:
            self.moments["hidden"].add(hidden[part.subset, None].float(), turn)

    @classmethod
    def joined(cls, collectors: Sequence[Collector]) -> Collector:
        """Merge layers of equal shape into one layer that holds all their heads, so that one call measures them."""
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
    """Group neighbouring layers of equal shape to be measured together, which saves launches on a GPU.

    On a CPU, and where memory is bounded, every layer is alone.
    """

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
    """Reshape (B, H, L, k) to one row a token, (B · L, H, k)."""
    return tensor.transpose(1, 2).flatten(0, 1)
