"""The samples of one layer while the corpus streams by: kept tokens, states of cells, moments.

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
from limitlens.attention.kernels.split import put_rows
from limitlens.attention.state import Peak, State
from limitlens.models import Captured
from limitlens.probing.moments import Moments
from limitlens.probing.pilot import Layer
from limitlens.sampling.assignment import Assignment, BlockAssignment, ForwardSlice

JOINED_NUMBERS = 1 << 29  # numbers in the states of layers that are measured together: 4 GB

Work: TypeAlias = dict[str, Callable[[], None]]  # named pieces of work; each is done as a whole or not at all


class Collector:
    """What one layer has seen of the pool.

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

    @property
    def special(self) -> State:
        """State of all pooled special tokens, (Hkv, G · m)."""
        return self.states[-1]

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
        whole.layer = replace(layers[0], query=query, atom=State.joined(atoms) if atoms else None, first=None)
        whole.queries = JobQueries.joined([each.queries for each in collectors])
        whole.key, whole.value = (
            torch.cat([getattr(each, name) for each in collectors], 1) for name in ("key", "value")
        )
        whole.states = State.joined([each.states for each in collectors], 1)
        whole.peaks = Peak.joined([each.peaks for each in collectors], 1)
        whole.moments = {name: Moments.joined([each.moments[name] for each in collectors]) for name in whole.moments}
        return whole


def groups(collectors: Iterable[Collector], bounded: bool = False) -> list[list[Collector]]:
    """Group neighbouring layers to be measured together, which saves launches on a GPU.

    On a CPU, and where memory is bounded, every layer is alone.
    """
    found: list[list[Collector]] = []
    for collector in collectors:
        alike = bool(found) and not bounded and _shapes(found[-1][0]) == _shapes(collector)
        numbers = collector.states.output.numel()
        if alike and collector.queries.halves is not None and numbers * (len(found[-1]) + 1) <= JOINED_NUMBERS:
            found[-1].append(collector)
        else:
            found.append([collector])
    return found


def tokens_of(tensor: Tensor) -> Tensor:
    """Reshape (B, H, L, k) to one row a token, (B · L, H, k)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _shapes(collector: Collector) -> tuple[object, ...]:
    """What layers that are measured together have in common."""
    layer, fused = collector.layer, collector.queries.halves is not None
    return fused, layer.query.shape, collector.value.shape, layer.atom is None, tuple(collector.moments)
