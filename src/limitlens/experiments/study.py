"""`study`: measure how fast attention over n tokens approaches its infinite-token limit."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.head import Head, as_head
from limitlens.attention.kernels import as_precision, choose_device, kernel_words
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.experiments import study_pass
from limitlens.experiments.reference import Reference
from limitlens.experiments.study_pass import MOST_QUERIES, ReplicatePass, Rows, StudySetup
from limitlens.experiments.study_result import MOMENT, REACH, StudyResult
from limitlens.experiments.uniform import missed_note
from limitlens.measures import Gaussian, Measure, TokenLaw, as_measure
from limitlens.measures.custom import CustomMeasure
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint, Job, Saved, identity, under
from limitlens.sampling.interrupt import Interrupt, StopNow, held_interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.streams import generator_for
from limitlens.theory import curve, rates
from limitlens.theory.spectrum import Reach, reach
from limitlens.theory.statuses import CENTRED, mean_verified

# Seconds for each number of a token, for each score of a token, and for each product in the root of a covariance.
NUMBER_SECONDS, SCORE_SECONDS, ROOT_SECONDS = 3e-7, 3e-10, 3e-9
KEPT_NUMBERS = 40  # numbers stored for each replicate, size and dimension of a value
CHECKED_QUERIES = 32  # queries at which K of a user-defined distribution must be finite


def study(
    measure: TokenLaw, head: Head, sizes: str | Sequence[int] = "1000:30000:12", *, replicates: int = 200,
    queries: int | None = None, mask_self: bool = False, radius: float | None = None, seed: int = 0,
    device: str = "auto", yes: bool = False, progress: Progress | None = None, checkpoint: Checkpoint | None = None,
    memory: int | None = None, precision: str = "accurate",
) -> StudyResult:  # fmt: skip
    """Measure the error of attention over n random tokens against its infinite-token limit, and fit how fast it falls.

    Errors are those of the head's output, and of the mean and covariance of its outputs. `sizes` are the numbers n, as
    "lo:hi:k", "a,b,c" or a sequence. For a `Sample`, tokens are drawn from it without replacement, and the limit is
    attention over all of it. A short first run chooses the number of `queries` if none is given. The bias of using few
    queries is removed. `mask_self` leaves each query's own token out. A `radius` adds the largest error over this ball.

    Ctrl-C returns the result of the finished replicates; the same call with the same `checkpoint` resumes. `progress`
    is called with (done, total). `memory` bounds the bytes held. `precision` on a GPU is "accurate" (about 1e-6),
    "fast" (1e-3) or "exact" (float32). A study estimated to exceed a day, or the machine's memory, needs `yes`.

    >>> curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800], replicates=20, queries=32)
    >>> 0.3 < curve.rate('output').slope < 0.7
    True
    """
    started = time.perf_counter()
    measure = as_measure(measure)
    cells = Cells(parse_sizes(sizes))
    head = as_head(head, measure.dim)
    check_number("replicates", replicates, "at least 2, since error bars come from their scatter", low=2)
    expected = f"2 to {MOST_QUERIES}, of which a few hundred are enough"
    check_number("queries", 2 if queries is None else queries, expected, low=2, below=MOST_QUERIES + 1)
    if radius is not None:
        check_number("the radius", radius, "a positive number of at most 1e6", closed=False, below=1e6 * (1 + 1e-9))
    check_seed(seed)
    measure.check_spread()
    if mask_self and cells.sizes[0] < 2:
        raise InputError("the smallest size is 1 and self is masked, which leaves no token; start sizes at 2 or more")
    where = choose_device(device)
    check_cost("the study", *study_cost(head, cells, replicates, queries), yes=yes)
    if isinstance(measure, CustomMeasure):
        measure.check(head.tilts(measure.sample(CHECKED_QUERIES, generator_for(seed, 0)).cpu()))
    reference = Reference(measure, head, cells.sizes[-1], seed, where)
    setup = StudySetup(reference, cells, replicates, mask_self, radius, where, memory, as_precision(precision))
    options: dict[str, Any] = {"seed": seed, "sizes": cells.sizes, "replicates": replicates, "queries": queries}
    options |= {"mask_self": mask_self, "radius": radius, "device": where, "memory": memory, "precision": precision}
    job = (checkpoint or Checkpoint()).begin({"job": "study", **identity(measure, head), **options})
    warnings = list(reference.warnings)
    if queries is None:
        queries = study_pass.choose_queries(setup) if job.saved is None else int(job.saved.position["queries"])
        if min(MOST_QUERIES, cells.sizes[-1]) <= queries < cells.sizes[-1]:
            warnings.append(f"the pilot asked for more than {MOST_QUERIES} queries; their noise is corrected for")
    run = _StudyRun(setup, min(queries, cells.sizes[-1]), job.saved)
    interrupted = run.finish(job, progress, warnings)
    return run.result(seed, started, interrupted, warnings)


def study_cost(head: Head, cells: Cells, replicates: int, queries: int | None) -> tuple[float, float]:
    """Estimate the seconds and the bytes of memory that a study needs."""
    dim = head.value_dim
    steps = float(replicates) * len(cells.sizes)
    numbers = float(replicates) * cells.sizes[-1] * (head.dim + head.key_dim + dim)
    scores = min(queries or study_pass.PILOT_QUERIES, cells.sizes[-1]) * SCORE_SECONDS
    return numbers * (NUMBER_SECONDS + scores) + steps * ROOT_SECONDS * dim**3, 8 * steps * KEPT_NUMBERS * dim


class _StudyRun:
    """A running study: measurements of the finished replicates, and the group of replicates in progress."""

    def __init__(self, setup: StudySetup, queries: int, saved: Saved | None) -> None:
        self.setup, self.queries = setup, queries
        self.start = 0  # replicates that are finished
        self.chunk_size = setup.chunk_size(queries)
        self.rows: Rows = {}
        self.under_way: ReplicatePass | None = None
        if saved is not None:
            self.start, self.chunk_size = saved.position["start"], saved.position["group"]
            self.rows = {name: part.numpy() for name, part in under("rows.", saved.tensors).items()}
            if blocks := saved.position["blocks"]:
                self._begin().restore(under("pass.", saved.tensors), blocks)

    def finish(self, job: Job, progress: Progress | None, warnings: list[str]) -> bool:
        """Measure all remaining replicates and save checkpoints; returns whether an interrupt ended the run early."""
        replicates = self.setup.replicates
        interrupted = False
        with held_interrupt() as interrupt:
            try:
                while self.start < replicates:
                    try:
                        for tokens in self._chunk(interrupt):
                            job.passed(tokens, self.state, interrupt)
                    except torch.cuda.OutOfMemoryError:
                        self.chunk_size = halved(min(self.chunk_size, replicates), "replicates", warnings)
                        self.under_way = None
                        continue
                    interrupt.during(progress, self.start, replicates)
                    job.passed(0, self.state, interrupt)
            except KeyboardInterrupt as stop:
                if self.start < 2 or isinstance(stop, StopNow):
                    raise
                interrupted = True
                warnings.append(f"interrupted: {self.start} of {replicates} replicates were finished")
        job.keep(self.state())
        return interrupted

    def _begin(self) -> ReplicatePass:
        chunk = range(self.start, min(self.start + self.chunk_size, self.setup.replicates))
        self.under_way = ReplicatePass(self.setup, chunk, self.queries)
        return self.under_way

    def _chunk(self, interrupt: Interrupt) -> Iterator[int]:
        """Measure one group of replicates; yields the number of tokens processed after each block."""
        chunk = self.under_way or self._begin()
        yield from chunk.blocks()
        rows = interrupt.during(chunk.rows, drop=True)  # the error over a ball takes long
        if rows is None:
            return
        self.rows = study_pass.join_rows([self.rows, rows]) if self.rows else rows
        self.start = chunk.replicates.stop
        self.under_way = None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Position and measurements so far, as a checkpoint saves them."""
        position = {"start": self.start, "group": self.chunk_size, "queries": self.queries, "blocks": 0}
        tensors = {f"rows.{name}": torch.from_numpy(part) for name, part in self.rows.items()}
        if self.under_way is not None:
            position["blocks"] = self.under_way.done
            tensors |= {f"pass.{name}": part for name, part in self.under_way.tensors().items()}
        return position, tensors

    def result(self, seed: int, started: float, interrupted: bool, warnings: list[str]) -> StudyResult:
        """Result of the study over the finished replicates."""
        setup, rows = self.setup, self.rows
        reference, sizes = setup.reference, setup.cells.sizes
        measure, head = reference.measure, reference.head
        head_reach = reach(measure.covariance, head.A, measure.mean)
        tail = rates.tail_horizon(measure, head.A)
        start = rates.reached_from(measure, head.A)
        warnings += head_reach.warnings(sizes[-1], mask_self=setup.mask_self)
        words = "" if start is None else rates.reached_words(measure, start, sizes[-1])
        if "not reached" in words:
            warnings.append(f"the rate 1/2 of bounded tokens is proved as n → ∞ and {words}")
        variance, square = float(reference.covariance.trace().clamp_min(0)), float(reference.mean.square().sum())
        width = torch.empty(0, max(head.key_dim, head.value_dim), device=setup.device)
        return StudyResult(
            sizes=sizes,
            rows={name: part for name, part in rows.items() if name not in ("floor", "missed")},
            reference_factor=np.array([reference.factor(n) for n in sizes]),
            floor=rows["floor"].max(0),
            scale={"output": math.sqrt(variance + square), "output_centred": math.sqrt(variance)},
            measure=repr(measure),
            theory=_predicted_rates(head_reach, tail, rates.proxy_reach(measure, head.A), start),
            asymptotic={name: _asymptotic_rate(name, measure, tail) for name in under("errors.", rows)},
            predict=partial(_curves, measure, head, head_reach, sizes, setup.mask_self),
            mask_self=setup.mask_self, queries=self.queries, seed=seed, device=str(setup.device),
            kernel=kernel_words(width, setup.precision), interrupted=interrupted,
            seconds=time.perf_counter() - started, warnings=tuple(warnings),
            notes=(
                *(() if setup.radius is None else (missed_note(rows["missed"]),)),
                *((f"Bounded tokens: the rate 1/2 is {words}.",) if words else ()),
            ),
        )  # fmt: skip


