"""`study`: error curves of attention over n tokens of a law against its infinite-token limit, and their rates."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.head import HARDMAX_BEYOND, Head, as_head
from limitlens.attention.kernels import as_precision, choose_device, kernel_words
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.experiments import study_pass
from limitlens.experiments.reference import Reference
from limitlens.experiments.study_pass import ReplicatePass, Rows, StudySetup
from limitlens.experiments.study_result import MOMENT, REACH, StudyResult
from limitlens.experiments.uniform import missed_note
from limitlens.measures import Gaussian
from limitlens.measures.base import Measure
from limitlens.measures.custom import CustomMeasure, TokenLaw, as_measure
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint, Job, Saved, identity, under
from limitlens.sampling.interrupt import held_interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.streams import generator_for
from limitlens.theory import curve, rates
from limitlens.theory.rates import proxy_reach
from limitlens.theory.spectrum import Reach, reach

# Seconds for each number of a token, for each score of a token, and for each product in the root of a covariance.
NUMBER_SECONDS, SCORE_SECONDS, ROOT_SECONDS = 3e-7, 3e-10, 3e-9
KEPT_NUMBERS = 40  # numbers kept for each replicate, size and dimension of a value
CHECKED_QUERIES = 32  # queries at which K of a user-defined law must be finite


def study(
    measure: TokenLaw, head: Head, sizes: str | Sequence[int] = "1000:30000:12", *, replicates: int = 200,
    queries: int | None = None, mask_self: bool = False, radius: float | None = None, seed: int = 0,
    device: str = "auto", yes: bool = False, progress: Progress | None = None, checkpoint: Checkpoint | None = None,
    memory: int | None = None, precision: str = "accurate",
) -> StudyResult:  # fmt: skip
    """Measure the error of attention over n tokens against the infinite-token limit, for nested n, and fit its rate.

    Tokens of a `Sample` are drawn without replacement, and the limit is attention over the whole sample. By default a
    short first run (pilot) chooses the number of `queries` per replicate. The noise of few queries raises an error by
    3%, or by up to 16% where errors hardly vary between replicates; this bias is measured and removed. `mask_self`
    leaves each query's own token out of its softmax. A `radius` adds the largest error over the queries in the ball of
    this radius.

    `progress` is called with (done, total). An interrupt (Ctrl-C) returns the result of the finished replicates and
    leaves a `checkpoint`, if one was given, from which the same call resumes. `memory` bounds the bytes that the
    process holds. `precision` is that of attention on a GPU: "accurate" (about 1e-6), "fast" (1e-3) or "exact"
    (float32). A study estimated to take more than a day, or more memory than the machine has, starts only with `yes`.

    >>> curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800], replicates=20, queries=32)
    >>> 0.3 < curve.rate('output').slope < 0.7
    True
    """
    started = time.perf_counter()
    measure = as_measure(measure)
    cells = Cells(parse_sizes(sizes))
    head = as_head(head, measure.dim)
    check_number("replicates", replicates, "at least 2, since error bars come from their scatter", low=2)
    expected = f"2 to {study_pass.MOST_QUERIES}, of which a few hundred are enough"
    check_number("queries", 2 if queries is None else queries, expected, low=2, below=study_pass.MOST_QUERIES + 1)
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
        if min(study_pass.MOST_QUERIES, cells.sizes[-1]) <= queries < cells.sizes[-1]:
            warnings.append(
                f"the pilot asked for more than {study_pass.MOST_QUERIES} queries; their noise is corrected for"
            )
    run = _StudyRun(setup, min(queries, cells.sizes[-1]), job.saved)
    interrupted = run.finish(job, progress, warnings)
    return run.result(seed, started, interrupted, warnings)


def study_cost(head: Head, cells: Cells, replicates: int, queries: int | None) -> tuple[float, float]:
    """Estimated seconds and bytes of memory of a study, from the numbers of tokens, scores and replicates."""
    dim = head.value_dim
    steps = float(replicates) * len(cells.sizes)
    numbers = float(replicates) * cells.sizes[-1] * (head.dim + head.key_dim + dim)
    scores = min(queries or study_pass.PILOT_QUERIES, cells.sizes[-1]) * SCORE_SECONDS
    return numbers * (NUMBER_SECONDS + scores) + steps * ROOT_SECONDS * dim**3, 8 * steps * KEPT_NUMBERS * dim


class _StudyRun:
    """State of a running study: measurements (`rows`) of finished replicates, and the chunk of replicates under way."""

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
        """Measure all remaining replicates, saving checkpoints; returns whether an interrupt ended the run early."""
        replicates = self.setup.replicates
        interrupted = False
        with held_interrupt() as interrupt:
            try:
                while self.start < replicates:
                    try:
                        for tokens in self._chunk():
                            job.passed(tokens, self.state, interrupt)
                    except torch.cuda.OutOfMemoryError:
                        self.chunk_size = halved(min(self.chunk_size, replicates), "replicates", warnings)
                        self.under_way = None
                        continue
                    interrupt.during(progress, self.start, replicates)
                    job.passed(0, self.state, interrupt)
            except KeyboardInterrupt:
                if self.start < 2:
                    raise
                interrupted = True
                warnings.append(f"interrupted: {self.start} of {replicates} replicates were finished")
        job.keep(self.state())
        return interrupted

    def _begin(self) -> ReplicatePass:
        chunk = range(self.start, min(self.start + self.chunk_size, self.setup.replicates))
        self.under_way = ReplicatePass(self.setup, chunk, self.queries)
        return self.under_way

    def _chunk(self) -> Iterator[int]:
        """Continue the chunk of replicates under way, or begin the next; yields the number of tokens of each block."""
        chunk = self.under_way or self._begin()
        yield from chunk.blocks()
        rows = chunk.rows()
        self.rows = study_pass.join_rows([self.rows, rows]) if self.rows else rows
        self.start = chunk.replicates.stop
        self.under_way = None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Position in the replicates, and tensors of the measurements so far, for a checkpoint."""
        position = {"start": self.start, "group": self.chunk_size, "queries": self.queries, "blocks": 0}
        tensors = {f"rows.{name}": torch.from_numpy(part) for name, part in self.rows.items()}
        if self.under_way is not None:
            position["blocks"] = self.under_way.done
            tensors |= {f"pass.{name}": part for name, part in self.under_way.tensors().items()}
        return position, tensors

    def result(self, seed: int, started: float, interrupted: bool, warnings: list[str]) -> StudyResult:
        """Result of the study over the replicates that are finished."""
        setup, rows = self.setup, self.rows
        reference, sizes = setup.reference, setup.cells.sizes
        measure, head = reference.measure, reference.head
        head_reach = reach(measure.covariance, head.A)
        warnings += head_reach.warnings(sizes[-1], mask_self=setup.mask_self)
        variance, square = float(reference.covariance.trace().clamp_min(0)), float(reference.mean.square().sum())
        width = torch.empty(0, max(head.key_dim, head.value_dim), device=setup.device)
        return StudyResult(
            sizes=sizes,
            rows={name: part for name, part in rows.items() if name not in ("floor", "missed")},
            reference_factor=np.array([reference.factor(n) for n in sizes]),
            floor=rows["floor"].max(0),
            scale={"output": math.sqrt(variance + square), "output_centred": math.sqrt(variance)},
            measure=repr(measure),
            theory=_predicted_rates(head_reach, proxy_reach(measure, head.A)),
            asymptotic={name: _asymptotic_rate(name, measure, head_reach.horizon) for name in under("errors.", rows)},
            predict=partial(_predicted_curves, measure, head, head_reach, sizes, setup.mask_self),
            mask_self=setup.mask_self, queries=self.queries, seed=seed, device=str(setup.device),
            kernel=kernel_words(width, setup.precision), interrupted=interrupted,
            seconds=time.perf_counter() - started, warnings=tuple(warnings),
            notes=() if setup.radius is None else (missed_note(rows["missed"]),),
        )  # fmt: skip


