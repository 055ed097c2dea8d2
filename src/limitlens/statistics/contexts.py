"""Errors of one head over contexts of n consecutive tokens, from sums of weights and values over blocks of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from limitlens.arrays import Tensor, to_numpy, torch
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.errors import Array
from limitlens.report.view import Section, Table, Text
from limitlens.statistics.bootstrap import student_factor
from limitlens.statistics.dependence import LONG, PLATEAU, Memory, memory
from limitlens.statistics.documents import over_documents
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors

BLOCKS = 16  # blocks of a context whose sums are stored; a power of two
QUARTER = 4  # a context of n tokens is compared with a document of at least 4 n
LARGEST_LOG = 60.0  # of a weight over the largest in the first window that was read: e^60 fits float32
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class ContextRecord:
    """Relative errors of one head over contexts of n consecutive tokens, with the sink; arrays are over the sizes n."""

    n: Array
    error: Array  # against the corpus, for queries of other texts; ends of its 95% interval
    error_low: Array
    error_high: Array
    in_use: Array  # against the corpus, for queries at the end of their own context
    in_use_low: Array
    in_use_high: Array
    within: Array  # against the document, for queries of other texts: at sizes of at most a quarter of a context
    between: float | None  # share of the variance at the largest n that stays as n grows; None: only one document
    distance: float | None  # relative change of the output if all keys move one window away; None: no rotary keys
    tokens_for: Mapping[str, Any]  # n(ε) of contexts, by error
    memory: Memory
    worth: Array | None = None  # number of independent tokens whose error is that of n tokens of a context
    pooled_for: int | None = None  # n(ε) of independent tokens for an error of 10%

    def valued(self, prediction: PredictedErrors | None) -> Self:
        """This record with `worth`, from the predicted errors of independent tokens."""
        if prediction is None or not prediction.defined:
            return self
        pooled = ErrorCurve.predicted(np.rint(prediction.sizes), prediction)
        worth = [pooled.tokens_for(float(error)).n if error > 0 else None for error in self.error]
        known = np.array([np.nan if m is None else m for m in worth], dtype=float)
        return replace(self, worth=known, pooled_for=(pooled.tokens_for(0.1).document() or {}).get("n"))

    def row(self) -> list[Any]:
        """Cells of a table: worth, errors of other queries and in use, autocorrelation time, n(10%) here and pooled."""
        worth = None if self.worth is None or np.isnan(self.worth[-1]) else round(float(self.worth[-1]))
        time, names = self.memory, ("error", "in_use")
        ends = [[getattr(self, name + end)[-1] for end in ("", "_low", "_high")] for name in names]
        ends.append([time.time, time.low, time.high])
        cells = [f"{value:.2g} ({low:.2g} to {high:.2g})" for value, low, high in ends]
        cells[2] = cells[2] if time.verdict == PLATEAU else LONG
        return [worth, *cells, (self.tokens_for["0.1"] or {}).get("n"), self.pooled_for]


class BlockSums:
    """Sums over blocks of tokens of e^{score} and of e^{score} times values, for all queries of a layer."""

    def __init__(self, query: Tensor, traits: Any, shape: tuple[int, int], owner: NDArray[np.intp]) -> None:
        self.groups, self.owner, self.softcap = query.shape[1], owner, traits.softcap
        self.query, values = query.flatten(1, 2), traits.tokens["value"].shape[-1]  # (Hkv, G · m, k)
        rows, zeros = self.query.shape[:2], partial(torch.zeros, dtype=torch.float64, device=query.device)
        self.sums = zeros(*rows, *shape, values + 1, dtype=torch.float32)  # shape: contexts R, blocks; the nearest last
        self.squares = zeros(*rows, shape[0], values + 2)  # Σ w² v, Σ w², Σ w² |v|²
        self.atom = zeros(*rows, values + 1)  # attention to the start: output, log-sum-exp
        self.moved: Tensor | None = None  # (Hkv, G · m, v + 1): over the nearest windows, moved one window away
        self.top: Tensor | None = None

    def add(self, query: Tensor, key: Tensor, value: Tensor, run: int, blocks: slice, moved: Tensor | None) -> None:
        """Add keys and values (Hkv, t, ·) of some blocks of a context; `query` and `moved` are rotated queries."""
        scores = scores_of(query, key, self.softcap)
        self.top = scores.amax(-1, keepdim=True) if self.top is None else self.top
        weights = torch.exp((scores - self.top).clamp(max=LARGEST_LOG))
        carried = torch.cat((value, torch.ones_like(value[..., :1])), -1)
        count = blocks.stop - blocks.start
        shared, rows = weights.shape[:2]
        parts = weights.view(shared, rows, count, -1), carried.view(shared, count, -1, carried.shape[-1])
        self.sums[:, :, run, blocks] = torch.einsum("hqbt,hbtv->hqbv", *parts)
        twice = torch.cat((carried, value.square().sum(-1, keepdim=True)), -1)
        self.squares[:, :, run] += (weights.square() @ twice).double()
        if moved is not None:
            further = torch.exp((scores_of(moved, key, self.softcap) - self.top).clamp(max=LARGEST_LOG)) @ carried
            self.moved = further + (0 if self.moved is None else self.moved)

    def start(self, query: Tensor, key: Tensor, value: Tensor, run: int, sinks: Tensor | None) -> None:
        """Set the sink of the queries of context `run`: keys and values (Hkv, s, ·) at its start, and learned sinks."""
        rows = torch.as_tensor(np.flatnonzero(np.tile(self.owner, self.groups) == run), device=query.device)
        if sinks is not None:  # one for each query head
            sinks = sinks.view(len(query), -1).repeat_interleave(len(rows) // self.groups, 1)
        lse, output = attend_subset(scores_of(query[:, rows], key, self.softcap), value, sinks=sinks)
        self.atom[:, rows] = torch.cat((output, lse[..., None]), -1).double()

    def records(self, **known: Any) -> Iterator[ContextRecord]:
        """Record of each query head, computed in threads; `known` are arguments of `context_record`."""
        m, log, start = len(self.owner), self.atom[..., -1], bool(self.atom.any())
        if self.top is not None:
            log = (log - self.top[..., 0].double()).clamp(max=LARGEST_LOG)

        def record(head: int) -> ContextRecord:
            rows = head // self.groups, slice(head % self.groups * m, (head % self.groups + 1) * m)
            parts = (self.sums, self.squares, log.exp(), self.atom[..., :-1])
            sums, squares, weight, value = to_numpy(*(part[rows] for part in parts))
            moved = None if self.moved is None else to_numpy(self.moved[rows])[0]
            atom = (weight, value) if start else None
            return context_record(sums, squares, owner=self.owner, moved=moved, atom=atom, **known)

        with ThreadPoolExecutor() as pool:
            yield from pool.map(record, range(len(self.sums) * self.groups))


def context_record(
    sums: Array, squares: Array, *, size: int, owner: NDArray[np.intp], near: int, moved: Array | None = None,
    atom: tuple[Array, Array] | None = None, one_document: bool = False, errors: Sequence[float] = (), seed: int = 0,
) -> ContextRecord:  # fmt: skip
    """Errors of a head from `sums` (m, R, blocks, v + 1) of w v and w over blocks of `size` tokens, nearest last.

    `squares` (m, R, v + 2) are sums of w² v, w² and w² |v|² over whole contexts, `owner` (m,) is the own context of
    each query, `atom` the weight (m,) and value (m, v) of the sink. `moved` (m, v + 1) are sums over the last `near`
    blocks of all contexts, one window further away. `errors` are those for which n(ε) is given.
    """
    count, blocks = sums.shape[1:3]
    counts = np.array(sorted({max(1, blocks >> k) for k in range(BLOCKS.bit_length())}))
    nested = sums[:, :, ::-1].cumsum(2)[:, :, counts - 1]  # over the last n tokens before the query

    def outputs(part: Array) -> Array:
        values, mass = part[..., :-1], part[..., -1:]
        if atom is not None:
            weight, value = (one.reshape(len(one), *[1] * (part.ndim - 2), -1) for one in atom)
            values, mass = values + weight * value, mass + weight
        return np.asarray(values / mass)

    every, centre = outputs(nested), outputs(nested.mean(1))
    mine = np.arange(len(owner)), owner
    rest = outputs((nested.sum(1) - nested[mine]) / (count - 1))
    about = (every - centre[:, None]) / np.sqrt(1 - 1 / count)  # without the bias of the distances up to n
    others = np.square(about).sum(-1)  # (m, R, J), as 1/R of the centre is its own
    others[mine] = 0
    others[mine] = others.sum(1) / (count - 1)  # an own context counts as the mean of the others
    own = np.square(every[mine] - rest).sum(-1) - others.mean(1) / (count - 1)  # without the variance of `rest`
    member = (owner == np.arange(count)[:, None]) * (count / len(owner))
    limit = np.broadcast_to(np.square(centre[:, -1:]).sum(-1), own.shape)  # over the largest n, which is nearest to it
    error, in_use, output = (np.tensordot(member, part, 1) for part in (others, own, limit))
    scale = np.maximum(output.mean(0), _TINY)
    curve = ErrorCurve(tuple(map(int, counts * size)), error / scale, output / scale, seed=seed)
    pairs = np.stack((in_use, output), 1)
    log, stderr = over_documents(lambda mean: 0.5 * np.log(np.maximum(mean[0], _TINY) / mean[1]), pairs)
    half = 1.96 * student_factor(count - 1) * stderr
    some = counts * QUARTER <= counts[-1]
    apart = np.square(about[:, :, some] - about[:, :, -1:]).sum(-1).mean((0, 1)) / (1 - counts[some] / counts[-1])
    distance = None
    if moved is not None:
        here, there = (part[:, :-1] / part[:, -1:] for part in (sums[:, :, -near:].sum((1, 2)), moved))
        distance = float(np.sqrt(np.square(here - there).sum() / np.square(here).sum()))
    influence, single = influence_of(sums, squares, size)
    return ContextRecord(
        n=counts * size, error=curve.error, error_low=curve.interval[0], error_high=curve.interval[1],
        in_use=np.exp(log), in_use_low=np.exp(log - half), in_use_high=np.exp(log + half),
        within=np.sqrt(apart / scale[-1]), between=None if one_document else between_share(influence),
        distance=distance, tokens_for={str(error): curve.tokens_for(error).document() for error in errors},
        memory=memory(influence, single),
    )  # fmt: skip


def influence_of(sums: Array, squares: Array, size: int) -> tuple[Array, Array]:
    """Sums of the influence w (v − Γ)/E w over blocks (m, R, blocks, v), and of its squares over contexts (m, R).

    Both are relative to the root mean square output; arguments as in `context_record`.
    """
    total = sums.sum((1, 2))
    limit, mass = total[:, :-1] / total[:, -1:], total[:, -1] / (sums.shape[1] * sums.shape[2] * size)
    scale = np.maximum(mass * np.sqrt(np.square(limit).sum(-1).mean()), _TINY)
    influence = (sums[..., :-1] - sums[..., -1:] * limit[:, None, None]) / scale[:, None, None, None]
    cross = (squares[..., :-2] * limit[:, None]).sum(-1)
    single = squares[..., -1] - 2 * cross + squares[..., -2] * np.square(limit).sum(-1)[:, None]
    return influence, single / np.square(scale)[:, None]


def between_share(influence: Array) -> float:
    """Share of the variance of a context's mean influence that is covariance of its first and its last quarter.

    `influence` (m, R, blocks, v) are sums over blocks. If quarters are independent within a document, it is the
    variance between documents, which stays as n grows (random effects).
    """
    centred = influence - influence.mean(1, keepdims=True)
    quarter = max(1, centred.shape[2] // QUARTER)
    first, last = centred[:, :, :quarter].mean(2), centred[:, :, -quarter:].mean(2)
    square = np.square(centred.mean(2)).sum(-1).mean()
    return float(np.clip((first * last).sum(-1).mean() / max(square, _TINY), 0, 1))


def context_sections(found: Mapping[str, ContextRecord]) -> list[Section]:
    """Sections of a page on contexts, by name of the head: what n consecutive tokens are worth; none without heads."""
    if not found:
        return []
    rows = [[name, *one.row()] for name, one in found.items()]
    n, worth = int(next(iter(found.values())).n[-1]), [row[1] for row in rows if row[1] is not None]
    long = sum(one.memory.verdict == LONG for one in found.values())
    lead = f"{long} of {len(found)} heads have long memory: n times the variance still grows at n = {n:,}."
    if worth:
        lead = f"Your context of {n:,} tokens is worth {median(worth):,.0f} independent ones in the median head. {lead}"
    columns = ("head", "worth", f"error at n = {n:,}", "in use", "autocorrelation time", "n for 10%", "pooled")
    table = Table("Contexts of n consecutive tokens, with 95% intervals", columns, rows)
    return [Section("Contexts", "", (Text((lead,)),)), Section("", "", (table,), only="page")]
