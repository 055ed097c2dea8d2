"""Error curves of a law of tokens: every size and replicate in one pass over the tokens, with few queries.

The queries of a replicate are its first m tokens; at size n the first min(n, m) of them count. Tokens are exchangeable,
so these are a uniform draw from the n tokens, and for n ≤ m they are all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.head import Head
from limitlens.attention.kernels import Kernel, state_of
from limitlens.attention.kernels.reference import attend as plain_kernel
from limitlens.attention.state import State
from limitlens.curves.estimators import TokenSums, replicate_errors
from limitlens.curves.reference import LawReference, PoolReference, reference_for
from limitlens.curves.uniform import uniform_errors
from limitlens.errors import Array, InputError
from limitlens.experiments.study_result import Curve
from limitlens.measures.base import Measure
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.streams import PAGE
from limitlens.theory import validity
from limitlens.theory.reach import reach

CHUNK_FLOATS = 1 << 22  # bound on the tokens, keys, values and limits held at once, in numbers
FLOOR_QUERIES = 4  # queries attended again in float64 to know the numerical floor
PILOT_REPLICATES, PILOT_QUERIES = 16, 256
PER_DIMENSION = 8  # queries at least: with as many, tokens cost as much to draw as to attend, and fewer save no time
# Wanted share of query noise in a squared error. Its correction is exact for a root mean square, and for a mean error
# off by about the share times the squared coefficient of variation: the less errors scatter, the more noise may be.
NOISE_SHARE, MOST_NOISE = 0.06, 0.3
PLAIN_SCATTER = np.pi / 2 - 1  # squared coefficient of variation of |N|, the scatter of a scalar error
MOST_QUERIES = PAGE  # so that the queries of a replicate lie on its first page

Progress = Callable[[float, float], None]


@dataclass
class _Rows:
    """What replicates gave: errors and noises (replicates, sizes) by name, controls (replicates, sizes, F), floor."""

    errors: dict[str, Array]
    noise: dict[str, Array]
    controls: Array
    floor: Array

    @classmethod
    def joined(cls, parts: list[_Rows]) -> _Rows:
        """All replicates of the parts."""
        errors, noise = (
            {name: np.concatenate([book[name] for book in books]) for name in books[0]}
            for books in ([part.errors for part in parts], [part.noise for part in parts])
        )
        controls = np.concatenate([part.controls for part in parts])
        return cls(errors, noise, controls, np.max([part.floor for part in parts], axis=0))


def study(
    measure: Measure,
    head: Head,
    sizes: str | Sequence[int] = "1000:30000:12",
    *,
    replicates: int = 200,
    queries: int | None = None,
    mask_self: bool = False,
    radius: float | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Curve:
    """Errors of attention over n tokens against its limit, for nested sizes n, and their rates.

    Parameters
    ----------
    measure : Measure
        The law of tokens; a `Sample` is drawn from without replacement and compared with attention over all of it.
    head : Head
    sizes : "lo:hi:k" or sequence of int
    replicates : int
        At least 2.
    queries : int, optional
        Queries per replicate; by default as many as a pilot asks for: 3% of bias in an error that scatters as much as
        itself, up to 16% in one that hardly scatters. What bias there is, is measured and removed.
    mask_self : bool
        Leave each query's own token out of its softmax.
    radius : float, optional
        Measure the uniform error over the ball of this radius too.
    progress : callable, optional
        Called with (done, total). An interrupt (Ctrl-C) returns the curve of the replicates finished so far.

    Returns
    -------
    curve
        `curve.table`, `curve.rate("mean")`, `curve.plot()`, `curve.document()`.
    """
    started = time.perf_counter()
    cells = Cells(parse_sizes(sizes))
    if replicates < 2:
        raise InputError(f"replicates is {replicates}; expected at least 2, since error bars come from their scatter")
    if queries is not None and not 2 <= queries <= MOST_QUERIES:
        raise InputError(
            f"queries is {queries}; expected 2 to {MOST_QUERIES}: their noise is measured from two halves, and a few "
            "hundred are enough"
        )
    if measure.dim != head.dim:
        raise InputError(f"the measure has dimension {measure.dim} and the head {head.dim}; expected the same")
    if mask_self and cells.sizes[0] < 2:
        raise InputError("the smallest size is 1 and self is masked, which leaves no token; start sizes at 2 or more")
    where = choose_device(device)
    reference = reference_for(measure, head, cells.sizes[-1], seed)
    work = _Work(reference, head, cells, mask_self, where)
    warnings = list(getattr(reference, "warnings", ()))
    report = progress or (lambda done, total: None)
    if queries is None:
        queries = choose_queries(work, min(PILOT_REPLICATES, replicates))
        if queries >= min(MOST_QUERIES, cells.sizes[-1]) and queries < cells.sizes[-1]:
            warnings.append(
                f"the pilot asked for more than {MOST_QUERIES} queries; errors are corrected for the noise of these"
            )
    queries = min(queries, cells.sizes[-1])
    parts: list[_Rows] = []
    done = 0
    try:
        for chunk in work.chunks(range(replicates), queries):
            rows = work.run(chunk, queries, floor=chunk.start == 0)
            if radius is not None:
                rows.errors["uniform"] = uniform_errors(measure, head, reference, cells, chunk, radius)
            parts.append(rows)
            done = chunk.stop
            report(done, replicates)
    except KeyboardInterrupt:
        if done < 2:
            raise
        warnings.append(f"interrupted: {done} of {replicates} replicates were finished")
    warnings += validity.warnings(reach(measure.covariance, head.A), cells.sizes[-1], mask_self=mask_self)
    found = _Rows.joined(parts)
    return Curve(
        sizes=cells.sizes,
        replicate_errors=found.errors,
        query_noise=found.noise,
        controls=found.controls,
        reference_factor=np.array([reference.factor(n) for n in cells.sizes]),
        floor=found.floor,
        scale=_scale(reference),
        measure=measure,
        head=head,
        mask_self=mask_self,
        queries=queries,
        seed=seed,
        device=str(where),
        interrupted=done < replicates,
        seconds=time.perf_counter() - started,
        warnings=warnings,
    )


def choose_device(name: str) -> torch.device:
    """The device named auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"the device is {name!r}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("the device is cuda and torch finds none; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_queries(work: _Work, replicates: int) -> int:
    """Queries per replicate so that their noise is a small share of every squared error, from a pilot.

    The pilot runs on replicates of its own (beyond 2³⁰), with few queries; noise falls like 1/queries.
    """
    largest = work.cells.sizes[-1]
    first = min(PILOT_QUERIES, largest)
    chunks = work.chunks(range(1 << 30, (1 << 30) + replicates), first)
    pilot = _Rows.joined([work.run(chunk, first, floor=False) for chunk in chunks])
    wanted = float(np.clip(PER_DIMENSION * work.head.value_dim, 32, 2 * PILOT_QUERIES))
    for name, excess in pilot.noise.items():
        squared = (pilot.errors[name] ** 2).mean(0)
        tiny = np.finfo(float).tiny
        ratio = excess.mean(0) / np.maximum(np.maximum(squared - excess.mean(0), squared / 50), tiny)
        scatter = pilot.errors[name].var(0) / np.maximum(squared, tiny)
        share = np.clip(NOISE_SHARE * PLAIN_SCATTER / np.maximum(scatter, 1e-9), NOISE_SHARE, MOST_NOISE)
        wanted = max(wanted, first * float((ratio * (1 - share) / share).max()))
    return min(int(32 * np.ceil(wanted / 32)), MOST_QUERIES, largest)


