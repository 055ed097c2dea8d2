"""Errors of one head over contexts of n consecutive tokens, from sums of weights and values over blocks of tokens."""

from collections.abc import Iterator, Mapping, Sequence
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
from limitlens.statistics.dependence import LONG, PLATEAU, Memory, block_products, memory
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors

BLOCKS = 16  # blocks of a context whose sums are stored; a power of two
QUARTER = 4  # a context of n tokens is compared with a document of at least 4 n
LARGEST_LOG = 60.0  # of a weight over the largest in the first window that was read: e^60 fits float32
WIDEST = 3.0  # half a 95% interval of log e: an end of an interval stays above 5% of the error
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
        self.far_top: Tensor | None = None

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
            scores = scores_of(moved, key, self.softcap)
            self.far_top = scores.amax(-1, keepdim=True) if self.far_top is None else self.far_top
            further = torch.exp((scores - self.far_top).clamp(max=LARGEST_LOG)) @ carried
            self.moved = further + (0 if self.moved is None else self.moved)

    def start(self, query: Tensor, key: Tensor, value: Tensor, run: int, sinks: Tensor | None) -> None:
        """Set the sink of the queries of context `run`: keys and values (Hkv, s, ·) at its start, and learned sinks."""
        rows = torch.as_tensor(np.flatnonzero(np.tile(self.owner, self.groups) == run), device=query.device)
        if sinks is not None:  # one for each query head
            sinks = sinks.view(len(query), -1).repeat_interleave(len(rows) // self.groups, 1)
        lse, output = attend_subset(scores_of(query[:, rows], key, self.softcap), value, sinks=sinks)
        self.atom[:, rows] = torch.cat((output, lse[..., None]), -1).double()

    def records(self, **known: Any) -> Iterator[ContextRecord]:
        """Record of each query head; `known` are arguments of `context_record`."""
        m, log, start = len(self.owner), self.atom[..., -1], bool(self.atom.any())
        if self.top is not None:
            log = (log - self.top[..., 0].double()).clamp(max=LARGEST_LOG)

        weight = log.exp()
        for head in range(len(self.sums) * self.groups):
            rows = head // self.groups, slice(head % self.groups * m, (head % self.groups + 1) * m)
            moved = None if self.moved is None else self.moved[rows].double()
            atom = (weight[rows], self.atom[rows][:, :-1]) if start else None
            sums = self.sums[rows].double()
            yield context_record(sums, self.squares[rows], owner=self.owner, moved=moved, atom=atom, **known)


def context_record(
    sums: Array | Tensor, squares: Array | Tensor, *, size: int, owner: NDArray[np.intp], near: int,
    moved: Array | Tensor | None = None, atom: tuple[Array | Tensor, Array | Tensor] | None = None,
    documents: NDArray[np.intp] | None = None, errors: Sequence[float] = (), seed: int = 0,
) -> ContextRecord:  # fmt: skip
    """Errors of a head from `sums` (m, R, blocks, v + 1) of w v and w over blocks of `size` tokens, nearest last.

    `squares` (m, R, v + 2) are sums of w² v, w² and w² |v|² over whole contexts, `owner` (m,) is the own context of
    each query, `atom` the weight (m,) and value (m, v) of the sink. `moved` (m, v + 1) are sums over the last `near`
    blocks of all contexts, one window further away. `documents` (R,) are those of the contexts, else each has its own.
    `errors` are those for which n(ε) is given.
    """
    sums, squares = torch.as_tensor(sums), torch.as_tensor(squares)
    count, blocks = sums.shape[1:3]
    counts = np.array(sorted({max(1, blocks >> k) for k in range(BLOCKS.bit_length())}))
    nested = sums.flip(2).cumsum(2)[:, :, counts - 1]  # over the last n tokens before the query
    start = None if atom is None else [torch.as_tensor(part) for part in atom]

    def outputs(part: Tensor) -> Tensor:
        values, mass = part[..., :-1], part[..., -1:]
        if start is not None:
            weight, value = (one.reshape(len(one), *[1] * (part.ndim - 2), -1) for one in start)
            values, mass = values + weight * value, mass + weight
        return values / mass

    every, centre = outputs(nested), outputs(nested.mean(1))
    mine = np.arange(len(owner)), owner
    rest = outputs((nested.sum(1) - nested[mine]) / (count - 1))
    about = (every - centre[:, None]) / np.sqrt(1 - 1 / count)  # without the bias of the distances up to n
    some = counts * QUARTER <= counts[-1]
    mass = nested[:, :, -1, -1:] + (0 if start is None else start[0].reshape(-1, 1, 1))
    moves = (every[:, :, -1] - centre[:, -1:]) * mass / mass.mean(1, keepdim=True)  # of the centre, by each context
    toward = (moves * centre[:, -1:]).sum((0, 2))
    pieces = (about, every[mine] - rest, centre[:, -1:], about[:, :, some] - about[:, :, -1:])
    others, own, far, inside = to_numpy(*(piece.square().sum(-1) for piece in pieces))
    others[mine] = 0  # (m, R, J), as 1/R of the centre is its own
    others[mine] = others.sum(1) / (count - 1)  # an own context counts as the mean of the others
    own = own - others.mean(1) / (count - 1)  # without the variance of `rest`
    member = (owner == np.arange(count)[:, None]) * (count / len(owner))
    limit = np.broadcast_to(far, own.shape)  # over the largest n, which is nearest to it
    error, in_use, output = (np.tensordot(member, part, 1) for part in (others, own, limit))
    scale = np.maximum(output.mean(0), _TINY)
    curve = ErrorCurve(tuple(map(int, counts * size)), error / scale, output / scale, seed=seed)
    documents = np.arange(count) if documents is None else documents
    output = output + 2 * np.outer(to_numpy(toward)[0] / far.sum(), output.mean(0))  # the limit is the centre's
    # A context gives queries and is attended to: an unusual topic makes both parts of its influence large.
    both = error.mean(0) + error.mean(1) - error.mean((0, 1))
    (error_low, error_high), (low, high) = (interval(part, output, documents) for part in (both, in_use))
    apart = inside.mean((0, 1)) / (1 - counts[some] / counts[-1])
    distance = None
    if moved is not None:
        near_by = sums[:, :, -near:].sum((1, 2))
        here, there = (part[:, :-1] / part[:, -1:] for part in to_numpy(near_by, torch.as_tensor(moved)))
        distance = float(np.sqrt(np.square(here - there).sum() / np.square(here).sum()))
    influence, single = influence_of(sums, squares, size)
    one_document = len(set(documents.tolist())) == 1
    products = block_products(influence)
    return ContextRecord(
        n=counts * size, error=curve.error, error_low=error_low, error_high=error_high,
        in_use=np.sqrt(np.maximum(in_use.mean(0), _TINY) / scale), in_use_low=low, in_use_high=high,
        within=np.sqrt(apart / scale[-1]), between=None if one_document else between_share(products),
        distance=distance, tokens_for={str(error): curve.tokens_for(error).document() for error in errors},
        memory=memory(products, to_numpy(single)[0]),
    )  # fmt: skip


def interval(error: Array, output: Array, documents: NDArray[np.intp]) -> Array:
    """Ends (2, J) of the 95% interval of e, e² = mean of `error` (R, J) / mean of `output` (R, J) over contexts.

    Contexts of one document are added up first, as they are not independent. With one document each counts by itself.
    """
    names, places = np.unique(documents, return_inverse=True)
    places = places if len(names) > 1 else np.arange(len(documents))
    count, found = int(places.max()) + 1, error.mean(0)  # estimates in use, less their variance, can be negative
    means = np.where(found > 0, found, 1), np.maximum(output.mean(0), _TINY)
    influence = (error / means[0] - output / means[1]) / 2  # on log e, by the delta method
    sums = (places == np.arange(count)[:, None]) @ influence
    square = np.square(sums).mean(0)
    kurtosis = np.square(np.square(sums)).mean(0) / np.maximum(np.square(square), _TINY)
    freedom = np.minimum(count - 1, 2 * count / np.maximum(kurtosis - 1, 1))  # of `square`, as in the bootstrap
    half = 1.96 * student_factor(freedom) * np.sqrt(square / (count - 1)) * count / len(documents)
    half = np.where(found > 0, np.minimum(half, WIDEST), WIDEST)
    return np.asarray(np.sqrt(np.maximum(found, _TINY) / means[1]) * np.exp((-half, half)))


def influence_of(sums: Tensor, squares: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums of the influence w (v − Γ)/E w over blocks (m, R, blocks, v), and of its squares over contexts (m, R).

    Both are relative to the root mean square output; arguments as in `context_record`.
    """
    total = sums.sum((1, 2))
    limit, mass = total[:, :-1] / total[:, -1:], total[:, -1] / (sums.shape[1] * sums.shape[2] * size)
    scale = (mass * limit.square().sum(-1).mean().sqrt()).clamp(min=_TINY)
    influence = (sums[..., :-1] - sums[..., -1:] * limit[:, None, None]) / scale[:, None, None, None]
    cross = (squares[..., :-2] * limit[:, None]).sum(-1)
    single = squares[..., -1] - 2 * cross + squares[..., -2] * limit.square().sum(-1)[:, None]
    return influence, single / scale.square()[:, None]


def between_share(products: Array) -> float:
    """Share of the variance of a context's mean influence that is covariance of its first and its last quarter.

    `products` (R, k, k) are those of `block_products`. If quarters are independent within a document, it is the
    variance between documents, which stays as n grows (random effects).
    """
    quarter, mean = max(1, products.shape[1] // QUARTER), products.mean(0)
    return float(np.clip(mean[:quarter, -quarter:].mean() / max(mean.mean(), _TINY), 0, 1))


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
