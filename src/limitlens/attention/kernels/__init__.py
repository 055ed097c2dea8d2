"""Attention kernels: softmax attention of a batch of queries over one block of tokens, or over many blocks at once.

A kernel is a function

    kernel(query (..., m, k), key (..., n, k), value (..., n, v), bias (..., 1 or m, n) or None) -> (lse (..., m), output (..., m, v))

that computes scores <query, key> + bias (the query already contains the scale) in the tensors' own precision. `state_of`
turns its result into a float64 state. A query without a finite score has lse = −inf and output 0. On a CUDA device there
are three kernels: "accurate" (`split`, float32 to a few 1e-6, the default), "fast" (the same with one half-precision
product for three, to 1e-3) and "exact" (plain float32).

`attend_jobs` attends to many blocks of one layer's tokens: a loop on the CPU, one Triton launch on a CUDA device.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels import cpu, reference, split
from limitlens.attention.scores import scores_of
from limitlens.attention.state import Peak, State
from limitlens.errors import InputError

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Precision: TypeAlias = Literal["fast", "accurate", "exact"]


WORDS: dict[Precision, str] = {
    "fast": "half-precision products, to about 1e-3",
    "accurate": "float32 accuracy from half-precision products, to about 1e-6",
    "exact": "plain float32",
}
SCORES_AT_ONCE = 1 << 18  # scores that `peak_over` forms at a time on a CPU, few enough to stay in cache
DEVICE_TIMES = 256  # times as many on a GPU


def as_precision(name: str) -> Precision:
    """Check the name of a precision."""
    if name not in WORDS:
        raise InputError(f"the precision is {name!r}; expected {', '.join(WORDS)}, of which accurate is the default")
    return name


def kernel_for(query: Tensor, value: Tensor, precision: Precision = "accurate") -> Kernel:
    """Choose the kernel for tensors like these: on a GPU the plain one where `split` cannot run or "exact" is asked."""
    if query.device.type == "cpu":
        return cpu.attend
    if precision == "exact" or split.unable(query, value) is not None:
        return reference.attend
    return partial(split.attend, precision=precision)


def kernel_words(like: Tensor, precision: Precision) -> str:
    """Describe the kernel for queries and values like these, and why it is not the one asked for."""
    if like.device.type == "cpu":
        return "float32"
    instead = None if precision == "exact" else split.unable(like, like)
    return f"{precision}: {WORDS[precision]}" if instead is None else f"exact: {WORDS['exact']}, since {instead}"


def state_of(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, kernel: Kernel | Precision = "accurate"
) -> State:
    """Compute the state of a block of n ≥ 0 tokens; shapes as in a kernel, which may be named by its precision.

    A bias of −inf masks a token.
    """
    n = key.shape[-2]
    if n == 0:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
        return State.empty(batch, query.shape[-2], value.shape[-1], device=query.device)
    lse, output = (kernel if callable(kernel) else kernel_for(query, value, kernel))(query, key, value, bias)
    count = torch.full(lse.shape[:-1], n, dtype=torch.int64, device=query.device)
    return State(count, lse.double(), output.double())


def peak_over(
    query: Tensor, key: Tensor, value: Tensor, softcap: float | None, scores_at_once: int = SCORES_AT_ONCE
) -> Peak:
    """For each query (..., q, k), the largest score over the keys (..., n, k) and the value vector of that key.

    It takes a fifteenth of the time of attention, because an argmax needs no exponentials.
    """
    if not key.shape[-2]:
        return Peak.empty(tuple(key.shape[:-2]), query.shape[-2], value.shape[-1], like=value)
    scores = scores_at_once * (1 if key.device.type == "cpu" else DEVICE_TIMES)
    chunk = max(1, scores // max(1, key.shape[:-2].numel() * query.shape[-2]))
    starts = range(0, key.shape[-2], chunk)
    parts = ((start, scores_of(query, key[..., start : start + chunk, :], softcap)) for start in starts)
    return Peak.among(parts, value)


@dataclass(frozen=True, eq=False)
class JobQueries:
    """Queries of H key/value heads, as `attend_jobs` reads them."""

    query: Tensor  # (H, m, k), with the scale of the scores
    detail: Tensor  # (q,): the queries whose largest score is found too
    detail_query: Tensor  # (H, q, k): these queries
    kernel: Kernel | Precision
    softcap: float | None
    halves: split.Halves | None  # the queries in split half precision, for one Triton launch; None: a loop

    @classmethod
    def of(
        cls, query: Tensor, detail: Tensor, value: Tensor, kernel: Kernel | Precision, softcap: float | None,
        fused: bool | None = None,
    ) -> JobQueries:  # fmt: skip
        """Prepare queries for values like `value`; `fused` asks for one launch, by default where the device can."""
        if fused is None:
            able = query.device.type != "cpu" and not callable(kernel) and kernel != "exact"
            fused = able and split.unable(query, value) is None
        return cls(query, detail, query[:, detail], kernel, softcap, split.asked(query) if fused else None)

    @classmethod
    def joined(cls, parts: Sequence[JobQueries]) -> JobQueries:
        """The queries of several layers as those of one with all their heads."""
        halves = [part.halves for part in parts if part.halves is not None]
        names = ("hi", "lo", "unit")
        together = split.Halves(*(torch.cat([getattr(part, name) for part in halves]) for name in names))
        query, detail = (torch.cat([getattr(part, name) for part in parts]) for name in ("query", "detail_query"))
        return replace(parts[0], query=query, detail_query=detail, halves=together if halves else None)


def attend_jobs(
    queries: JobQueries, key: Tensor, value: Tensor, jobs: NDArray[np.int64],
    *, heads: slice = slice(None), largest: Tensor | None = None,
) -> tuple[State, Peak]:  # fmt: skip
    """Attend to tokens start .. stop − 1 for each of J jobs (start, stop): states (J, h, m) and peaks (J, h, q).

    Keys and values are (n, H, ·), of which h `heads` are used. `largest` (2, H) are the largest |number| of keys and
    values where they are known. The CPU attends to consecutive jobs of equal length as one batch.
    """
    if queries.halves is not None:
        return _attend_at_once(queries, queries.halves, key, value, jobs, heads, largest)
    query, detail = queries.query[heads], queries.detail_query[heads]
    states: list[State] = []
    peaks: list[Peak] = []
    for length, group in groupby(jobs.tolist(), lambda job: job[1] - job[0]):
        starts = [start for start, _ in group]
        if len(starts) == 1:
            own = (part[starts[0] : starts[0] + length, heads].float().transpose(0, 1) for part in (key, value))
        else:
            places = to_device((np.array(starts)[:, None] + np.arange(length)).ravel(), key.device)
            rows = (part[:, heads].index_select(0, places).float() for part in (key, value))
            own = (part.reshape(len(starts), length, *part.shape[1:]).transpose(1, 2) for part in rows)
        keys, values = own
        state = state_of(query, keys, values, kernel=queries.kernel)
        peak = peak_over(detail, keys, values, queries.softcap)
        states.append(state[None] if len(starts) == 1 else state)
        peaks.append(peak[None] if len(starts) == 1 else peak)
    return State.joined(states), Peak.joined(peaks)


def _attend_at_once(
    queries: JobQueries, halves: split.Halves, key: Tensor, value: Tensor, jobs: NDArray[np.int64], heads: slice,
    largest: Tensor | None,
) -> tuple[State, Peak]:  # fmt: skip
    """Run all jobs in one launch of the Triton kernel."""
    assert queries.kernel in ("fast", "accurate")
    spans = to_device(np.ascontiguousarray(jobs), key.device)
    head = torch.arange(key.shape[1], device=key.device)[heads]
    shape = (len(spans), len(head))
    work = torch.cat((head[:, None].expand(*shape, 2), spans[:, None].expand(*shape, 2)), -1).flatten(0, 1)
    found = split.attend_jobs(
        halves, key.transpose(0, 1), value.transpose(0, 1), work, longest=int((jobs[:, 1] - jobs[:, 0]).max()), more=1,
        precision=queries.kernel, sizes=largest,
    )  # fmt: skip
    assert found.peak is not None
    assert found.where is not None
    count = (spans[:, 1] - spans[:, 0])[:, None].expand(shape)
    state = State(count, found.lse.view(*shape, -1), found.output.view(*shape, *found.output.shape[1:]))
    score, place = (part.view(*shape, -1)[..., queries.detail] for part in (found.peak, found.where))
    return state, Peak(score.float(), value[place, head[None, :, None]].float())
