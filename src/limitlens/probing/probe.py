"""Measure the error of attention over n tokens, for every head of a transformer, in one pass over a corpus.

A few random windows of text give the queries. The tokens of the other windows (the pool) are assigned at random to
nested samples of all sizes. The output over a sample is compared with the output over the whole pool.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels import Precision, as_precision, kernel_words
from limitlens.attention.state import State
from limitlens.cost import check_cost
from limitlens.errors import InputError, Progress, check_number, check_seed
from limitlens.models import LoadedModel, Windows, choose
from limitlens.models.windows import FORWARD, WINDOW, open_windows
from limitlens.probing import distributed
from limitlens.probing.collect import Collector, groups
from limitlens.probing.contexts import measure_contexts, with_contexts
from limitlens.probing.diagnostics import Measured, head_records, measure
from limitlens.probing.options import ProbeOptions
from limitlens.probing.overview import LayerRecord
from limitlens.probing.pilot import Layer, run_pilot
from limitlens.probing.record import HeadRecord
from limitlens.probing.result import ProbeRun
from limitlens.probing.stream import BlockProgress, Pool, run_blocks
from limitlens.sampling.assignment import SAMPLINGS, Assignment, DocumentAssignment
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint, Job, under
from limitlens.sampling.clock import Clock
from limitlens.sampling.interrupt import Interrupt, StopNow, held_interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.workers import Workers, workers_for

PILOT, RESERVED = 0.05, 0.10  # shares of the windows that give queries, and that are reserved for testing plans
# Error bars come from resampling the windows that give queries, so these must not be few.
QUERY_WINDOWS = 64  # at least so many windows give queries, unless that is more than 1/4 of all
FEWEST_QUERY_WINDOWS = QUERY_WINDOWS // 4  # in a short text at least so many, unless that is more than 2/5 of all
FEWEST_REPLICATES = 2  # standard errors come from the scatter of replicates


def probe(
    model: str | LoadedModel, corpus: str = "stdlib-docs", tokens: int = 100_000,
    *, window: int | None = None, special: str = "auto", sizes: str | Sequence[int] = "64:4096:7", replicates: int = 24,
    queries: int = 256, score_scale: float = 1.0, seed: int = 0, device: str = "auto", batch: int | None = None,
    yes: bool = False, progress: Progress | None = None, checkpoint: Checkpoint | None = None,
    memory: int | None = None, ray: str | None = None, sampling: str = "pooled", precision: str = "accurate",
    options: ProbeOptions | None = None,
) -> ProbeRun:  # fmt: skip
    """Measure, for every head of a model, the relative error of attention over n random tokens, and diagnostics.

    Errors are distances to attention over all tokens that samples are drawn from. Ctrl-C ends the run early, with
    results from the tokens read so far.

    Parameters
    ----------
    model : a short name, a folder, a GGUF file or a hub id (`limitlens.models.load`), or a loaded model
    corpus : a built-in text, a file, a folder or a hub dataset (`limitlens.models.open_corpus`)
    tokens : tokens to read, in windows; 10% of the windows are reserved for testing cache plans, at least 5% give
        queries, and samples are drawn from the rest
    window : tokens per window of text; 256, or the number of the model's positions if that is smaller
    special : special tokens around each window: "auto" (as in training), "none", or "bos" (only the first token)
    sizes : sample sizes n, a list or "lo:hi:k" (k sizes from lo to hi, in geometric progression)
    replicates : number of disjoint samples of each size; fewer if the text is too short
    queries : queries per head
    score_scale : factor on every attention score of the measurement; the model's own forward pass is unchanged
    device : "auto", "cpu" or "cuda", where a model given by name is loaded
    batch : windows per forward pass; about 4,000 tokens by default
    yes : start even if the probe takes more than a day, or more memory than there is
    progress : called with (tokens done, tokens in all)
    checkpoint : where the run is saved as it goes, so that the same call resumes it (`limitlens.Checkpoint`)
    memory : bytes that the process may use (of GPU memory on a GPU); changes the size of batches, not the samples
    ray : "auto" or the HOST:PORT of a Ray cluster whose workers share the windows
    sampling : a sample has random tokens of all windows ("pooled"), random tokens of one window ("document"), or
        consecutive tokens of one window ("contiguous"); the last two add errors of contexts to each head
    precision : of attention on a GPU: "accurate" (about 1e-6), "fast" (1e-3), or "exact" (plain float32, slow)
    options : advanced options (`ProbeOptions`)

    Examples
    --------
    >>> run = ll.probe(model, corpus=text, tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16)
    >>> len(run.heads), len(run.curves)
    (12, 36)
    """
    begun = time.perf_counter()
    cells, options = Cells(parse_sizes(sizes)), options or ProbeOptions()
    check_number("replicates", replicates, f"at least {FEWEST_REPLICATES}, for the error bars", low=FEWEST_REPLICATES)
    check_number("queries", queries, "at least 2, such as 256", low=2)
    check_number("score_scale", score_scale, "a positive number, such as 2.0", closed=False)
    check_number("batch", 1 if batch is None else batch, "at least 1 window a forward", low=1)
    check_seed(seed)
    if sampling not in SAMPLINGS:
        raise InputError(f"sampling is {sampling!r}; expected one of {', '.join(SAMPLINGS)}")
    accuracy = as_precision(precision)
    length = WINDOW if window is None else window
    if isinstance(model, str) and length >= 1 and tokens >= 1:  # refuse sizes that fit no model before loading one
        _Split.of(-(-tokens // length), seed).replicates(cells, replicates, sampling, length, length)
    loaded, windows = open_windows(model, corpus, tokens, window=window, special=special, device=device)
    with workers_for(loaded.model.device) as workers:
        spread = None if ray is None else partial(distributed.run, ray, device, model)
        work = _Work(
            loaded, windows, cells, replicates, queries, score_scale, seed, batch, memory, progress, workers, spread,
            sampling, accuracy, options,
        )  # fmt: skip
        work.split.replicates(cells, replicates, sampling, windows.length, windows.length)
        check_cost("the probe", *options.cost(loaded, windows, cells, replicates, queries), yes=yes)
        work.run(checkpoint or Checkpoint())
        return work.result(begun, corpus, tokens)


@dataclass(frozen=True, eq=False)
class _Split:
    """Random split of the windows of text into three sets: for queries, for testing cache plans, and for samples."""

    count: int  # number of all windows
    share: float  # share of the windows that give queries
    pilot: NDArray[np.intp]  # windows that give queries
    reserved: NDArray[np.intp]  # windows for testing cache plans

    @classmethod
    def of(cls, count: int, seed: int) -> Self:
        wanted = max(min(QUERY_WINDOWS, count // 4), min(FEWEST_QUERY_WINDOWS, count * 2 // 5))
        share = max(PILOT, wanted / count)
        return cls(count, share, *choose(count, (share, RESERVED), seed))

    def replicates(self, cells: Cells, wanted: int, sampling: str, positions: int, length: int) -> int:
        """Number of replicates (disjoint samples) that the text is long enough for, at most `wanted`.

        `positions` of the `length` tokens of a window may be sampled. Raises an `InputError` if the text is too short.
        """
        windows = self.count - len(self.pilot) - len(self.reserved)
        largest, pool = cells.sizes[-1], windows * positions
        if sampling != "pooled":
            if largest > positions:
                given = f"the largest size is {largest:,} and a document has {positions:,} tokens to draw from"
                raise InputError(f"{given}; expected at most as many, so ask for smaller sizes or a longer window")
            return min(wanted, windows)
        if pool < FEWEST_REPLICATES * largest:
            share = (1 - self.share - RESERVED) * positions / length
            needed = int(np.ceil(FEWEST_REPLICATES * largest / share))
            given = f"the largest size is {largest:,} and {self.count * length:,} tokens leave {pool:,} to draw from"
            expected = f"expected room for {FEWEST_REPLICATES} samples"
            raise InputError(f"{given}; {expected}, so ask for about {needed:,} tokens or smaller sizes")
        return min(wanted, pool // largest)


@dataclass
class _Work:
    """A running probe: its arguments, the split of the windows of text, and the data collected for each layer."""

    loaded: LoadedModel
    windows: Windows
    cells: Cells
    replicates: int
    queries: int
    score_scale: float
    seed: int
    batch: int | None
    memory: int | None
    progress: Progress | None
    workers: Workers
    spread: Callable[..., None] | None  # `distributed.run` if the windows are read by the workers of a cluster
    sampling: str  # one of `SAMPLINGS`
    precision: Precision = "accurate"
    options: ProbeOptions = field(default_factory=ProbeOptions)
    warnings: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    interrupted: bool = False

    def __post_init__(self) -> None:
        windows, options = self.windows, self.options
        self.replicates_asked = self.replicates
        self.warnings += windows.warnings
        self.split = _Split.of(windows.count, self.seed)
        if len(self.split.pilot) < FEWEST_QUERY_WINDOWS:
            self.warnings.append(
                f"queries come from {len(self.split.pilot)} windows, and error bars from resampling these; "
                f"{FEWEST_QUERY_WINDOWS} or more are better, so give more text or shorter windows"
            )
        rest = np.setdiff1d(np.arange(windows.count), np.concatenate((self.split.pilot, self.split.reserved)))
        # A random order, so that a run cut short has read a random part of the corpus.
        order = np.random.default_rng(np.random.SeedSequence([self.seed, 0x9001])).permutation(rest)
        per_forward = self.batch or max(1, FORWARD // windows.length)
        block = options.block
        if self.loaded.model.device.type != "cpu":
            whole = len(order) * windows.length // block
            block = block if whole < 32 else min(options.device_block, block * (whole // 6))
            per_forward = self.batch or max(1, min(block, options.device_forward) // windows.length)
        per_block = per_forward * max(1, block // (per_forward * windows.length))
        self.pool = Pool(windows, order, per_forward, per_block, per_forward)
        self.total = (len(self.split.pilot) + len(order)) * windows.length
        self.done = 0

    def run(self, checkpoint: Checkpoint) -> None:
        """Run the model over the windows that give queries, then over those that samples are drawn from."""
        begun = time.perf_counter()
        job = checkpoint.begin(self._request())
        saved = None if job.saved is None else job.saved.position
        options, length = self.options, self.windows.length
        model = self.loaded.model
        window = options.activations * 4 * length * model.config.get_text_config().hidden_size  # bytes
        fits = options.windows_at_once(window, self.pool.per_forward, model.device, self.memory)
        self.pool = replace(self.pool, at_once=fits if saved is None else saved["at_once"])
        self._run_pilot()
        self.clock.model += time.perf_counter() - begun
        positions = len(self.pilot.positions)
        self.replicates = self.split.replicates(self.cells, self.replicates, self.sampling, positions, length)
        self.assignment = self._assignment(positions)
        if saved is None:
            part, forward = self.pool.at_once * positions, self.pool.at_once * window
            self.assignment.wait = options.tokens_waiting(self.pilot, self.assignment, part, forward, self.memory)
        else:
            self.assignment.wait = saved["wait"]
        special = int(self.windows.marked(self.pilot.positions).sum())
        self.assignment.marks = self.assignment.wait // positions * special
        self.collectors = {index: Collector(layer, self.assignment) for index, layer in self.pilot.layers.items()}
        with held_interrupt() as interrupt:
            interrupt.during(self._read_pool, job, interrupt)
            if interrupt.asked:
                self._cut_short()

    def _read_pool(self, job: Job, interrupt: Interrupt) -> None:
        """Run the model over the windows that samples are drawn from, here or on a cluster, or resume a saved `job`."""
        blocks, done, pool, collectors = self.assignment.assign_blocks(), 0, self.pool, self.collectors
        progress = BlockProgress()
        if job.saved is not None:
            done = int(job.saved.position["blocks"])
            progress.windows = int(job.saved.position["windows"])
            deque(islice(blocks, done), maxlen=0)  # assigns earlier tokens again, to restore the random state
            for index, collector in collectors.items():
                saved = under(f"layer{index}.", job.saved.tensors)
                for name, tensor in collector.tensors().items():
                    tensor.copy_(saved[name])
            self._report(done * pool.per_block * self.windows.length)

        def state() -> tuple[dict[str, Any], dict[str, Tensor]]:
            found = {f"layer{index}.": collector.tensors() for index, collector in collectors.items()}
            tensors = {layer + name: part for layer, parts in found.items() for name, part in parts.items()}
            known = {"windows": progress.windows, "at_once": pool.at_once, "wait": self.assignment.wait}
            return {"blocks": done, **known}, tensors

        complete = copy.copy(self.assignment)  # as it was after the last complete block

        def passed(count: int, save: bool = True) -> None:
            nonlocal done, complete
            done += count
            complete = copy.copy(self.assignment)
            if save:
                job.passed(sum(self.assignment.blocks[done - count : done]), state, interrupt)

        special, rest = self.windows.marked(self.pilot.positions), pool.indices[done * pool.per_block :]
        known: dict[str, Any] = {
            "clock": self.clock, "passed": passed, "interrupt": interrupt,
            "report": lambda tokens: interrupt.during(self._report, tokens),
        }  # fmt: skip
        if self.spread is not None:
            self.spread(self.loaded, pool, self.pilot, collectors, blocks, rest, special, **known)
            return
        try:
            run_blocks(
                self.loaded, self.pilot, collectors, blocks, self.windows.batches(pool.at_once, rest), special,
                pool.at_once, self.workers, warnings=self.warnings, progress=progress, **known,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            if isinstance(stop, StopNow) or not progress.begun:  # between two blocks the state has been saved
                raise
            self.assignment = complete  # samples end with the last complete block; tokens stored later are not used
            for collector in collectors.values():
                collector.assignment = complete
            job.passed(0, state, interrupt)

    def _run_pilot(self) -> None:
        """Run the model over the windows that give queries, in smaller batches if a GPU runs out of memory."""
        while not hasattr(self, "pilot"):
            try:
                self.pilot = run_pilot(
                    self.loaded, self.windows, self.split.pilot,
                    queries=self.queries, batch=self.pool.at_once, seed=self.seed, report=self._report,
                    score_scale=self.score_scale, precision=self.precision, check=self.spread is not None,
                    workers=self.workers, clusters=self.options.clusters,
                )  # fmt: skip
            except torch.cuda.OutOfMemoryError:
                self.pool = replace(self.pool, at_once=halved(self.pool.at_once, "windows", self.warnings))
        self.warnings += self.pilot.warnings(self.loaded, self.windows.length)
        if len(self.pilot.queries) < self.queries:
            self.warnings.append(
                f"the pilot's {len(self.split.pilot)} windows give {len(self.pilot.queries)} queries instead of "
                f"{self.queries}; more tokens give more"
            )

    def _assignment(self, positions: int) -> Assignment:
        count, each = len(self.pool.indices), self.pool.per_block
        blocks = [min(each, count - start) * positions for start in range(0, count, each)]
        known = (blocks, self.cells, self.replicates, self.seed)
        kept_step, whole = self.options.kept_step, self.options.whole_replicates
        if self.sampling == "pooled":
            return Assignment(*known, kept_step=kept_step, whole_replicates=whole)
        self.warnings.append("samples are of single documents; predictions beyond their sizes assume pooled samples")
        contiguous = self.sampling == "contiguous"
        return DocumentAssignment(*known, positions, contiguous, kept_step=kept_step, whole_replicates=whole)

    def _request(self) -> dict[str, Any]:
        """All inputs that determine the measurements; a checkpoint is resumed only if they are equal."""
        windows = self.windows
        text = {"text": windows.sha256, "tokens": windows.tokens, "window": windows.length, "special": windows.around}
        run = {"sizes": self.cells.sizes, "batch": self.pool.per_forward, "device": self.loaded.model.device}
        names = ("replicates", "queries", "score_scale", "seed", "memory", "sampling", "precision")
        arguments = {name: getattr(self, name) for name in names} | {"options": asdict(self.options)}
        return {"job": "probe", "model": self.loaded.name, "weights": self.loaded.digest, **text, **run, **arguments}

    def _report(self, tokens: int) -> None:
        self.done += tokens
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _cut_short(self) -> None:
        """After Ctrl-C, go on with the tokens read so far; raise KeyboardInterrupt if they do not reach every size."""
        filled, seen, total = self.assignment.filled, self.assignment.seen, sum(self.assignment.blocks)
        reached = np.rint(filled.cumsum(1).mean(0))
        if seen == 0 or (filled[:, 0] == 0).any() or (np.diff(reached) <= 0).any():
            raise KeyboardInterrupt
        self.interrupted = seen < total
        if self.interrupted:
            self.warnings.append(
                f"interrupted after {seen:,} of {total:,} pooled tokens: sizes are those reached by then, on average "
                "over replicates"
            )

    def result(self, begun: float, corpus: str, tokens: int) -> ProbeRun:
        """Measure every layer and return the `ProbeRun`; `begun` is `time.perf_counter()` at the start of the probe."""
        heads: list[HeadRecord] = []
        layers, floor = list[LayerRecord](), 0.0
        states: dict[str, Tensor] = {"query_places": torch.as_tensor(self.pilot.queries)}
        window, causal = self.windows.length, self.pilot.causal
        unread = 1 - self.assignment.seen / (self.windows.count * len(self.pilot.positions))
        measuring = time.perf_counter()
        short = self.memory is not None or self.loaded.model.device.type != "cpu"  # of memory
        list(self.workers(lambda collector: collector.settle(copy=short), self.collectors.values()))
        left = groups(self.collectors.values(), bounded=self.memory is not None)
        self.collectors.clear()

        def measure_group(place: int) -> list[Measured]:
            some, left[place] = left[place], []  # frees the collectors of each layer once it is measured
            return measure(some, window)

        for measured in chain.from_iterable(self.workers(measure_group, range(len(left)))):
            layer, geometry = measured.layer, measured.geometry
            heads += head_records(measured, causal, window, unread, self.seed)
            if (tails := geometry.tails) is not None:
                found = (tails.verdict, tails.variance_proxy, tails.pareto_norm)
                layers.append(LayerRecord(layer.index, geometry.tokens, *found))
            floor = max(floor, float(measured.detail.floor.max()))
            states |= _tensors(layer, measured.curves.reference)
        self.clock.attention += (now := time.perf_counter()) - measuring
        if self.sampling != "pooled":
            known = {"score_scale": self.score_scale, "seed": self.seed, "warnings": self.warnings}
            heads = with_contexts(heads, measure_contexts(self.loaded, self.windows, **known))  # type: ignore[arg-type]
        split, kernel = self.split, kernel_words(next(iter(self.pilot.layers.values())).query, self.precision)
        return ProbeRun(
            **self.pilot.source(self.loaded, self.windows), corpus=corpus, tokens=self.assignment.seen,
            tokens_asked=tokens,
            windows={
                "count": split.count, "pilot": split.pilot.tolist(), "reserved": split.reserved.tolist(),
                "pool": len(self.pool.indices),
            },
            sizes_asked=tuple(self.cells.sizes), replicates=self.replicates, replicates_asked=self.replicates_asked,
            records=tuple(heads), layer_records=tuple(layers), seed=self.seed, batch=self.pool.per_forward,
            floor=floor, interrupted=self.interrupted, warnings=tuple(self.warnings), reference=states,
            score_scale=self.score_scale, sampling=self.sampling, kernel=kernel,
            seconds={"model": self.clock.model, "attention": self.clock.attention, "total": now - begun},
        )  # fmt: skip


def _tensors(layer: Layer, reference: State) -> dict[str, Tensor]:
    """Tensors of a layer that are saved, (heads, m, ·): queries, attention over all tokens, and to the sink (atom)."""
    found = {"query": layer.flat_query, "reference.lse": reference.lse, "reference.output": reference.output}
    if layer.atom is not None:
        found |= {"atom.lse": layer.atom.lse, "atom.output": layer.atom.output}
    m = layer.query.shape[2]
    return {
        f"layer{layer.index}.{name}": tensor.reshape(-1, m, *tensor.shape[2:]).cpu().contiguous()
        for name, tensor in found.items()
    }