class _Work:
    """One pass over the tokens of a chunk of replicates."""

    def __init__(
        self, reference: LawReference | PoolReference, head: Head, cells: Cells, mask_self: bool, device: torch.device
    ) -> None:
        self.reference, self.head, self.cells = reference, head, cells
        self.mask_self, self.device = mask_self, device

    def chunks(self, replicates: range, queries: int) -> list[range]:
        """Replicates in groups whose tokens and queries fit the memory bound."""
        head = self.head
        width = head.dim + head.key_dim + 2 * head.value_dim
        group = max(1, CHUNK_FLOATS // ((PAGE + 4 * queries) * width + 2 * max(head.dim, head.value_dim) ** 2))
        return [replicates[start : start + group] for start in range(0, len(replicates), group)]

    def run(self, replicates: range, queries: int, *, floor: bool) -> _Rows:
        """What these replicates give; the numerical floor where asked for, 0 elsewhere."""
        tokens, vectors = self.reference.draw(replicates, 0, queries)
        at_queries = self.reference.limits(vectors)
        query = self.head.queries(tokens.to(self.device)).float()
        precise = self.head.queries(tokens[:1, :FLOOR_QUERIES].to(self.device))
        state = State.empty((len(replicates),), queries, self.head.value_dim, device=self.device)
        exact = State.empty((1,), precise.shape[1], self.head.value_dim, device=self.device)
        sums = TokenSums.zero(len(replicates), vectors.shape[-1])
        books: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]] = ({}, {})
        controls: list[Tensor] = []
        floors = np.zeros(len(self.cells.sizes))
        blocks = list(self.cells.blocks(PAGE))
        for index, (step, start, stop) in enumerate(blocks):
            tokens, vectors = self.reference.draw(replicates, start, stop)
            sums = sums.add(vectors)
            tokens = tokens.to(self.device)
            bias = self._bias(queries, start, stop)
            state = state.merge(self._attend(query, tokens.float(), bias))
            if floor:
                seen = None if bias is None else bias[: precise.shape[1]].double()
                exact = exact.merge(self._attend(precise, tokens[:1], seen, plain_kernel))
            if index + 1 < len(blocks) and blocks[index + 1][0] == step:
                continue
            used = min(queries, self.cells.sizes[step])
            limit_sums = self.reference.limit_sums(sums)
            found = replicate_errors(
                state.output[:, :used].cpu(), at_queries[:, :used], limit_sums,
                self.reference.mean, self.reference.covariance,
            )  # fmt: skip
            for book, rows in zip(books, found, strict=True):
                for name, row in rows.items():
                    book.setdefault(name, []).append(row)
            controls.append(self.reference.controls(sums))
            if floor:
                same = min(exact.output.shape[1], used)
                gap = (exact.output[0, :same] - state.output[0, :same]).square().sum(-1).mean().sqrt()
                floors[step] = float(gap)
        errors, noise = ({name: torch.stack(rows, 1).numpy() for name, rows in book.items()} for book in books)
        return _Rows(errors, noise, torch.stack(controls, 1).numpy(), floors)

    def _attend(self, query: Tensor, tokens: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> State:
        return state_of(query, self.head.keys(tokens), self.head.values(tokens), bias=bias, kernel=kernel)

    def _bias(self, queries: int, start: int, stop: int) -> Tensor | None:
        """−inf where a query meets itself; None for blocks without queries."""
        if not self.mask_self or start >= queries:
            return None
        same = torch.arange(queries)[:, None] == torch.arange(start, stop)[None, :]
        return torch.zeros(same.shape, dtype=torch.float32).masked_fill(same, float("-inf")).to(self.device)


def _scale(reference: LawReference | PoolReference) -> tuple[float, float]:
    """Root mean squares of |Γ(X)| and of |Γ(X) − EΓ|, which relative errors are relative to."""
    centred = float(reference.covariance.trace().clamp_min(0))
    return float(np.sqrt(centred + float(reference.mean.square().sum()))), float(np.sqrt(centred))
