"""Time and peak memory of a probe relative to plain forwards of the same model over the same windows.

Lower bound: the probe runs the model once over its pilot and its pool. In addition it needs, per token and layer,
2·256·(k + v) operations per query head: 10% of the forward's for minilm (12 heads of 32), 8% for smollm2 (9 heads of
64); then merging cells, diagnostics and fits. Seconds include everything but loading the model: wall time, and
processor time, which other processes disturb less (on one thread: OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench.peaks import peaks
from limitlens.errors import Array
from limitlens.models import ALIASES, LoadedModel, Windows, choose, load, open_corpus
from limitlens.probing.probe import PILOT, RESERVED, probe

# 129,000 tokens leave a pool of 99,840, which holds 24 replicates of 4,096. A decoder is some 15 times slower: fewer
# tokens for it, and smaller samples, of which as many fit.
CASES: dict[str, dict[str, Any]] = {
    "minilm": {"corpus": "stdlib-docs", "tokens": 129_000, "sizes": "64:4096:7"},
    "smollm2": {"corpus": "stdlib-docs", "tokens": 40_000, "sizes": "64:1024:5"},
}
REPLICATES, QUERIES, WINDOW = 24, 256, 256
BATCHES = (8, 16)  # windows of the bare forward, of which the faster is used; 4 and 32 are slower for both models
TRIAL = 32  # windows of the trial that chooses it
REPEATS = 3
WANTED = 1.3
MEMORY_TOKENS = (100_000, 400_000)  # with fewer than 80,000 not every buffer is full
CODE = """
import sys
from limitlens.probing.probe import probe
probe("minilm", "stdlib-code", int(sys.argv[1]), sizes="64:1024:5")
"""


def clocks() -> Array:
    """Wall time and processor time."""
    return np.array([time.perf_counter(), time.process_time()])


def bare_seconds(loaded: LoadedModel, corpus: str, tokens: int, batch: int) -> Array:
    """Seconds of the plain forward over the windows that the probe runs."""
    windows = Windows(loaded, open_corpus(corpus), length=WINDOW, tokens=tokens)
    _, reserved = choose(windows.count, (PILOT, RESERVED), 0)
    used = np.setdiff1d(np.arange(windows.count), reserved)
    started = clocks()
    with torch.inference_mode():
        for ids in windows.batches(batch, used):
            loaded.model(input_ids=ids)
    return clocks() - started


def fastest(loaded: LoadedModel, corpus: str) -> int:
    """Batch size with which plain forwards take the least processor time."""
    trials = [[bare_seconds(loaded, corpus, TRIAL * WINDOW, batch)[1] for batch in BATCHES] for _ in range(REPEATS)]
    return BATCHES[int(np.median(trials, 0).argmin())]


def against_forward(name: str, corpus: str, tokens: int, sizes: str) -> dict[str, Any]:
    """Median ratio of the time of a probe to the mean time of the plain forwards before and after it."""
    loaded = load(name)
    bare_seconds(loaded, corpus, 4 * WINDOW, 4)  # warm up
    batch = fastest(loaded, corpus)
    bare, probes, parts = [bare_seconds(loaded, corpus, tokens, batch)], [], []
    for _ in range(REPEATS):
        started = clocks()
        run = probe(loaded, corpus, tokens, window=WINDOW, sizes=sizes, replicates=REPLICATES, queries=QUERIES)
        probes.append(clocks() - started)
        parts.append(run.seconds)
        bare.append(bare_seconds(loaded, corpus, tokens, batch))
    ratios = [2 * seconds / (before + after) for seconds, before, after in zip(probes, bare, bare[1:], strict=False)]
    print(
        f"{name}: {len(run.records)} heads, {run.tokens:,} pooled tokens, {run.replicates} replicates, "
        f"n = {sizes}: bare forward of {batch} windows {', '.join(f'{seconds:.1f}' for seconds, _ in bare)} s, "
        f"probe {', '.join(f'{seconds:.1f}' for seconds, _ in probes)} s, "
        f"median ratio {np.median(ratios, 0)[0]:.2f} (wanted {WANTED}), of the processor {np.median(ratios, 0)[1]:.2f}",
        flush=True,
    )
    return {
        "heads": len(run.records),
        "tokens": tokens,
        "pooled_tokens": run.tokens,
        "replicates": run.replicates,
        "sizes": sizes,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "bare_seconds": [wall for wall, _ in bare],
        "probe_seconds": [wall for wall, _ in probes],
        "parts": parts,
        "ratios": [wall for wall, _ in ratios],
        "ratio": float(np.median(ratios, 0)[0]),
        "processor": {"bare": [s for _, s in bare], "probe": [s for _, s in probes], "ratios": [s for _, s in ratios]},
    }


def run() -> dict[str, object]:
    rows = {name: against_forward(name, **case) for name, case in CASES.items() if ALIASES[name].locate() is not None}
    found, ratio = peaks(CODE, MEMORY_TOKENS)
    return {"models": rows, "wanted": WANTED, "peak_mib": found, "peak_ratio": ratio}
