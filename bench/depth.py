"""Cost of `limitlens.depth`: 64 sampled forwards and a full one per document, relative to 65 plain forwards.

8 numbers of keys and 8 draws on documents of 512 tokens, with keys shared by the queries of a document and with own
keys of each query. Plain forwards of four documents at a time (the fastest batch) alternate with `depth` after every
document. Measured in processor seconds of one thread, which depend little on other load, and in wall-clock seconds;
ratios are medians over documents. Also checks that random keys of a pooled text give every head the error that a probe
measures.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from limitlens.interventions.depth import depth
from limitlens.interventions.sampled_keys import SampledKeys
from limitlens.models import Captured, Windows, capture, load, open_corpus
from limitlens.models.intervene import attend
from limitlens.probing.probe import probe

MODEL, TEXT, WINDOW, KEYS, REPLICATES, DOCUMENTS = "minilm", "stdlib-docs", 512, "16:512:8", 8, 64
FORWARDS, TOGETHER, TURNS = 65, 4, 4
WANTED = {"shared": 1.2, "own": 2.0}


def clocks() -> dict[str, float]:
    return {"processor": time.process_time(), "wall": time.perf_counter()}


def beside(way: str, documents: int) -> dict[str, Any]:
    """Seconds of a run of `depth` relative to plain forwards, by document."""
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
        loaded, TEXT, KEYS, key_sharing=way, include=[], replicates=REPLICATES, documents=documents,
        window=WINDOW, progress=turn,
    )  # fmt: skip
    found = {name: statistics.median(each[1:]) for name, each in ratios.items()}  # the first warms up
    print(f"  {way}: {found['processor']:.3f} of plain forwards in processor time, {found['wall']:.3f} by the wall "
          f"({documents} documents, at most {WANTED[way]} wanted)", flush=True)  # fmt: skip
    return {"ratio": found, "documents": documents, "wanted": WANTED[way]}


def beside_probe(windows_pooled: int = 24, draws: int = 64) -> dict[str, Any]:
    """Errors of every head with n random keys of a pooled text, relative to those of a probe."""
    loaded, length, sizes = load(MODEL), 256, (16, 64, 256)
    probed = probe(loaded, TEXT, 30_000, window=length, sizes=[16, 32, 64, 128, 256], replicates=16)
    windows, generator = Windows(loaded, open_corpus(TEXT), length=length, tokens=120 * length), torch.Generator()
    (ids,) = windows.batches(windows_pooled, np.linspace(0, 119, windows_pooled).astype(int))
    found: list[tuple[int, float, float]] = []

    def take(call: Captured) -> None:
        query, key, value = (part.transpose(0, 1).flatten(1, 2)[None] for part in (call.query, call.key, call.value))
        pooled = replace(call, query=query[:, :, ::48], key=key, value=value)
        full = attend(pooled)
        for size in sizes:
            errors = [attend(SampledKeys(size, generator)(pooled)) - full for _ in range(draws)]
            squares = torch.stack([one.square().sum(-1).mean((0, 2)) for one in errors])
            squares = squares / full.square().sum(-1).mean((0, 2)) / (1 - size / key.shape[2])
            mine, spread = squares.mean(0).sqrt(), squares.std(0) / draws**0.5 / (2 * squares.mean(0).sqrt())
            for head in range(len(mine)):
                record = probed.head(call.layer, head).document()
                at = record["n"].index(size)
                theirs, stderr = (record[f"relative_output_error{end}"][at] for end in ("", "_stderr"))
                z = (float(mine[head]) - theirs) / np.hypot(float(spread[head]), stderr)
                found.append((size, float(mine[head]) / theirs, z))

    with torch.inference_mode(), capture(loaded.model, take):
        loaded.model(input_ids=ids)
    told = {}
    for size in sizes:
        ratios, z = (np.array([row[part] for row in found if row[0] == size]) for part in (1, 2))
        told[size] = {"median_ratio": float(np.median(ratios)), "within_two": float((np.abs(z) < 2).mean())}
        print(f"  {size} keys: {told[size]['median_ratio']:.3f} of the probe's error, median over {len(z)} heads; "
              f"{told[size]['within_two']:.2f} of them within two standard errors", flush=True)  # fmt: skip
    return told


def run(documents: int = DOCUMENTS) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {**{way: beside(way, documents) for way in WANTED}, "probe": beside_probe()}
    finally:
        torch.set_num_threads(threads)
