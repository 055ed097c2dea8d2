"""Error curves of a law of tokens: every size and replicate in one pass over the tokens, with few queries.

The queries of a replicate are its first m tokens; at size n the first min(n, m) of them count. Tokens are exchangeable,
so these are a uniform draw from the n tokens, and for n ≤ m they are all of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.design import HARDMAX_BEYOND
from limitlens.attention.device import choose_device
from limitlens.attention.head import Head, as_head
from limitlens.attention.kernels import Kernel, Precision, as_precision, kernel_words, state_of
from limitlens.attention.kernels.reference import attend as plain_kernel
from limitlens.attention.state import State
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.experiments.reference import Reference, reference_for
from limitlens.experiments.study_result import MOMENT, StudyResult
from limitlens.experiments.uniform import told_of, uniform_errors
from limitlens.measures import Gaussian
from limitlens.measures.base import Measure
from limitlens.measures.own import OwnMeasure, TokenLaw, as_measure
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint, Saved, identity, under
from limitlens.sampling.cluster import PIECES, spread
from limitlens.sampling.interrupt import Interrupt, held_interrupt
from limitlens.sampling.memory import halved, room
from limitlens.sampling.streams import PAGE, generator_for
from limitlens.statistics.estimators import QuerySums, TokenSums, replicate_errors
from limitlens.theory import curve, rates
from limitlens.theory.proxy import proxy_reach
from limitlens.theory.spectrum import Reach, reach

# Seconds for each number of a token, for each of its scores, and for each product in the root of a covariance.
A_NUMBER, A_SCORE, A_ROOT = 3e-7, 3e-10, 3e-9
KEPT = 40  # numbers kept of each replicate and size, for each dimension of a value
CHECKED_QUERIES = 32  # at which K of a person's own law must be finite
CHUNK_FLOATS = 1 << 22  # bound on the tokens, keys, values and limits held at once, in numbers
DEVICE_TIMES = 512  # as many on a GPU, which many replicates fill: some 20 GB
FLOAT_BYTES = 10  # that each of them costs at most, with all that is made of it on the way
FLOOR_QUERIES = 4  # queries attended again in float64 to know the numerical floor
PILOT_REPLICATES, PILOT_QUERIES = 16, 256
# Queries at least: with as many a dimension, tokens cost as much to draw as to attend, and fewer save no time. Among
# few, one far query makes a rare replicate, of which the intervals of the output error do not know until it is seen.
PER_DIMENSION, FEWEST_QUERIES = 8, 128
# Wanted share of query noise in a squared error. Where errors hardly scatter it is removed nearly exactly, so that the
# less they do, the more noise may be.
NOISE_SHARE, MOST_NOISE = 0.06, 0.3
PLAIN_SCATTER = np.pi / 2 - 1  # squared coefficient of variation of |N|, the scatter of a scalar error
MOST_QUERIES = PAGE  # so that the queries of a replicate lie on its first page


# What replicates gave, by name: errors.* and noise.* (replicates, sizes), fewer.* (replicates, sizes, 2 or 4), controls
# (replicates, sizes, F), and the numerical floor (1, sizes), which is 0 where it was not asked for.
Rows: TypeAlias = dict[str, Array]


def study(
    measure: TokenLaw,
    head: Head,
    sizes: str | Sequence[int] = "1000:30000:12",
    *,
    replicates: int = 200,
    queries: int | None = None,
    mask_self: bool = False,
    radius: float | None = None,
    seed: int = 0,
    device: str = "auto",
    yes: bool = False,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    memory: int | None = None,
    ray: str | None = None,
    precision: str = "accurate",
) -> StudyResult:
    """Errors of attention over n tokens against its limit, for nested sizes n, and their rates.

    A `Sample` is drawn from without replacement and compared with attention over all of it. There are as many `queries`
    per replicate as a pilot asks for: 3% of bias in an error that scatters as much as itself, up to 16% in one that
    hardly scatters; what bias there is, is measured and removed. `mask_self` leaves each query's own token out of its
    softmax; with a `radius` the uniform error over the ball of this radius is measured too. `progress` is called with
    (done, total); an interrupt (Ctrl-C) returns the curve of the replicates finished so far, and leaves a `checkpoint`
    where one was given, from which the same call goes on. `memory` bounds the bytes that the process holds. `ray`
    is "auto" or the HOST:PORT of a Ray cluster over whose workers the replicates are spread. The `precision` of
    attention on a GPU is "accurate", to about 1e-6, "fast", to 1e-3, or "exact", plain float32.
    What takes more than a day or more memory than there is (`limitlens.cost`) is begun with `yes` alone.

    >>> curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800], replicates=20, queries=32)
    >>> 0.3 < curve.rate('output').slope < 0.7
    True
    """
    started = time.perf_counter()
    measure, cells = as_measure(measure), Cells(parse_sizes(sizes))
    head = as_head(head, measure.dim)
    check_number("replicates", replicates, "at least 2, since error bars come from their scatter", low=2)
    few = f"2 to {MOST_QUERIES}, of which a few hundred are enough"
    check_number("queries", 2 if queries is None else queries, few, low=2, below=MOST_QUERIES + 1)
    if radius is not None:
        check_number("the radius", radius, "a positive number of at most 1e6", closed=False, below=1e6 * (1 + 1e-9))
    check_seed(seed)
    measure.check_spread()
    if mask_self and cells.sizes[0] < 2:
        raise InputError("the smallest size is 1 and self is masked, which leaves no token; start sizes at 2 or more")
    where = choose_device(device)
    check_cost("the study", *study_cost(head, cells, replicates, queries), yes=yes)
    if isinstance(measure, OwnMeasure):
        measure.check(head.tilts(measure.sample(CHECKED_QUERIES, generator_for(seed, 0)).cpu()))
    reference = reference_for(measure, head, cells.sizes[-1], seed, where)
    work = _Work(measure, reference, head, cells, replicates, mask_self, radius, where, memory, as_precision(precision))
    asked: dict[str, Any] = {"seed": seed, "sizes": cells.sizes, "replicates": replicates, "queries": queries}
    asked |= {"mask_self": mask_self, "radius": radius, "device": where, "memory": memory, "precision": precision}
    job = (checkpoint or Checkpoint()).begin({"job": "study", **identity(measure, head), **asked})
    warnings = list(reference.warnings)
    if queries is None:
        at = None if job.saved is None else job.saved.position
        queries = choose_queries(work, min(PILOT_REPLICATES, replicates)) if at is None else int(at["queries"])
        if queries >= min(MOST_QUERIES, cells.sizes[-1]) and queries < cells.sizes[-1]:
            warnings.append(
                f"the pilot asked for more than {MOST_QUERIES} queries; the noise of these is corrected for"
            )
    queries = min(queries, cells.sizes[-1])
    going = _Going(work, queries, job.saved)
    interrupted = False
    with held_interrupt() as interrupt:
        try:
            if ray is not None:
                for _ in going.spread(ray, device, seed, interrupt):
                    interrupt.during(progress, going.start, replicates)
                    if not interrupt.asked:
                        job.passed(going.group * cells.sizes[-1], going.state, interrupt)
                job.passed(0, going.state, interrupt)
            while going.start < replicates:
                try:
                    for tokens in going.on():
                        job.passed(tokens, going.state, interrupt)
                except torch.cuda.OutOfMemoryError:
                    going.group, going.passing = halved(min(going.group, replicates), "replicates", warnings), None
                    continue
                interrupt.during(progress, going.start, replicates)
                job.passed(0, going.state, interrupt)
        except KeyboardInterrupt:
            if going.start < 2:
                raise
            interrupted = True
            warnings.append(f"interrupted: {going.start} of {replicates} replicates were finished")
    job.keep(going.state())
    reached = reach(measure.covariance, head.A)
    warnings += reached.warnings(cells.sizes[-1], mask_self=mask_self)
    found = going.rows
    notes = [] if radius is None else [told_of(found["missed"])]
    errors, noise, fewer = (under(prefix, found) for prefix in ("errors.", "noise.", "fewer."))
    scale = float(reference.covariance.trace().clamp_min(0))
    return StudyResult(
        sizes=cells.sizes,
        replicate_errors=errors,
        query_noise=noise,
        fewer_queries=fewer,
        controls=found["controls"],
        reference_factor=np.array([reference.factor(n) for n in cells.sizes]),
        floor=found["floor"].max(0),
        scale=(float(np.sqrt(scale + float(reference.mean.square().sum()))), float(np.sqrt(scale))),
        measure=repr(measure),
        theory=_in_theory(reached, proxy_reach(measure, head.A)),
        asymptotic={name: _asymptotic(name, measure, reached.horizon) for name in errors},
        foretell=partial(_predicted, measure, head, reached, cells.sizes, mask_self),
        mask_self=mask_self,
        queries=queries,
        seed=seed,
        device=str(where),
        kernel=kernel_words(torch.empty(0, max(head.key_dim, head.value_dim), device=where), work.precision),
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def study_cost(head: Head, cells: Cells, replicates: int, queries: int | None) -> tuple[float, float]:
    """Seconds that a study takes and bytes that it keeps, from counts alone (`limitlens.cost`)."""
    steps, dim = float(replicates) * len(cells.sizes), head.value_dim
    numbers = float(replicates) * cells.sizes[-1] * (head.dim + head.key_dim + dim)
    scores = min(queries or PILOT_QUERIES, cells.sizes[-1]) * A_SCORE
    return numbers * (A_NUMBER + scores) + steps * A_ROOT * dim**3, 8 * steps * KEPT * dim


def _in_theory(of: Reach, proxy: Reach | None) -> dict[str, float]:
    """Horizons and coupling, and the rates they predict for unbounded tokens; NaN where nothing is proved."""
    laws = (rates.rate_sharp, rates.rate_sharp_output, rates.rate_rms_output, rates.rate_drawn)
    found = {"horizon": of.horizon, "horizon_one_sided": of.horizon_one_sided, "coupling": of.coupling}
    proved = math.nan if proxy is None else rates.rate_proved(proxy.coupling)
    return found | {law.__name__: law(of.horizon) for law in laws} | {"rate_proved": proved}


def _asymptotic(name: str, measure: Measure, horizon: float) -> float:
    """The rate an error tends to: the sharp ones, or 1/2 where the tokens are bounded or the error is uniform."""
    if name == "uniform" or np.isfinite(measure.radius):
        return 0.5
    return (rates.rate_rms_output if MOMENT.get(name) == 2 else rates.rate_sharp)(horizon)


def _predicted(measure: Measure, head: Head, of: Reach, sizes: Sequence[int], mask_self: bool) -> dict[str, Array]:
    """Error curves that theory predicts without sampling, for Gaussian tokens: `output`, and `mean` where it can.

    `output` is exact; `mean` follows the influence function, for centred tokens that attend themselves too, in d = 1
    and where ‖B‖_F is small (docs/theory.md). The grid behind them grows with the horizon, so none is drawn past the
    largest.
    """
    if not isinstance(measure, Gaussian) or head.query_bias.any() or of.horizon > HARDMAX_BEYOND:
        return {}
    covariance, A, V = measure.covariance, head.A, head.V
    found = {"output": curve.output_error(covariance, A, sizes, V=V, mean=measure.mean, mask_self=mask_self)}
    if mask_self or measure.mean.any() or not rates.moments_verified(of):
        return found
    mean = curve.mean_error(covariance, A, sizes, V)
    return found if mean is None else found | {"mean": mean}


def _joined(parts: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def choose_queries(work: _Work, replicates: int) -> int:
    """Queries per replicate so that their noise is a small share of every squared error, from a pilot.

    The pilot runs on replicates of its own (beyond 2³⁰), with few queries; noise falls like 1/queries.
    """
    largest = work.cells.sizes[-1]
    first = min(PILOT_QUERIES, largest)
    own, group = range(1 << 30, (1 << 30) + replicates), work.group(first)
    chunks = [own[start : start + group] for start in range(0, replicates, group)]
    pilot = _joined([_Pass(work, chunk, first, floor=False).rows() for chunk in chunks])
    wanted = float(np.clip(PER_DIMENSION * work.head.value_dim, FEWEST_QUERIES, 2 * PILOT_QUERIES))
    for name, excess in under("noise.", pilot).items():
        errors = pilot[f"errors.{name}"]
        squared, tiny = (errors**2).mean(0), np.finfo(float).tiny
        ratio = excess.mean(0) / np.maximum(np.maximum(squared - excess.mean(0), squared / 50), tiny)
        scatter = errors.var(0) / np.maximum(squared, tiny)
        share = np.clip(NOISE_SHARE * PLAIN_SCATTER / np.maximum(scatter, 1e-9), NOISE_SHARE, MOST_NOISE)
        wanted = max(wanted, first * float((ratio * (1 - share) / share).max()))
    return min(int(32 * np.ceil(wanted / 32)), MOST_QUERIES, largest)


@dataclass(frozen=True)
class _Work:
    """What every chunk of replicates is measured with."""

    measure: Measure
    reference: Reference
    head: Head
    cells: Cells
    replicates: int
    mask_self: bool
    radius: float | None
    device: torch.device
    memory: int | None
    precision: Precision

    def group(self, queries: int) -> int:
        """Replicates that are taken at a time, so that their tokens and queries fit the memory bound."""
        head, width = self.head, self.head.dim + self.head.key_dim + 2 * self.head.value_dim
        floats = (self.reference.page + 4 * queries) * width + 2 * max(head.dim, head.value_dim) ** 2
        bound = CHUNK_FLOATS * (1 if self.device.type == "cpu" else DEVICE_TIMES)
        left = room(self.memory, self.device, FLOAT_BYTES * floats, "a study of one replicate at a time")
        return max(1, int(min(bound, floats + left / FLOAT_BYTES) // floats))

    def attend(self, query: Tensor, tokens: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> State:
        return state_of(
            query, self.head.keys(tokens), self.head.values(tokens), bias=bias, kernel=kernel or self.precision
        )

    def bias(self, queries: int, start: int, stop: int) -> Tensor | None:
        """−inf where a query meets itself; None for blocks without queries."""
        if not self.mask_self or start >= queries:
            return None
        same = torch.arange(queries)[:, None] == torch.arange(start, stop)[None, :]
        return torch.zeros(same.shape, dtype=torch.float32).masked_fill(same, float("-inf")).to(self.device)


class _Going:
    """The replicates of a study, a chunk at a time: what those that are finished gave, and where the others stand."""

    def __init__(self, work: _Work, queries: int, saved: Saved | None) -> None:
        self.work, self.queries = work, queries
        self.start, self.group = 0, work.group(queries)
        self.rows: Rows = {}
        self.passing: _Pass | None = None
        if saved is not None:
            self.start, self.group, blocks = (saved.position[name] for name in ("start", "group", "blocks"))
            self.rows = {name: part.numpy() for name, part in under("rows.", saved.tensors).items()}
            if blocks:
                self._begin().restore(under("pass.", saved.tensors), blocks)

    def on(self) -> Iterator[int]:
        """Go on with the chunk at hand, or begin the next: tokens of each block."""
        yield from (self.passing or self._begin()).blocks()
        assert self.passing is not None
        self._take(self.passing.measured(), self.passing.replicates.stop)

    def _take(self, rows: Rows, stop: int) -> None:
        self.rows = _joined([self.rows, rows]) if self.rows else rows
        self.start, self.passing = stop, None

    def spread(self, ray: str, device: str, seed: int, interrupt: Interrupt) -> Iterator[None]:
        """Do all that is left on a cluster, a chunk after another."""
        work, queries = self.work, self.queries

        def prepare() -> Callable[[range], Rows]:
            where = choose_device(device)
            reference = reference_for(work.measure, work.head, work.cells.sizes[-1], seed, where)
            there = replace(work, reference=reference, device=where)
            return lambda chunk: _Pass(there, chunk, queries, floor=chunk.start == 0).measured()

        def pieces(workers: int) -> Iterable[range]:
            left = range(self.start, work.replicates)
            self.group = min(self.group, -(-len(left) // (PIECES * workers)))
            chunks = (left[start : start + self.group] for start in range(0, len(left), self.group))
            return takewhile(lambda _: not interrupt.asked, chunks)

        for rows in spread(ray, prepare, pieces, gpus=device != "cpu"):
            self._take(rows, self.start + len(rows["controls"]))
            yield

    def _begin(self) -> _Pass:
        chunk = range(self.start, min(self.start + self.group, self.work.replicates))
        self.passing = _Pass(self.work, chunk, self.queries, floor=self.start == 0)
        return self.passing

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """How far it is, and what is known by then."""
        at = {"start": self.start, "group": self.group, "queries": self.queries, "blocks": 0}
        tensors = {f"rows.{name}": torch.from_numpy(part) for name, part in self.rows.items()}
        if self.passing is not None:
            at["blocks"] = self.passing.done
            tensors |= {f"pass.{name}": part for name, part in self.passing.tensors().items()}
        return at, tensors


class _Pass:
    """A chunk of replicates on its way through its tokens, block by block."""

    def __init__(self, work: _Work, replicates: range, queries: int, *, floor: bool) -> None:
        self.work, self.replicates, self.queries, self.floor = work, replicates, queries, floor
        head, device = work.head, work.device
        tokens, vectors = work.reference.draw(replicates, 0, queries)
        self.at_queries = work.reference.limits(vectors)
        self.limits = QuerySums.of(self.at_queries)
        self.query = head.queries(tokens).float()
        self.precise = head.queries(tokens[:1, :FLOOR_QUERIES])
        self.state = State.empty((len(replicates),), queries, head.value_dim, device=device)
        self.exact = State.empty((1,), self.precise.shape[1], head.value_dim, device=device)
        self.sums = TokenSums.zero(len(replicates), vectors)
        self.steps: list[dict[str, Tensor]] = []
        self.floors = np.zeros((1, len(work.cells.sizes)))
        self.done = 0  # blocks

    def blocks(self) -> Iterator[int]:
        """Go on; after each block, how many tokens it had."""
        blocks = list(self.work.cells.blocks(self.work.reference.page))
        for step, start, stop in blocks[self.done :]:
            self._add(start, stop)
            self.done += 1
            if self.done == len(blocks) or blocks[self.done][0] != step:
                self._measure(step)
            yield len(self.replicates) * (stop - start)

    def rows(self) -> Rows:
        """What the replicates give, once all blocks are done."""
        deque(self.blocks(), maxlen=0)
        stacked = {name: torch.stack([step[name] for step in self.steps], 1).numpy() for name in self.steps[0]}
        return {**stacked, "floor": self.floors}

    def measured(self) -> Rows:
        """The same, with the uniform error over a ball where it is asked for."""
        work, rows = self.work, self.rows()
        if work.radius is None:
            return rows
        uniform = uniform_errors(work.measure, work.head, work.reference, work.cells, self.replicates, work.radius)
        return rows | {"errors.uniform": uniform.largest, "missed": uniform.missed}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is known after some blocks."""
        held = {"first": self.sums.first, "second": self.sums.second, "floors": torch.from_numpy(self.floors)}
        held |= {f"state.{name}": part for name, part in self.state.tensors().items()}
        held |= {f"exact.{name}": part for name, part in self.exact.tensors().items()}
        return held | {f"step{j}.{name}": part for j, step in enumerate(self.steps) for name, part in step.items()}

    def restore(self, saved: dict[str, Tensor], done: int) -> None:
        """Go back to where `tensors` were taken, after `done` blocks."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        blocks = list(self.work.cells.blocks(self.work.reference.page))
        self.sums, self.done = replace(self.sums, count=blocks[done - 1][2]), done
        self.steps = [found for j in range(len(self.work.cells.sizes)) if (found := under(f"step{j}.", saved))]

    def _add(self, start: int, stop: int) -> None:
        work = self.work
        tokens, vectors = work.reference.draw(self.replicates, start, stop)
        self.sums = self.sums.add(vectors)
        bias = work.bias(self.queries, start, stop)
        self.state = self.state.merge(work.attend(self.query, tokens.float(), bias))
        if self.floor:
            seen = None if bias is None else bias[: self.precise.shape[1]].double()
            self.exact = self.exact.merge(work.attend(self.precise, tokens[:1], seen, plain_kernel))

    def _measure(self, step: int) -> None:
        """The errors of the size that was just reached."""
        reference, used = self.work.reference, min(self.queries, self.work.cells.sizes[step])
        outputs, law = self.state.output[:, :used], (reference.mean, reference.covariance)
        known = self.at_queries[:, :used]
        limits = self.limits if used == self.queries else QuerySums.of(known)
        found = replicate_errors(outputs, known, limits, reference.limit_sums(self.sums), *law)
        step_rows = {"controls": reference.controls(self.sums)}
        for kind, rows in zip(("errors", "noise", "fewer"), found, strict=True):
            step_rows |= {f"{kind}.{name}": row for name, row in rows.items()}
        self.steps.append({name: row.cpu() for name, row in step_rows.items()})
        if self.floor:
            same = min(self.exact.output.shape[1], used)
            gap = self.exact.output[0, :same] - self.state.output[0, :same]
            self.floors[0, step] = float(gap.square().sum(-1).mean().sqrt())
