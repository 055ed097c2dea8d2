"""Every head of a real transformer in one pass over a corpus.

A pilot over a few random windows gives the queries. Then the model runs once over the pool; each layer's keys and
values are dealt at random to cells (replicate, size step) as they pass, so that all sizes and replicates, and the
reference, come from the one forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from limitlens.attention.state import State
from limitlens.convergence.study import choose_device
from limitlens.diagnose.collect import Block, Collector
from limitlens.diagnose.curves import LayerCurves, layer_curves
from limitlens.diagnose.deck import Deck
from limitlens.diagnose.detail import layer_detail
from limitlens.diagnose.geometry import layer_geometry
from limitlens.diagnose.head_record import Measured, head_records
from limitlens.diagnose.interrupt import Interrupt, held_interrupt
from limitlens.diagnose.pilot import Layer, run_pilot
from limitlens.diagnose.regimes import Thresholds
from limitlens.diagnose.run import ProbeRun
from limitlens.diagnose.summary import layer_record, rate_skill, summary
from limitlens.errors import InputError
from limitlens.models import Captured, Windows, capture, choose, load, open_corpus
from limitlens.models.catalog import LoadedModel
from limitlens.sampling.cells import Cells, parse_sizes

BLOCK = 1 << 14  # tokens a forward: enough for every cell to get some, few enough to bound memory
WINDOW = 256  # tokens a window, unless the model has fewer positions
PILOT, RESERVED = 0.05, 0.10  # shares of the windows for queries and for checking plans
FEWEST_REPLICATES = 2  # error bars come from the scatter of replicates

Progress = Callable[[float, float], None]


def probe(
    model: str | LoadedModel,
    corpus: str = "stdlib-docs",
    tokens: int = 100_000,
    *,
    window: int | None = None,
    sizes: str | Sequence[int] = "64:4096:7",
    replicates: int = 24,
    queries: int = 256,
    seed: int = 0,
    device: str = "auto",
    batch: int | None = None,
    thresholds: Thresholds | None = None,
    progress: Progress | None = None,
) -> ProbeRun:
    """Measure every head of a model on a corpus.

    Parameters
    ----------
    model : str or LoadedModel
        An alias, a folder, a GGUF file, a hub id (`limitlens.models.load`), or a model that is loaded.
    corpus : str
        A built-in text, a file, a folder or a hub dataset (`limitlens.models.open_corpus`).
    tokens : int
        Tokens to read, special tokens included: 5% of their windows give queries, 10% are reserved for checking plans,
        the rest is the pool.
    window : int, optional
        Tokens a window; 256, or the model's positions where these are fewer.
    sizes : "lo:hi:k" or sequence of int
        Sample sizes n.
    replicates : int
        Disjoint samples behind every point; as many as the pool holds where these are fewer.
    queries : int
        Queries a head.
    device : str
        auto, cpu or cuda: where a model that is given by name is loaded; one that is loaded stays where it is.
    batch : int, optional
        Windows a forward; about 16,000 tokens when left out. The deal of tokens depends on it.
    thresholds : Thresholds, optional
        Where one regime ends and the next begins.
    progress : callable, optional
        Called with (tokens done, tokens in all). On Ctrl-C the run ends with what it has.

    Returns
    -------
    run
        `run.heads`, `run.layers`, `run.document()`, `run.save(folder)`, `run.plan(error=0.05)`.
    """
    started = datetime.now(UTC)
    cells = Cells(parse_sizes(sizes))
    if replicates < FEWEST_REPLICATES:
        raise InputError(f"replicates is {replicates}; expected at least {FEWEST_REPLICATES}, for the error bars")
    if queries < 2:
        raise InputError(f"queries is {queries}; expected at least 2, such as 256")
    if batch is not None and batch < 1:
        raise InputError(f"batch is {batch}; expected at least 1 window a forward")
    text, where = open_corpus(corpus), choose_device(device)
    loaded = load(model, device=where) if isinstance(model, str) else model
    length = min(WINDOW, loaded.positions or WINDOW) if window is None else window
    windows = Windows(loaded, text, length=length, tokens=tokens)
    work = _Work(loaded, windows, cells, replicates, queries, seed, batch, progress)
    work.run()
    return work.result(started, corpus, tokens, thresholds or Thresholds())


@dataclass
class _Clock:
    """Seconds spent in the model and in attention over its keys."""

    model: float = 0.0
    attention: float = 0.0


@dataclass
class _Work:
    """One probe while it runs."""

    loaded: LoadedModel
    windows: Windows
    cells: Cells
    replicates: int
    queries: int
    seed: int
    batch: int | None
    progress: Progress | None
    warnings: list[str] = field(default_factory=list)
    clock: _Clock = field(default_factory=_Clock)
    interrupted: bool = False

    def __post_init__(self) -> None:
        windows, self.asked = self.windows, self.replicates
        self.warnings += windows.warnings
        self.pilot_windows, self.reserved = choose(windows.count, (PILOT, RESERVED), self.seed)
        rest = np.setdiff1d(np.arange(windows.count), np.concatenate((self.pilot_windows, self.reserved)))
        # A random order, so that a run cut short has read a random part of the corpus.
        self.pool_windows = np.random.default_rng(np.random.SeedSequence([self.seed, 0x9001])).permutation(rest)
        self.per_forward = self.batch or max(1, BLOCK // windows.length)
        self.total = (len(self.pilot_windows) + len(self.pool_windows)) * windows.length
        self.done = 0

    def run(self) -> None:
        self._check_size(self.windows.length)
        begun = time.perf_counter()
        self.pilot = run_pilot(
            self.loaded,
            self.windows,
            self.pilot_windows,
            queries=self.queries,
            batch=self.per_forward,
            seed=self.seed,
            report=self._report,
        )
        self.clock.model += time.perf_counter() - begun
        positions = len(self.pilot.positions)
        self.replicates = self._check_size(positions)
        if len(self.pilot.queries) < self.queries:
            self.warnings.append(
                f"the pilot's {len(self.pilot_windows)} windows give {len(self.pilot.queries)} queries instead of "
                f"{self.queries}; more tokens give more"
            )
        blocks = [
            min(self.per_forward, len(self.pool_windows) - start) * positions
            for start in range(0, len(self.pool_windows), self.per_forward)
        ]
        self.deck = Deck(blocks, self.cells, self.replicates, self.seed)
        self.collectors = {index: Collector(layer, self.deck) for index, layer in self.pilot.layers.items()}
        with held_interrupt() as interrupt:
            try:
                self._stream(interrupt)
            except KeyboardInterrupt:
                self._cut_short()

    def _stream(self, interrupt: Interrupt) -> None:
        """The one forward over the pool, block by block."""
        length, device = self.windows.length, self.loaded.model.device
        positions = np.arange(self.pilot.positions.start, self.pilot.positions.stop)
        ends = [*range(len(self.windows.prefix)), *range(length - len(self.windows.suffix), length)]
        special = np.isin(positions, ends)
        block: Block

        def take(captured: Captured) -> None:
            begun = time.perf_counter()
            self.collectors[captured.layer].add(captured, block)
            self.clock.attention += time.perf_counter() - begun

        with torch.inference_mode(), capture(self.loaded.model, take, hidden=True):
            batches = self.windows.batches(self.per_forward, self.pool_windows)
            for ids, hand in zip(batches, self.deck.hands(), strict=True):
                places = (np.arange(len(ids))[:, None] * length + positions).ravel()
                block = Block(
                    hand,
                    rows=torch.as_tensor(places[hand.order], device=device),
                    special=torch.as_tensor(places[np.tile(special, len(ids))], device=device),
                    positions=slice(int(positions[0]), int(positions[-1]) + 1),
                )
                begun, before = time.perf_counter(), self.clock.attention
                self.loaded.model(input_ids=ids.to(device))
                self.clock.model += time.perf_counter() - begun - (self.clock.attention - before)
                self._report(ids.numel())
                interrupt.check()

    def _check_size(self, positions: int) -> int:
        """How many replicates the pool holds with so many pooled positions a window."""
        largest, pool = self.cells.sizes[-1], len(self.pool_windows) * positions
        if pool < FEWEST_REPLICATES * largest:
            share = len(self.pool_windows) / self.windows.count * positions / self.windows.length
            needed = int(np.ceil(FEWEST_REPLICATES * largest / max(share, 1e-9)))
            raise InputError(
                f"the largest size is {largest:,} and {self.windows.tokens:,} tokens leave {pool:,} to draw from; "
                f"expected room for {FEWEST_REPLICATES} samples, so ask for about {needed:,} tokens or smaller sizes"
            )
        return min(self.replicates, pool // largest)

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

    def result(self, started: datetime, corpus: str, tokens: int, thresholds: Thresholds) -> ProbeRun:
        """Every layer's measurements, one layer after the other, and what follows from them."""
        heads: list[dict[str, Any]] = []
        layers: list[dict[str, Any]] = []
        errors: list[pd.DataFrame] = []
        floors: list[float] = []
        states: dict[str, Tensor] = {"query_places": torch.as_tensor(self.pilot.queries)}
        window, causal = self.windows.length, self.pilot.causal
        for index in list(self.collectors):
            begun = time.perf_counter()
            collector = self.collectors.pop(index)
            measured = measure(collector)
            self.clock.attention += time.perf_counter() - begun
            records = head_records(measured, causal=causal, window=window, thresholds=thresholds, seed=self.seed)
            heads += records
            layers.append(layer_record(index, records, measured.geometry))
            errors.append(replicate_table(index, measured.curves))
            floors.append(measured.detail.floor)
            states |= _tensors(collector.layer, measured.curves.reference)
        finished = datetime.now(UTC)
        result = {
            "model": self.loaded.name,
            "model_revision": self.loaded.revision,
            "model_sha256": self.loaded.sha256,
            "model_note": self.loaded.note or None,
            "causal": causal,
            "corpus": corpus,
            "corpus_sha256": self.windows.sha256,
            "tokens": self.deck.seen,
            "tokens_asked": tokens,
            "window": window,
            "windows": {
                "count": self.windows.count,
                "pilot": self.pilot_windows,
                "reserved": self.reserved,
                "pool": len(self.pool_windows),
            },
            "pooled_positions": [self.pilot.positions.start, self.pilot.positions.stop],
            "sizes_asked": self.cells.sizes,
            "n": heads[0]["n"],
            "replicates": self.replicates,
            "replicates_asked": self.asked,
            "queries": len(self.pilot.queries),
            "thresholds": asdict(thresholds),
            "heads": heads,
            "layers": layers,
            "summary": summary(heads) | {"rates": rate_skill(heads)},
            "seed": self.seed,
            "batch": self.per_forward,
            "device": str(self.loaded.model.device),
            "floor": max(floors),
            "interrupted": self.interrupted,
            "seconds": {
                "model": self.clock.model,
                "attention": self.clock.attention,
                "total": (finished - started).total_seconds(),
            },
            "warnings": self.warnings,
        }
        return ProbeRun(result, pd.concat(errors, ignore_index=True), states, started)


