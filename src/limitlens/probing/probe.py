"""Every head of a real transformer in one pass over a corpus.

A pilot over a few random windows gives the queries. Then the model runs once over the pool; each layer's keys and
values are dealt at random to cells (replicate, size step) as they pass, so that all sizes and replicates, and the
reference, come from the one forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import Precision, as_precision, kernel_words
from limitlens.attention.state import State
from limitlens.cost import check_cost
from limitlens.errors import InputError, Progress, check_number, check_seed
from limitlens.models import Windows, choose
from limitlens.models.catalog import LoadedModel
from limitlens.models.opening import FORWARD, open_windows
from limitlens.probing.build import Measured, head_records, measure
from limitlens.probing.collect import Collector
from limitlens.probing.distributed import gather
from limitlens.probing.joining import groups
from limitlens.probing.memory_plan import waiting, window_bytes, windows_at_once
from limitlens.probing.overview import LayerRecord
from limitlens.probing.pilot import Layer, run_pilot
from limitlens.probing.record import HeadRecord
from limitlens.probing.regimes import Thresholds
from limitlens.probing.result import ProbeRun
from limitlens.probing.stream import Pool, stream
from limitlens.sampling.assignment import KEPT_STEP, Assignment
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.clock import Clock
from limitlens.sampling.documents import SAMPLINGS, DocumentAssignment
from limitlens.sampling.interrupt import held_interrupt
from limitlens.sampling.memory import halved
from limitlens.sampling.workers import Workers, workers_for

BLOCK = 1 << 14  # tokens dealt at a time: enough for every large cell to get some, few enough to wait in memory
# The same on a GPU, where launches cost as much for few tokens as for many and states are merged once a block: from 32
# of the small ones on a sixth of the pool, this at most; and tokens a forward at most.
DEVICE_BLOCK, DEVICE_FORWARD = 1 << 19, 1 << 18
PILOT, RESERVED = 0.05, 0.10  # shares of the windows for queries and for checking plans
# Windows that give queries, whatever the share: so many where they are a quarter of all at most, and a quarter of them
# where that is two fifths. Error bars come from resampling them, and most of what a run misses is their choice.
QUERY_WINDOWS = 64
# Operations a second of one thread, in the model and over queries, and its seconds for all else of a head: measured for
# two models (docs/reliability.md). A device does as much as so many threads, at least.
FORWARDS, ATTENDING, A_HEAD, THREADS = 6e10, 2.5e10, 0.08, 40
FEWEST_REPLICATES = 2  # error bars come from the scatter of replicates


def probe(
    model: str | LoadedModel,
    corpus: str = "stdlib-docs",
    tokens: int = 100_000,
    *,
    window: int | None = None,
    special: str = "auto",
    sizes: str | Sequence[int] = "64:4096:7",
    replicates: int = 24,
    queries: int = 256,
    score_scale: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    batch: int | None = None,
    thresholds: Thresholds | None = None,
    yes: bool = False,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    memory: int | None = None,
    ray: str | None = None,
    sampling: str = "pooled",
    precision: str = "accurate",
) -> ProbeRun:
    """Measure every head of a model on a corpus: `run.heads`, `run.layers`, `run.document()`.

    Parameters
    ----------
    model : an alias, a folder, a GGUF file, a hub id (`limitlens.models.load`), or a model that is loaded
    corpus : a built-in text, a file, a folder or a hub dataset (`limitlens.models.open_corpus`)
    tokens : to read; 5% of their windows, or 64, give queries, 10% are reserved for checking plans, the rest is pooled
    window : tokens a window; 256, or the model's positions where these are fewer
    special : tokens put around each window: "auto" as the model was trained, "none", or "bos", its first token alone
    sizes : sample sizes n, as they are or as "lo:hi:k"
    replicates : disjoint samples behind every point; as many as the pool holds where these are fewer
    queries : queries a head
    score_scale : multiplies every head's scores as they are looked at; the model's own forward is left as it is
    device : auto, cpu or cuda: where a model that is given by name is loaded; one that is loaded stays where it is
    batch : windows a forward; about 4,000 tokens when left out
    thresholds : where one regime ends and the next begins
    yes : begin even where it takes more than a day, or more memory than there is (`limitlens.cost`)
    progress : called with (tokens done, tokens in all); on Ctrl-C the run ends with what it has
    checkpoint : where the run is kept as it goes, for the same call to go on from (`limitlens.Checkpoint`)
    memory : bytes that the process may hold (on a GPU: there); blocks are made to fit, and tokens dealt as without
    ray : "auto" or the HOST:PORT of a Ray cluster over whose workers the windows are spread
    sampling : samples of all windows ("pooled"), of single windows at random places ("document"), or runs of
        their tokens ("contiguous"), all against the limit of the pool
    precision : of attention on a GPU: "accurate", to about 1e-6; "fast", to 1e-3; "exact", plain float32, slow

    Examples
    --------
    >>> run = ll.probe(model, corpus=text, tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16)
    >>> len(run.heads), len(run.curves)
    (12, 36)
    """
    begun = time.perf_counter()
    cells = Cells(parse_sizes(sizes))
    fewest = f"at least {FEWEST_REPLICATES}, for the error bars"
    check_number("replicates", replicates, fewest, low=FEWEST_REPLICATES)
    check_number("queries", queries, "at least 2, such as 256", low=2)
    check_number("score_scale", score_scale, "a positive number, such as 2.0", closed=False)
    check_number("batch", 1 if batch is None else batch, "at least 1 window a forward", low=1)
    check_seed(seed)
    if sampling not in SAMPLINGS:
        raise InputError(f"sampling is {sampling!r}; expected one of {', '.join(SAMPLINGS)}")
    accuracy = as_precision(precision)
    loaded, windows = open_windows(model, corpus, tokens, window=window, special=special, device=device)
    with workers_for(loaded.model.device) as workers:
        over = stream if ray is None else partial(gather, ray, device, model)
        work = _Work(
            loaded, windows, cells, replicates, queries, score_scale, seed, batch, memory, progress, workers, over,
            sampling, accuracy,
        )  # fmt: skip
        work.check_size(windows.length)  # refused before it is said what would be
        check_cost("the probe", *_cost(loaded, windows, cells, replicates, queries), yes=yes)
        work.run(checkpoint or Checkpoint())
        return work.result(begun, corpus, tokens, thresholds or Thresholds())


def _cost(loaded: LoadedModel, windows: Windows, cells: Cells, replicates: int, queries: int) -> tuple[float, float]:
    """Seconds and bytes, from counts alone.

    A token takes 2 operations for each weight, but for embeddings, which are looked up, and 4 for each number of its
    keys and each token of its window, or in attention each query.
    """
    of, config = loaded.model, loaded.model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    width = float(getattr(config, "hidden_size", 1) * layers)
    tables = (part for part in of.modules() if isinstance(part, torch.nn.Embedding))
    weights = sum(part.numel() for part in of.parameters()) - sum(table.weight.numel() for table in tables)
    threads = torch.get_num_threads() if of.device.type == "cpu" else THREADS
    a_token = (2 * weights + 4 * windows.length * width) / FORWARDS + 4 * queries * width / ATTENDING
    seconds = (windows.tokens * a_token + A_HEAD * layers * getattr(config, "num_attention_heads", 1)) / threads
    kept = sum(step for step in cells.steps if step <= KEPT_STEP)  # tokens whose keys and values are kept
    states = 1 + replicates * sum(step > KEPT_STEP for step in cells.steps)
    return seconds, 8 * width * (queries * states + replicates * kept)


@dataclass
class _Work:
    """One probe while it runs."""

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
    over: Callable[..., None]  # `stream`, or `gather` on a cluster
    sampling: str  # one of `SAMPLINGS`
    precision: Precision = "accurate"
    warnings: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    interrupted: bool = False

    def __post_init__(self) -> None:
        windows, self.asked = self.windows, self.replicates
        self.warnings += windows.warnings
        few = QUERY_WINDOWS // 4
        wanted = max(min(QUERY_WINDOWS, windows.count // 4), min(few, windows.count * 2 // 5))
        self.pilot_share = max(PILOT, wanted / windows.count)
        self.pilot_windows, self.reserved = choose(windows.count, (self.pilot_share, RESERVED), self.seed)
        if len(self.pilot_windows) < few:
            said = f"queries come from {len(self.pilot_windows)} windows, and error bars from resampling these"
            self.warnings.append(f"{said}; {few} or more are better, so give more text or shorter windows")
        rest = np.setdiff1d(np.arange(windows.count), np.concatenate((self.pilot_windows, self.reserved)))
        # A random order, so that a run cut short has read a random part of the corpus.
        order = np.random.default_rng(np.random.SeedSequence([self.seed, 0x9001])).permutation(rest)
        per_forward = self.batch or max(1, FORWARD // windows.length)
        block = BLOCK
        if self.loaded.model.device.type != "cpu":
            whole = len(order) * windows.length // BLOCK
            block = BLOCK if whole < 32 else min(DEVICE_BLOCK, BLOCK * (whole // 6))
            per_forward = self.batch or max(1, min(block, DEVICE_FORWARD) // windows.length)
        per_block = per_forward * max(1, block // (per_forward * windows.length))
        self.pool = Pool(windows, order, per_forward, per_block, per_forward, self.workers)
        self.total = (len(self.pilot_windows) + len(order)) * windows.length
        self.done = 0

    def run(self, checkpoint: Checkpoint) -> None:
        begun, job = time.perf_counter(), checkpoint.begin(self._asked())
        at = None if job.saved is None else job.saved.position
        window, device = window_bytes(self.loaded, self.windows.length), self.loaded.model.device
        fits = windows_at_once(window, self.pool.per_forward, device, self.memory)
        self.pool = replace(self.pool, at_once=fits if at is None else at["at_once"])
        while not hasattr(self, "pilot"):
            try:
                self.pilot = run_pilot(
                    self.loaded, self.windows, self.pilot_windows,
                    queries=self.queries, batch=self.pool.at_once, seed=self.seed, report=self._report,
                    score_scale=self.score_scale, precision=self.precision, check=self.over is not stream,
                    workers=self.workers,
                )  # fmt: skip
            except torch.cuda.OutOfMemoryError:
                self.pool = replace(self.pool, at_once=halved(self.pool.at_once, "windows", self.warnings))
        self.clock.model += time.perf_counter() - begun
        positions = len(self.pilot.positions)
        self.replicates = self.check_size(positions)
        if len(self.pilot.queries) < self.queries:
            self.warnings.append(
                f"the pilot's {len(self.pilot_windows)} windows give {len(self.pilot.queries)} queries instead of "
                f"{self.queries}; more tokens give more"
            )
        dealt = (self.pool.blocks(positions), self.cells, self.replicates, self.seed)
        single = self.sampling != "pooled"
        if single:
            self.warnings.append("samples are of single documents; beyond their sizes the law of the pool is followed")
        in_order = self.sampling == "contiguous"
        self.deck = DocumentAssignment(*dealt, positions, in_order) if single else Assignment(*dealt)
        part, forward = self.pool.at_once * positions, self.pool.at_once * window
        self.deck.wait = waiting(self.pilot, self.deck, part, forward, self.memory) if at is None else at["wait"]
        self.deck.marks = self.deck.wait // positions * int(self.windows.marked(self.pilot.positions).sum())
        layers = self.pilot.layers.items()
        self.collectors = {index: Collector(layer, self.deck) for index, layer in layers}
        with held_interrupt() as interrupt:
            try:
                self.over(
                    self.loaded, self.pool, self.pilot, self.deck, self.collectors,
                    clock=self.clock, interrupt=interrupt, report=self._report, job=job,
                    warnings=self.warnings,
                )  # fmt: skip
            except KeyboardInterrupt:
                if interrupt.again:  # in the middle of a block, which is no deal
                    raise
                self._cut_short()

    def _asked(self) -> dict[str, Any]:
        """What the measurements depend on."""
        windows = self.windows
        names = ("replicates", "queries", "score_scale", "seed", "memory", "sampling", "precision")
        text = {"text": windows.sha256, "tokens": windows.tokens, "window": windows.length, "special": windows.around}
        own = {"sizes": self.cells.sizes, "batch": self.pool.per_forward, "device": self.loaded.model.device}
        given = {name: getattr(self, name) for name in names}
        return {"job": "probe", "model": self.loaded.name, "weights": self.loaded.digest, **text, **own, **given}

    def check_size(self, positions: int) -> int:
        """How many replicates the pool holds with so many pooled positions a window."""
        largest, pool = self.cells.sizes[-1], len(self.pool.indices) * positions
        if self.sampling != "pooled":
            if largest > positions:
                raise InputError(
                    f"the largest size is {largest:,} and a document has {positions:,} tokens to draw from; expected "
                    "at most as many, so ask for smaller sizes or a longer window"
                )
            return min(self.replicates, len(self.pool.indices))
        if pool < FEWEST_REPLICATES * largest:
            share = (1 - self.pilot_share - RESERVED) * positions / self.windows.length
            needed = int(np.ceil(FEWEST_REPLICATES * largest / share))
            raise InputError(
                f"the largest size is {largest:,} and {self.windows.tokens:,} tokens leave {pool:,} to draw from; "
                f"expected room for {FEWEST_REPLICATES} samples, so ask for about {needed:,} tokens or smaller sizes"
            )
        return min(self.replicates, pool // largest)

    def _measured(self, window: int) -> Iterator[Measured]:
        """The measurements of every layer, in order; what a layer holds is let go once it was measured."""
        left = groups(self.collectors.values(), bounded=self.memory is not None)
        self.collectors.clear()

        def of(place: int) -> list[Measured]:
            some, left[place] = left[place], []
            return measure(some, window)

        yield from chain.from_iterable(self.workers(of, range(len(left))))

    def _kernel(self) -> str:
        """What attention was computed with, in words."""
        layer = next(iter(self.pilot.layers.values()))
        return kernel_words(layer.query, self.precision)

    def _report(self, tokens: int) -> None:
        self.done += tokens
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _cut_short(self) -> None:
        """Go on with what was dealt so far, where that is a sample of every size."""
        reached = np.rint(self.deck.filled.cumsum(1).mean(0))
        if self.deck.seen == 0 or (self.deck.filled[:, 0] == 0).any() or (np.diff(reached) <= 0).any():
            raise KeyboardInterrupt
        self.interrupted = self.deck.seen < sum(self.deck.blocks)
        if self.interrupted:
            self.warnings.append(
                f"interrupted after {self.deck.seen:,} of {sum(self.deck.blocks):,} pooled tokens: sizes are those "
                "reached by then, on average over replicates"
            )

    def result(self, begun: float, corpus: str, tokens: int, thresholds: Thresholds) -> ProbeRun:
        """Every layer's measurements and what follows from them; `begun` is when the clock was started."""
        heads: list[HeadRecord] = []
        layers: list[LayerRecord] = []
        floor = 0.0
        states: dict[str, Tensor] = {"query_places": torch.as_tensor(self.pilot.queries)}
        window, causal = self.windows.length, self.pilot.causal
        measuring = time.perf_counter()
        room = self.memory is not None or self.loaded.model.device.type != "cpu"  # where it is short
        list(self.workers(lambda collector: collector.settle(room), self.collectors.values()))
        for measured in self._measured(window):
            layer, geometry = measured.layer, measured.geometry
            heads += head_records(measured, causal=causal, window=window, thresholds=thresholds, seed=self.seed)
            if (tails := geometry.tails) is not None:
                found = (tails.verdict, tails.variance_proxy, tails.pareto_norm, tails.pareto_norm_stderr)
                layers.append(LayerRecord(layer.index, geometry.tokens, *found))
            floor = max(floor, float(measured.detail.floor.max()))
            states |= _tensors(layer, measured.curves.reference)
        now = time.perf_counter()
        self.clock.attention += now - measuring
        loaded, windows = self.loaded, self.windows
        return ProbeRun(
            model=loaded.name, model_revision=loaded.revision, model_sha256=loaded.sha256,
            model_note=loaded.note or None, causal=causal, corpus=corpus, corpus_sha256=windows.sha256,
            tokens=self.deck.seen, tokens_asked=tokens, window=window,
            windows={
                "count": windows.count, "pilot": self.pilot_windows.tolist(), "reserved": self.reserved.tolist(),
                "pool": len(self.pool.indices),
            },
            pooled_positions=(self.pilot.positions.start, self.pilot.positions.stop),
            sizes_asked=tuple(self.cells.sizes), replicates=self.replicates, replicates_asked=self.asked,
            queries=len(self.pilot.queries), thresholds=thresholds, records=tuple(heads), layer_records=tuple(layers),
            seed=self.seed, batch=self.pool.per_forward, device=str(loaded.model.device), floor=floor,
            interrupted=self.interrupted, warnings=tuple(self.warnings), reference=states,
            special=windows.around, score_scale=self.score_scale, sampling=self.sampling, kernel=self._kernel(),
            seconds={"model": self.clock.model, "attention": self.clock.attention, "total": now - begun},
        )  # fmt: skip


def _tensors(layer: Layer, reference: State) -> dict[str, Tensor]:
    """The reference of a layer, its queries and its atom, heads in order: (heads, m, ·)."""
    found = {"query": layer.flat_query, "reference.lse": reference.lse, "reference.output": reference.output}
    if layer.atom is not None:
        found |= {"atom.lse": layer.atom.lse, "atom.output": layer.atom.output}
    m = layer.query.shape[2]
    return {
        f"layer{layer.index}.{name}": tensor.reshape(-1, m, *tensor.shape[2:]).cpu().contiguous()
        for name, tensor in found.items()
    }
