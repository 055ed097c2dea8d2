"""What depth costs: 64 sampled runs and a full one of each document, beside 65 bare forwards of the same model.

8 numbers of keys and 8 draws on documents of 512 tokens, once with keys that the queries of a document share and once
with each query's own. Bare forwards, four documents at a time, which is fastest, take turns with it: some after every
document. Processor seconds of one thread, in which a busy machine tells much the same, and wall-clock seconds beside
them; ratios are medians over documents.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from limitlens.live.depth import depth
from limitlens.models import Windows, load, open_corpus

MODEL, TEXT, WINDOW, KEYS, REPLICATES, DOCUMENTS = "minilm", "stdlib-docs", 512, "16:512:8", 8, 64
FORWARDS, TOGETHER, TURNS = 65, 4, 4
WANTED = {"shared": 1.2, "own": 2.0}


def clocks() -> dict[str, float]:
    return {"processor": time.process_time(), "wall": time.perf_counter()}


def beside(way: str, documents: int) -> dict[str, Any]:
    """Seconds of one run with all that it measures, over those of bare forwards, by document."""
    loaded = load(MODEL)
    windows = Windows(loaded, open_corpus(TEXT), length=WINDOW, tokens=documents * WINDOW)
    ratios: dict[str, list[float]] = {name: [] for name in clocks()}
    began = clocks()

    def turn(done: float, total: float) -> None:
        nonlocal began
        taken = {name: now - began[name] for name, now in clocks().items()}
        first = min(int(done) - 1, documents - TOGETHER)
        (ids,) = windows.batches(TOGETHER, range(first, first + TOGETHER))
        before = clocks()
        with torch.inference_mode():
            for _ in range(TURNS):
                loaded.model(input_ids=ids)
        for name, now in clocks().items():
            ratios[name].append(taken[name] / ((now - before[name]) / (TURNS * TOGETHER) * FORWARDS))
        began = clocks()

    depth(
        loaded, TEXT, KEYS, ways=[way], beside=[], replicates=REPLICATES, documents=documents,
        window=WINDOW, progress=turn,
    )  # fmt: skip
    found = {name: statistics.median(each[1:]) for name, each in ratios.items()}  # the first warms up
    print(f"  {way}: {found['processor']:.3f} of bare forwards in processor time, {found['wall']:.3f} by the wall "
          f"({documents} documents, at most {WANTED[way]} wanted)", flush=True)  # fmt: skip
    return {"ratio": found, "documents": documents, "wanted": WANTED[way]}


def run(documents: int = DOCUMENTS) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {way: beside(way, documents) for way in WANTED}
    finally:
        torch.set_num_threads(threads)