def measure(collector: Collector) -> Measured:
    """All measurements of a layer that has seen the pool."""
    with torch.inference_mode():
        curves = layer_curves(collector)
        share = torch.exp(collector.special.lse - curves.reference.lse)
        special = np.asarray(share.reshape(-1, collector.layer.query.shape[2]).mean(-1).cpu())
        return Measured(collector.layer, curves, layer_detail(collector), layer_geometry(collector), special)


def replicate_table(layer: int, curves: LayerCurves) -> pd.DataFrame:
    """Every replicate's relative errors: layer, head, replicate, n, relative_output_error, and without the sink."""
    main = curves.bare if curves.atomic is None else curves.atomic
    head, replicate, size = (index.ravel() for index in np.indices(main.errors.shape))
    table = {
        "layer": layer,
        "head": head,
        "replicate": replicate,
        "n": curves.counts[replicate, size],
        "relative_output_error": main.relative.ravel(),
    }
    if curves.atomic is not None:
        table["relative_output_error_without_sink"] = curves.bare.relative.ravel()
    return pd.DataFrame(table)


def _tensors(layer: Layer, reference: State) -> dict[str, Tensor]:
    """The reference of a layer, its queries and its atom, heads in order: (heads, m, ·)."""
    shared, groups, m, _ = layer.query.shape

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.reshape(shared * groups, m, *tensor.shape[2:]).cpu().contiguous()

    prefix = f"layer{layer.index}."
    tensors = {
        "query": by_head(layer.flat_query),
        "reference.lse": by_head(reference.lse),
        "reference.output": by_head(reference.output),
    }
    if layer.atom is not None:
        tensors |= {"atom.lse": by_head(layer.atom.lse), "atom.output": by_head(layer.atom.output)}
    return {prefix + name: tensor for name, tensor in tensors.items()}
