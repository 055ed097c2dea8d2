"""Errors of contexts: predictions from windows against contexts of four times their length, and heads with long memory.

`LIMITLENS_PART=NAME python -m bench contexts` runs one part and keeps the others' results; without it all run:

test-pubmed, test-reviews    smollm2: contexts of 8,192 tokens from windows of 2,048
test-qwen                    qwen: contexts of 32,768 tokens from windows of 8,192, on film reviews
build                        the same as the tests on texts used to build the method, with variants of it
heads-MODEL                  which heads of minilm, smollm2 or qwen have long memory, on three texts

Texts are read from the folder LIMITLENS_DATA (docs/contexts.md says where they come from), `build` reads the text file
LIMITLENS_ENGLISH. Predictions and measurements read different halves of a text. LIMITLENS_MODELS is a folder with the
models; without it they are loaded by name. Each part stops starting new work after LIMITLENS_SECONDS.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.arrays import to_numpy
from limitlens.attention.kernels import choose_device
from limitlens.attention.subset import scores_of
from limitlens.models import Captured, LoadedModel, Windows, capture, load
from limitlens.models.windows import open_windows
from limitlens.probing.contexts import measure_contexts
from limitlens.probing.predict import predict
from limitlens.statistics.contexts import ContextRecord
from limitlens.statistics.dependence import LONG

DATA = Path(os.environ.get("LIMITLENS_DATA", "data"))
RESULT = Path(__file__).parent / "results" / "contexts.json"
TEXTS = {
    "wikitext": "wikipedia/wikitext2-test.txt", "pubmed": "biomedical/pubmed-abstracts.txt",
    "reviews": "reviews/movie_reviews.zip",
}  # fmt: skip
SEEDS, LENGTH = (1, 2), 512  # of the table of heads
LOCAL, NEAR, INDUCTION = 0.5, 16, 0.3  # share of mass on the last 16 tokens; on the token after an earlier copy
AIM = {"median_miss": 0.08, "coverage": (0.90, 0.97)}
PIECES, PIECE = 5, 1 << 16  # of the text of `build`: sets, and characters that stand next to each other
BEGAN = time.perf_counter()


def seconds() -> float:
    return time.perf_counter() - BEGAN


def late() -> bool:
    """Whether the time of this part is spent."""
    return seconds() > float(os.environ.get("LIMITLENS_SECONDS", "inf"))


def open_model(name: str) -> LoadedModel:
    """Model on the GPU in bfloat16, whose attention kernels are fast there, or on the CPU in float32."""
    device = choose_device("auto")
    folder = os.environ.get("LIMITLENS_MODELS")
    there = Path(folder, name) if folder else None
    place = str(there) if there is not None and there.exists() else name
    return load(place, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)


def halves(text: str, folder: str) -> list[str]:
    """Two files with the first and the second half of the documents of a text; reviews are in random order."""
    path = DATA / TEXTS[text]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
            order = np.random.default_rng(0).permutation(len(names))
            lines = [archive.read(names[i]).decode("latin-1").strip() + "\n\n" for i in order]
    else:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    made = []
    for part, some in enumerate((lines[: len(lines) // 2], lines[len(lines) // 2 :])):
        made.append(str(Path(folder, f"{text}-{part}.txt")))
        Path(made[-1]).write_text("".join(some), encoding="utf-8")
    return made


@cache
def opened(loaded: LoadedModel, text: str, window: int) -> Windows:
    return open_windows(loaded, text, 10**7, window=window, special="auto", device="cpu", fewer=True)[1]


def measured(
    loaded: LoadedModel, text: str, window: int, length: int, seed: int, count: int, queries: int = 3,
    overlap: bool = True, cut: bool = False, together: int = 1,
) -> dict[tuple[int, int], ContextRecord]:  # fmt: skip
    """Contexts of a text. Unless `cut`, `together` neighbouring contexts count as a document, not pieces of a file."""
    began = time.perf_counter()
    windows = opened(loaded, text, window)
    inner = together * length * (window - len(windows.prefix) - len(windows.suffix))
    ends = windows.ends
    if not cut:
        windows.ends = list(range(inner, windows.ends[-1] + inner, inner))
    known: dict[str, Any] = {"queries": queries, "overlap": overlap, "warnings": []}
    found = measure_contexts(loaded, windows, length=length, count=count, seed=seed, **known)
    windows.ends = ends
    print(
        f"{seconds():.0f} s: {Path(text).name} {length} x {window} took {time.perf_counter() - began:.1f} s", flush=True
    )
    return found


def level(records: list[ContextRecord], which: str, n: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Errors of all heads at the largest n, or extended to `n`, and standard errors of their logarithms."""
    value, low, high = (np.array([getattr(one, which + end)[-2:] for one in records]) for end in ("", "_low", "_high"))
    known = records[0].n[-2:]
    slope = np.log(value[:, 1] / value[:, 0]) / np.log(known[1] / known[0])
    moved = value[:, 1] * (n / known[1]) ** slope if n else value[:, 1]
    return moved, np.log(high[:, 1] / low[:, 1]) / 3.92


