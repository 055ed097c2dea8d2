"""Errors of contexts: predictions from windows of 2,048 against contexts of 8,192 tokens, and heads with long memory.

`TEXTS` are read from the folder LIMITLENS_DATA (docs/contexts.md says where they come from). The method was built on
WikiText-2 with contexts of 512 and 1,024 tokens; the tests at 8,192 are on texts that were not used before. Predictions
and measurements read different halves of a text. To save time only the first `LAYERS` of smollm2 are run; later layers
do not change earlier ones. LIMITLENS_PART=test, minilm or smollm2 runs one part and keeps the others' results.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.attention.subset import scores_of
from limitlens.models import Captured, LoadedModel, capture, load
from limitlens.models.windows import open_windows
from limitlens.probing.contexts import measure_contexts
from limitlens.probing.predict import predict
from limitlens.statistics.contexts import ContextRecord
from limitlens.statistics.dependence import LONG

DATA = Path(os.environ.get("LIMITLENS_DATA", "data"))
TEXTS = {"wikitext": "wikipedia/wikitext2-test.txt", "pubmed": "biomedical/pubmed-abstracts.txt"}
TESTED, CONTEXT, WINDOW, COUNT = ("pubmed",), 8192, 2048, 8
LAYERS = {"test": 6, "memory": 12}  # first layers of smollm2 that are run
SEEDS, LENGTH = (1, 2), 512  # of the table of heads
LOCAL, NEAR, INDUCTION = 0.5, 16, 0.3  # share of mass on the last 16 tokens; on the token after an earlier copy
AIM = {"median_miss": 0.08, "coverage": (0.90, 0.97)}


def first_layers(name: str, layers: int) -> LoadedModel:
    """A model, cut to its first layers if it is a decoder."""
    loaded = load(name, device=torch.device("cpu"))
    if loaded.causal:
        loaded.model.base_model.layers = loaded.model.base_model.layers[:layers]
        loaded.model.config.num_hidden_layers = layers
    return loaded


def halves(text: str, folder: str) -> list[str]:
    """Two files with the first and the second half of the lines of a text."""
    lines = (DATA / TEXTS[text]).read_text(encoding="utf-8").splitlines(keepends=True)
    made = []
    for part, some in enumerate((lines[: len(lines) // 2], lines[len(lines) // 2 :])):
        made.append(str(Path(folder, f"{text}-{part}.txt")))
        Path(made[-1]).write_text("".join(some), encoding="utf-8")
    return made


def measured(loaded: LoadedModel, text: str, window: int, length: int, seed: int, count: int) -> dict[str, Any]:
    """Contexts of a text, and the sentences about its documents."""
    _, windows = open_windows(loaded, text, 10**6, window=window, special="auto", device="cpu", fewer=True)
    warnings: list[str] = []
    found = measure_contexts(loaded, windows, length=length, count=count, seed=seed, warnings=warnings)
    return {"heads": found, "warnings": warnings}


def compared(told: np.ndarray, bar: np.ndarray, real: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Misses of predicted errors, and how often intervals of 1.96 `bar` (with and without `own`) hold the real ones."""
    miss = np.log(told / real)
    return {
        "median_miss": float(np.median(np.abs(np.expm1(miss)))), "median_bias": float(np.expm1(np.median(miss))),
        "coverage": float((np.abs(miss) <= 1.96 * np.hypot(bar, own)).mean()),
        "coverage_without_error_of_measurement": float((np.abs(miss) <= 1.96 * bar).mean()),
        "median_stderr_predicted": float(np.median(bar)), "median_stderr_measured": float(np.median(own)),
    }  # fmt: skip


def level(records: list[ContextRecord], which: str) -> tuple[np.ndarray, np.ndarray]:
    """Errors of all heads at the largest n, and standard errors of their logarithms."""
    value, high = (np.array([getattr(one, name)[-1] for one in records]) for name in (which, f"{which}_high"))
    return value, (np.log(high / value) if which == "in_use" else high / value - 1) / 1.96


