"""Attention kernels: softmax attention of a batch of queries over one block of tokens, or over many blocks at once.

A kernel maps query (..., m, k), key (..., n, k), value (..., n, v) and bias (..., 1 or m, n) or None to log-sum-exps
(..., m) and outputs (..., m, v). Scores are <query, key> + bias, so the query must contain the scale 1/√k. A query
without a finite score has log-sum-exp −inf and output 0. `WORDS` describes the precisions on a GPU.
"""

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
from torch.nn.functional import pad

from limitlens.arrays import to_device
from limitlens.attention.kernels import split
from limitlens.attention.state import Peak, State
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.errors import InputError

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Precision: TypeAlias = Literal["fast", "accurate", "exact"]

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
WORDS: dict[Precision, str] = {
    "fast": "half-precision products, to about 1e-3",
    "accurate": "float32 accuracy from half-precision products, to about 1e-6",
    "exact": "plain float32",
}
SCORES_AT_ONCE = 1 << 18  # scores that `peak_over` forms at a time on a CPU, few enough to stay in cache
DEVICE_TIMES = 256  # factor on `SCORES_AT_ONCE` on a GPU


def choose_device(name: str) -> torch.device:
    """Torch device for the name "auto", "cpu" or "cuda"; "auto" is cuda if the machine has a CUDA device."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"the device is {name!r}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("the device is cuda, but torch finds no CUDA device; expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def as_precision(name: str) -> Precision:
    """Return `name` if it is a kernel precision ("fast", "accurate" or "exact"); otherwise raise an `InputError`."""
    if not isinstance(name, str) or name not in WORDS:
        raise InputError(f"the precision is {name!r}; expected {', '.join(WORDS)}, of which accurate is the default")
    return name


def attend_plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, for any device, holding all scores: log-sum-exps (..., m) and outputs (..., m, v)."""
    return attend_subset(query @ key.mT, value, log_weights=bias)