def compared(told: np.ndarray, bar: np.ndarray, real: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Misses of predicted errors, and how often intervals of 1.96 `bar` (with and without `own`) hold the real ones."""
    miss = np.log(told / real)
    chance = 0.6745 * np.hypot(bar, own)  # median of |miss| if it were the standard errors alone
    return {
        "median_miss": float(np.median(np.abs(np.expm1(miss)))), "median_bias": float(np.expm1(np.median(miss))),
        "coverage": float((np.abs(miss) <= 1.96 * np.hypot(bar, own)).mean()),
        "coverage_without_error_of_measurement": float((np.abs(miss) <= 1.96 * bar).mean()),
        "median_miss_by_stderr": float(np.median(chance)), "by_stderr_of_measurement": float(0.6745 * np.median(own)),
        "median_stderr_predicted": float(np.median(bar)), "median_stderr_measured": float(np.median(own)),
    }  # fmt: skip


def rounded(values: Any) -> list[float]:
    return [float(f"{x:.4g}") for x in np.asarray(values, float).tolist()]


def save(name: str, done: dict[str, Any]) -> None:
    """Merge the results of a part into the saved ones; other processes may do the same."""
    folder = os.open(RESULT.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    before = json.loads(RESULT.read_text()).get("parts", {}) if RESULT.exists() else {}
    done = {"device": choose_device("auto").type, **done}
    RESULT.write_text(json.dumps({"aim": AIM, "parts": before | {name: done}}))
    os.close(folder)


def test(text: str, model: str, window: int, count: int, queries: int, also_apart: bool) -> dict[str, Any]:
    """Predictions from windows of half a text against contexts of four times their length of the other half.

    Saved before the pooled law, and windows that do not overlap (if `also_apart`), are compared.
    """
    loaded = open_model(model)
    context, began, name = 4 * window, seconds(), f"test-{'qwen' if model == 'qwen' else text}"
    with tempfile.TemporaryDirectory() as folder:
        first, second = halves(text, folder)
        told = measured(loaded, first, window, 4, 1, count, queries)
        middle = seconds()
        real = measured(loaded, second, context, 1, 2, count, queries)
        end = seconds()
        places = list(real)
        one, two = ([part[place] for place in places] for part in (told, real))
        n = int(two[0].n[-1])
        pairs = {"error": "measured", "in_use": "measured_in_use"}
        found = {"measured": level(two, "error"), "measured_in_use": level(two, "in_use")}
        found |= {"predicted": level(one, "error", n), "predicted_in_use": level(one, "in_use", n)}
        rows = {
            which: {"contexts": compared(*found[real.replace("measured", "predicted")], *found[real])}
            for which, real in pairs.items()
        }
        result = {
            "model": model, "text": text, "context": context, "window": window, "heads": len(places),
            "contexts": count, "n": [int(part[0].n[-1]) for part in (one, two)], "dtype": str(loaded.model.dtype),
            "errors": rows, "median_error": float(np.median(found["measured"][0])),
            "median_distance": float(np.nanmedian([r.distance for r in two if r.distance is not None])),
            "seconds": {"predict": middle - began, "measure": end - middle},
        }  # fmt: skip

        def by_head() -> dict[str, Any]:
            numbers = np.array([part for pair in found.values() for part in pair]).T
            return {
                "columns": ["layer", "head", *(f"{name}{end}" for name in found for end in ("", "_stderr"))],
                "by_head": [[*place, *rounded(row)] for place, row in zip(places, numbers, strict=True)],
            }

        save(name, result | by_head())
        print(name, json.dumps(rows), flush=True)
        pilot = predict(loaded, first, sizes=[context // 8, context // 4, context // 2, context], device="auto")
        curves = {head.place: head.curve for head in pilot.records}
        ends = np.array([curves[place].interval[:, -1] for place in places])
        pooled = np.array([curves[place].error[-1] for place in places])
        found["pooled"] = (pooled, np.log(ends[:, 1] / ends[:, 0]) / 3.92)
        for which, real_name in pairs.items():
            rows[which]["pooled"] = compared(*found["pooled"], *found[real_name])
        if also_apart:
            save(name, result | by_head())
            apart = list(measured(loaded, first, window, 4, 1, count, queries, False).values())
            for which, real_name in pairs.items():
                rows[which]["apart"] = compared(*level(apart, which, n), *found[real_name])
    return result | by_head()


def build(loaded: LoadedModel, path: str, folder: str, count: int = 32) -> dict[str, Any]:
    """Errors of contexts of 8,192 tokens of `PIECES` sets of a text, and of the same contexts from windows of 2,048."""
    text = Path(path).read_text(encoding="utf-8")
    step = len(text) // PIECE // (PIECES * 20)  # 20 pieces each, spread over the whole text
    sets: list[dict[str, list[ContextRecord]]] = []
    for part in range(PIECES):
        file = Path(folder, f"build-{part}.txt")
        begins = [PIECE * step * (PIECES * i + part) for i in range(20)]
        file.write_text("".join(text[begin : begin + PIECE] for begin in begins), encoding="utf-8")
        if late():
            break
        ways = {"real": (8192, 1, True), "contexts": (2048, 4, True), "apart": (2048, 4, False)}
        sets.append({
            name: list(measured(loaded, str(file), window, length, 1, count, 1, overlap, together=2).values())
            for name, (window, length, overlap) in list(ways.items())[: 3 if part < 2 else 2]
        })  # fmt: skip
        if len(sets) > 1:
            save("build", built_of(sets, count))
    return built_of(sets, count) if sets else {}


def built_of(sets: list[dict[str, list[ContextRecord]]], count: int) -> dict[str, Any]:
    """Predictions of contexts of the same set (bias of windows) and of other sets (with their intervals)."""
    n = int(sets[0]["real"][0].n[-1])
    result: dict[str, Any] = {"sets": len(sets), "contexts": count, "n": n, "same_contexts": {}, "other_contexts": {}}
    for which in ("error", "in_use"):
        bias: dict[str, Any] = {}
        for name in ("contexts", "apart"):
            found = [
                np.log(level(one[name], which, n)[0] / level(one["real"], which)[0]) for one in sets if name in one
            ]
            low, median, high = np.quantile(np.concatenate(found), (0.05, 0.5, 0.95))
            typical = np.median(np.abs(np.concatenate(found)))
            bias[name] = {"median": median, "median_size": typical, "quantiles_5_95": [low, high]}
        result["same_contexts"][which] = bias
        result["other_contexts"][which] = {
            name: {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
            for name in ("real", "contexts")
            if (rows := [
                compared(*level(one[name], which, n), *level(two["real"], which))
                for one in sets for two in sets if one is not two
            ])
        }  # fmt: skip
    return result


def kinds(loaded: LoadedModel, text: str) -> dict[tuple[int, int], str]:
    """Kind of each head: induction (on random tokens that come twice), local (on text), or other."""
    _, windows = open_windows(loaded, text, 8 * LENGTH, window=LENGTH, special="auto", device="cpu", fewer=True)
    rng, found = np.random.default_rng(0), {}
    random = rng.integers(1000, 20000, LENGTH // 2)
    rows = np.concatenate((windows.read([0, 1, 2, 3]), np.tile(random, 2)[None]))
    near = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = (np.abs(near) <= NEAR) & ((near >= 0) | (not loaded.causal))
    device = loaded.model.device

    def take(call: Captured) -> None:
        groups = call.query.shape[1] // call.key.shape[1]
        key = call.key.repeat_interleave(groups, 1)
        scores = scores_of(call.scale * call.query, key, call.softcap)
        seen = call.seen()
        scores = (scores if seen is None else scores.masked_fill(~seen, -torch.inf))[..., LENGTH // 2 :, :]
        (weights,) = to_numpy(torch.softmax(scores.float(), -1))
        rest = weights[:4].copy()
        rest[..., 0] = 0  # without the sink
        local = (rest * near[LENGTH // 2 :]).sum(-1).mean((0, 2)) / rest.sum(-1).mean((0, 2))
        places = np.arange(LENGTH // 2 - 1)
        copied = weights[4][:, places, places + 1].mean(-1)
        for head in range(len(local)):
            kind = "induction" if copied[head] > INDUCTION else "local" if local[head] > LOCAL else "other"
            found[call.layer, head] = kind

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        run_until_last_attention(input_ids=torch.as_tensor(rows, dtype=torch.long, device=device))
    return found


def long_memory(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """Share of heads with long memory at n = 512 by kind, with standard errors over disjoint-seed sets of contexts."""
    kind = kinds(loaded, text)
    runs = [measured(loaded, text, LENGTH, 1, seed, 16, cut=True) for seed in SEEDS]
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


def heads(model: str) -> dict[str, Any]:
    """Table of heads with long memory on three texts."""
    loaded = open_model(model)
    texts = {
        "wikitext": str(DATA / TEXTS["wikitext"]),
        "pubmed": str(DATA / TEXTS["pubmed"]),
        "stdlib-docs": "stdlib-docs",
    }
    found: dict[str, Any] = {}
    for name, text in texts.items():
        if not late():
            found[name] = long_memory(loaded, text)
            save(f"heads-{model}", found)
    return found


def built() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return build(open_model("smollm2"), os.environ["LIMITLENS_ENGLISH"], folder)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "build": built,
    "test-pubmed": partial(test, "pubmed", "smollm2", 2048, 19, 3, True),
    "test-reviews": partial(test, "reviews", "smollm2", 2048, 48, 1, False),
    "test-qwen": partial(test, "reviews", "qwen", 8192, 20, 2, False),
    **{f"heads-{model}": partial(heads, model) for model in ("minilm", "smollm2", "qwen")},
}


def run() -> dict[str, Any]:
    """Run the part LIMITLENS_PART, or all but `build`, and merge each into the saved results when it ends."""
    part = os.environ.get("LIMITLENS_PART", "all")
    if part != "all" and part not in PARTS:
        raise SystemExit(f"LIMITLENS_PART is {part!r}; expected all or one of {', '.join(PARTS)}")
    for name in [name for name in PARTS if name != "build"] if part == "all" else [part]:
        done = PARTS[name]()
        print(name, f"{seconds():.0f} s", json.dumps({k: done[k] for k in ("errors", "n") if k in done}), flush=True)
        save(name, done)
    return dict(json.loads(RESULT.read_text()))