def test(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """Predictions from windows of 2,048 tokens of half a text against contexts of 8,192 tokens of the other half."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        first, second = halves(text, folder)
        pilot = predict(loaded, first, sizes=[1024, 2048, 4096, CONTEXT])
        told = measured(loaded, first, WINDOW, CONTEXT // WINDOW, 1, COUNT)
        middle = time.perf_counter()
        real = measured(loaded, second, CONTEXT, 1, 2, COUNT)
    places = list(real["heads"])
    one, two = ([part["heads"][place] for place in places] for part in (told, real))
    curves = [next(head for head in pilot.records if head.place == place).curve for place in places]
    pooled = np.array([curve.error[-1] for curve in curves])
    spread = np.array([np.log(curve.interval[1, -1] / curve.interval[0, -1]) / 3.92 for curve in curves])
    rows: dict[str, Any] = {}
    for which in ("error", "in_use"):
        target = level(two, which)
        rows[which] = {"contexts": compared(*level(one, which), *target), "pooled": compared(pooled, spread, *target)}
    single = level(two, "error")[0]
    return {
        "heads": len(places), "n": [int(part[0].n[-1]) for part in (one, two)], "contexts": COUNT, "errors": rows,
        "median_error": float(np.median(single)), "median_distance": float(np.median([r.distance for r in two])),
        "warnings": told["warnings"] + real["warnings"],
        "seconds": [middle - began, time.perf_counter() - middle],
        "by_head": [[*place, *(float(f"{x:.4g}") for x in numbers)] for place, *numbers in zip(
            places, level(one, "error")[0], single, pooled, level(one, "in_use")[0], level(two, "in_use")[0],
            strict=True)],
    }  # fmt: skip


def kinds(loaded: LoadedModel, text: str) -> dict[tuple[int, int], str]:
    """Kind of each head: induction (on random tokens that come twice), local (on text), or other."""
    _, windows = open_windows(loaded, text, 8 * LENGTH, window=LENGTH, special="auto", device="cpu", fewer=True)
    rng, found = np.random.default_rng(0), {}
    random = rng.integers(1000, 20000, LENGTH // 2)
    rows = np.concatenate((windows.read([0, 1, 2, 3]), np.tile(random, 2)[None]))
    near = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = (np.abs(near) <= NEAR) & ((near >= 0) | (not loaded.causal))

    def take(call: Captured) -> None:
        groups = call.query.shape[1] // call.key.shape[1]
        key = call.key.repeat_interleave(groups, 1)
        scores = scores_of(call.scale * call.query, key, call.softcap)
        seen = call.seen()
        scores = (scores if seen is None else scores.masked_fill(~seen, -torch.inf))[..., LENGTH // 2 :, :]
        weights = torch.softmax(scores, -1).numpy()
        rest = weights[:4].copy()
        rest[..., 0] = 0  # without the sink
        local = (rest * near[LENGTH // 2 :]).sum(-1).mean((0, 2)) / rest.sum(-1).mean((0, 2))
        places = np.arange(LENGTH // 2 - 1)
        copied = weights[4][:, places, places + 1].mean(-1)
        for head in range(len(local)):
            kind = "induction" if copied[head] > INDUCTION else "local" if local[head] > LOCAL else "other"
            found[call.layer, head] = kind

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        run_until_last_attention(input_ids=torch.as_tensor(rows, dtype=torch.long))
    return found


def long_memory(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """Share of heads with long memory at n = 512 by kind, with standard errors over disjoint-seed sets of contexts."""
    kind = kinds(loaded, text)
    runs = [measured(loaded, text, LENGTH, 1, seed, 16)["heads"] for seed in SEEDS]
    rows = {}
    for name in ("all", "local", "induction", "other"):
        places = [place for place in runs[0] if name in ("all", kind[place])]
        if not places:
            continue
        each = np.array([
            [np.mean([run[place].memory.verdict == LONG for place in places]),
             np.median([run[place].memory.time for place in places]),
             np.median([run[place].between or 0.0 for place in places]),
             np.median([run[place].in_use[-1] / run[place].error[-1] for place in places])] for run in runs
        ])  # fmt: skip
        names = ("long_memory", "time_at_largest_n", "between", "in_use_over_other")
        stderr = each.std(0, ddof=1) / np.sqrt(len(runs))
        rows[name] = {"heads": len(places)} | {
            key: [float(value), float(bar)] for key, value, bar in zip(names, each.mean(0), stderr, strict=True)
        }
    return rows


def run() -> dict[str, Any]:
    path = Path(__file__).parent / "results" / "contexts.json"
    part = os.environ.get("LIMITLENS_PART", "all")
    known = {"aim": AIM, "context": CONTEXT, "window": WINDOW, "layers": LAYERS, "qwen_at_32768": "not measured"}
    tests, memories = {}, {}
    if part in ("all", "test"):
        loaded = first_layers("smollm2", LAYERS["test"])
        tests = {text: test(loaded, text) for text in TESTED}
        print(json.dumps({text: row["errors"] for text, row in tests.items()}, indent=1), flush=True)
    texts = {**{name: str(DATA / file) for name, file in TEXTS.items()}, "stdlib-docs": "stdlib-docs"}
    for model in ("minilm", "smollm2"):
        if part in ("all", model):
            loaded = first_layers(model, LAYERS["memory"])
            memories[model] = {name: long_memory(loaded, text) for name, text in texts.items()}
            print(model, json.dumps(memories[model]), flush=True)
    before = json.loads(path.read_text()) if path.exists() and part != "all" else {}
    return known | {"test": before.get("test", {}) | tests, "memory": before.get("memory", {}) | memories}