def attend_cpu(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention on a CPU by torch's fused kernel: log-sum-exps (..., m) and outputs (..., m, v)."""
    batch, value_dim = query.shape[:-2], value.shape[-1]
    if key.shape[:-2] != batch:
        batch = torch.broadcast_shapes(batch, key.shape[:-2])  # type: ignore[no-untyped-call]
    width = max(query.shape[-1], value_dim)  # the fused kernel needs one size; zeros change no score
    query, key, value = (_with_head_axis(rows, batch, width) for rows in (query, key, value))
    mask = None
    if bias is not None:
        shape = (query.shape[-2], key.shape[-2])
        mask = bias.to(query.dtype).expand(*batch, *shape).reshape(-1, 1, *shape)
    output, lse = _FUSED(query, key, value, 0.0, False, attn_mask=mask, scale=1.0)
    output, lse = output.squeeze(1)[..., :value_dim], lse.squeeze(1)
    if bias is not None:  # a query with every token masked: the fused kernel divides 0 by 0
        void = ~(torch.isfinite(bias).any(-1).expand(*batch, query.shape[-2]).reshape(lse.shape))
        lse, output = lse.masked_fill(void, float("-inf")), output.masked_fill(void[..., None], 0.0)
    if len(batch) != 1:
        lse, output = lse.reshape(*batch, -1), output.reshape(*batch, -1, value_dim)
    return lse, output


def _with_head_axis(rows: Tensor, batch: torch.Size, width: int) -> Tensor:
    """Reshape rows (..., n, d) to (batch, 1 head, n, width) for torch's fused kernel, padded with zeros to `width`."""
    if rows.shape[-1] < width:
        rows = pad(rows, (0, width - rows.shape[-1]))
    if rows.shape[:-2] == batch and len(batch) == 1:
        return rows.unsqueeze(1)
    return rows.expand(*batch, *rows.shape[-2:]).reshape(-1, 1, *rows.shape[-2:])


def kernel_for(query: Tensor, value: Tensor, precision: Precision = "accurate") -> Kernel:
    """Choose the attention kernel: fused on a CPU, `split` on a GPU, plain torch if "exact" or `split` cannot run."""
    if query.device.type == "cpu":
        return attend_cpu
    if precision == "exact" or split.unable(query, value) is not None:
        return attend_plain
    return partial(split.attend, precision=precision)


def kernel_words(like: Tensor, precision: Precision) -> str:
    """Text for reports that describes the kernel used for tensors like `like`, and why it is not the requested one."""
    if like.device.type == "cpu":
        return "float32"
    instead = None if precision == "exact" else split.unable(like, like)
    return f"{precision}: {WORDS[precision]}" if instead is None else f"exact: {WORDS['exact']}, since {instead}"


def state_of(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, kernel: Kernel | Precision = "accurate"
) -> State:
    """Attention of queries (..., m, k) over a block of n ≥ 0 tokens, as a mergeable `State` (log-sum-exp and output).

    Keys are (..., n, k) and values (..., n, v). The bias (..., 1 or m, n) is added to the scores; −inf masks a token.
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
    """Largest score of each query (..., q, k) over keys (..., n, k), and the value of the key that has this score."""
    if not key.shape[-2]:
        return Peak.empty(tuple(key.shape[:-2]), query.shape[-2], value.shape[-1], like=value)
    scores = scores_at_once * (1 if key.device.type == "cpu" else DEVICE_TIMES)
    chunk = max(1, scores // max(1, key.shape[:-2].numel() * query.shape[-2]))
    starts = range(0, key.shape[-2], chunk)
    return Peak.of((scores_of(query, key[..., start : start + chunk, :], softcap) for start in starts), value)


@dataclass(frozen=True, eq=False)
class JobQueries:
    """Queries of H key/value heads, prepared once for many calls of `attend_jobs`."""

    query: Tensor  # (H, m, k), with the scale of the scores
    detail: Tensor  # (q,): indices of the queries whose largest score is computed too
    detail_query: Tensor  # (H, q, k): the queries at `detail`
    kernel: Kernel | Precision
    softcap: float | None
    halves: split.Halves | None  # queries in split half precision, for one Triton launch; None: loop over jobs

    @classmethod
    def of(
        cls, query: Tensor, detail: Tensor, value: Tensor, kernel: Kernel | Precision, softcap: float | None,
        fused: bool | None = None,
    ) -> JobQueries:  # fmt: skip
        """Prepare queries (H, m, k) for values like `value`; `fused` runs one Triton launch (default: if possible)."""
        if fused is None:
            able = query.device.type != "cpu" and not callable(kernel) and kernel != "exact"
            fused = able and split.unable(query, value) is None
        halves = split.halves(query, split.LOG2E) if fused else None
        return cls(query, detail, query[:, detail], kernel, softcap, halves)

    @classmethod
    def joined(cls, parts: Sequence[JobQueries]) -> JobQueries:
        """Concatenate the queries of several layers along the heads, as if they belonged to one layer."""
        halves = split.Halves.joined([part.halves for part in parts if part.halves is not None])
        query, detail = (torch.cat([getattr(part, name) for part in parts]) for name in ("query", "detail_query"))
        return replace(parts[0], query=query, detail_query=detail, halves=halves)


def attend_jobs(
    queries: JobQueries, key: Tensor, value: Tensor, jobs: NDArray[np.int64],
    *, heads: slice = slice(None), largest: Tensor | None = None,
) -> tuple[State, Peak]:  # fmt: skip
    """Attention of prepared queries over J ranges of tokens: mergeable states (J, h, m) and largest scores (J, h, q).

    Each job is a range (start, stop) of the n tokens. Keys and values are (n, H, ·), of which h `heads` are used.
    `largest` (2, H) are the largest absolute entries of keys and of values in each head, if known.
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
    assert queries.kernel in ("fast", "accurate")
    spans = to_device(np.ascontiguousarray(jobs), key.device)
    head = torch.arange(key.shape[1], device=key.device)[heads]
    shape = (len(spans), len(head))
    work = torch.cat((head[:, None].expand(*shape, 2), spans[:, None].expand(*shape, 2)), -1).flatten(0, 1)
    found = split.attend_jobs(
        halves, key.transpose(0, 1), value.transpose(0, 1), work, longest=int((jobs[:, 1] - jobs[:, 0]).max()),
        peaks=True, precision=queries.kernel, sizes=largest,
    )  # fmt: skip
    assert found.peak is not None
    assert found.where is not None
    count = (spans[:, 1] - spans[:, 0])[:, None].expand(shape)
    state = State(count, found.lse.view(*shape, -1), found.output.view(*shape, *found.output.shape[1:]))
    score, place = (part.view(*shape, -1)[..., queries.detail] for part in (found.peak, found.where))
    return state, Peak(score.float(), value[place, head[None, :, None]].float())