def _predicted_rates(head_reach: Reach, tail: float, proxy: Reach | None, start: float | None) -> dict[str, float]:
    """Horizon (score strength), coupling and predicted rates of a head by name.

    Sharp rates are those of the horizon `tail`. `rate_proved` needs a `proxy` and centred tokens. Bounded tokens have
    `rate_compact` instead, reached from `start`.
    """
    laws = (rates.rate_sharp, rates.rate_sharp_output, rates.rate_rms_output)
    known = proxy is not None and start is None and head_reach.mean_tilt <= CENTRED
    return {
        **{name: getattr(head_reach, name) for name in (*REACH, "mean_tilt")},
        **{law.__name__: law(tail) for law in laws},
        "rate_drawn": rates.rate_drawn(head_reach.horizon),
        "rate_proved": rates.rate_proved(proxy.coupling) if known and proxy else math.nan,
        **({} if start is None else {"rate_compact": 0.5, "reached_from": start}),
    }


def _asymptotic_rate(name: str, measure: Measure, horizon: float) -> float:
    """Exponent of 1/n with which the error `name` falls as n → ∞; 1/2 for bounded tokens and for the uniform error."""
    if name == "uniform" or np.isfinite(measure.radius):
        return 0.5
    return (rates.rate_rms_output if MOMENT.get(name) == 2 else rates.rate_sharp)(horizon)


def _curves(measure: Measure, head: Head, head_reach: Reach, sizes: Sequence[int], mask_self: bool) -> dict[str, Array]:
    """Predicted errors (sizes,) for Gaussian tokens: `output` (exact), and `mean` where it has a formula.

    `mean` needs centred tokens without `mask_self`, and d = 1 (heuristic beyond H = 1) or ‖Σ^{1/2} A Σ^{1/2}‖_F ≤ 1.
    There is no prediction for other tokens or with a query bias.
    """
    if not isinstance(measure, Gaussian) or head.query_bias.any():
        return {}
    covariance, A, V = measure.covariance, head.A, head.V
    predicted = {"output": curve.output_error(covariance, A, sizes, V=V, mean=measure.mean, mask_self=mask_self)}
    if mask_self or not mean_verified(head_reach, math.inf):
        return predicted
    mean = curve.mean_error(covariance, A, sizes, V)
    return predicted if mean is None else predicted | {"mean": mean}