def _predicted_rates(head_reach: Reach, proxy: Reach | None) -> dict[str, float]:
    """Horizons and coupling of the head, and the rates that they predict for unbounded tokens; NaN if none is known."""
    laws = (rates.rate_sharp, rates.rate_sharp_output, rates.rate_rms_output, rates.rate_drawn)
    return {
        **{name: getattr(head_reach, name) for name in REACH},
        **{law.__name__: law(head_reach.horizon) for law in laws},
        "rate_proved": math.nan if proxy is None else rates.rate_proved(proxy.coupling),
    }


def _asymptotic_rate(name: str, measure: Measure, horizon: float) -> float:
    """Rate that the error `name` tends to: the sharp rate, or 1/2 for bounded tokens or the maximum over a ball."""
    if name == "uniform" or np.isfinite(measure.radius):
        return 0.5
    return (rates.rate_rms_output if MOMENT.get(name) == 2 else rates.rate_sharp)(horizon)


def _predicted_curves(
    measure: Measure, head: Head, head_reach: Reach, sizes: Sequence[int], mask_self: bool
) -> dict[str, Array]:
    """Predicted errors (sizes,) for Gaussian tokens: `output` (of the head's output), and where possible `mean`.

    `output` is exact. `mean`, the error of the outputs' mean, follows from the influence function, for centred tokens
    without `mask_self`, in d = 1 and where ‖B‖_F is small (docs/theory.md). The grid of the computation grows with the
    horizon, so beyond `HARDMAX_BEYOND` there is no prediction.
    """
    if not isinstance(measure, Gaussian) or head.query_bias.any() or head_reach.horizon > HARDMAX_BEYOND:
        return {}
    covariance, A, V = measure.covariance, head.A, head.V
    predicted = {"output": curve.output_error(covariance, A, sizes, V=V, mean=measure.mean, mask_self=mask_self)}
    if mask_self or measure.mean.any() or not rates.moments_verified(head_reach):
        return predicted
    mean = curve.mean_error(covariance, A, sizes, V)
    return predicted if mean is None else predicted | {"mean": mean}
