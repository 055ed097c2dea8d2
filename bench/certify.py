"""Certified reads: keys and bytes read, how often the promised error held, and recall tasks, of smollm2 and qwen.

`python -m bench certify` measures everything; a GPU needs minutes. Documents and prompts are measured one at a time,
each into a file of the folder CERTIFY_RUNS, so that an interrupted run goes on, and CERTIFY_PART=0/3, 1/3 and 2/3 share
the work between processes; a run without it writes the result. CERTIFY_SECONDS stops a run in time.

CERTIFY_TEXTS=a.txt,b.zip are texts (a zip file of texts is one text), CERTIFY_READS=smollm2:4096:20,... the models,
contexts and documents, CERTIFY_TASKS=smollm2:4096:120,... those of the prompts, and CERTIFY_SMOLLM2 the model's folder.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.attention.certified import RULES
from limitlens.cache.certify import LIVE, measure_reads, prompt_scores, summarise, task_result
from limitlens.cache.cut import cut_windows, window_order
from limitlens.models import load

MAIN = ("denominator", "both", "output", "int4", "int3")  # rules for the other promises and contexts
PROMISES = {(0.1, 0.1): tuple(RULES), (0.05, 0.1): MAIN, (0.2, 0.05): MAIN}
DRAWS, SEED, ALL = 64, 1, 4096  # all rules are measured at this context
TASKS = ("text", "needle1", "needle8")
READS = "smollm2:4096:20,smollm2:8192:20,qwen:32640:20"
PROMPTS = "smollm2:4096:120,qwen:8192:120"
BEGUN = time.monotonic()


def option(name: str, default: str) -> str:
    return os.environ.get(f"CERTIFY_{name}", default)


def rules_of(promise: tuple[float, float], context: int) -> tuple[str, ...]:
    return PROMISES[promise] if context == ALL else MAIN


def jobs_of(name: str, default: str) -> list[tuple[str, int, int]]:
    parts = (part.split(":") for part in option(name, default).split(",") if part)
    return [(model, int(context), int(count)) for model, context, count in parts]


@cache
def model_of(name: str) -> Any:
    dtype = {"dtype": torch.bfloat16} if name == "qwen" and torch.cuda.is_available() else {}
    return load(option(name.upper(), name), head=True, device="cuda" if torch.cuda.is_available() else "cpu", **dtype)


@cache
def texts() -> tuple[str, ...]:
    """Paths or names of the texts; the texts of a zip file are joined."""
    found = []
    for name in option("TEXTS", "stdlib-docs").split(","):
        if name.endswith(".zip"):
            joined = folder() / f"{Path(name).stem}.txt"
            with zipfile.ZipFile(name) as file:
                parts = [file.read(one).decode("latin-1") for one in sorted(file.namelist()) if one.endswith(".txt")]
            joined.with_suffix(f".{os.getpid()}").write_text("\n\n".join(parts))
            joined.with_suffix(f".{os.getpid()}").replace(joined)
            name = str(joined)
        found.append(name)
    return tuple(found)


def folder() -> Path:
    path = Path(option("RUNS", "runs/certify"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@cache
def documents(model: str, context: int) -> list[tuple[Any, int]]:
    """Windows of all texts in turn: (windows of the text, index)."""
    cut = [cut_windows(model_of(model), text, "auto", context) for text in texts()]
    orders = [[(windows, index) for index in window_order(windows, SEED)] for windows in cut]
    return [order[k] for k in range(max(map(len, orders))) for order in orders if k < len(order)]


def mine(count: int) -> range:
    """Documents or prompts that this process measures."""
    part, parts = (int(number) for number in option("PART", "0/1").split("/"))
    return range(part, count, parts)


def late() -> bool:
    return time.monotonic() - BEGUN > float(option("SECONDS", "inf"))


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def measure(model: str, context: int, count: int) -> None:
    """Measure the reads of documents that have no file yet."""
    jobs = [(promise, rule) for promise in PROMISES for rule in rules_of(promise, context)]
    for k in mine(count):
        path = folder() / f"{model}-{context}-{k}.npz"
        if path.is_file() or late() or k >= len(documents(model, context)):
            continue
        windows, index = documents(model, context)[k]
        np.savez(path, **measure_reads(model_of(model), windows, [index], context, jobs, draws=DRAWS, seed=SEED))
        say(f"{path.stem} of {count}")


def answer(model: str, context: int, count: int) -> None:
    """Measure the predictions for prompts that have no file yet."""
    for k in mine(count):
        path = folder() / f"{model}-{context}-tasks-{k}.json"
        if path.is_file() or late() or k >= len(documents(model, context)):
            continue
        windows, index = documents(model, context)[k]
        given = (windows, index)
        rows = [prompt_scores(model_of(model), *given, task, context, (0.1, 0.1), LIVE, SEED) for task in TASKS]
        path.write_text(json.dumps(rows))
        if k < 12 or k % 12 == 0:
            say(f"{path.stem} of {count}: {[round(row[0], 4) for row in rows]}")


def found_of(model: str, context: int, kind: str) -> list[Path]:
    paths = folder().glob(f"{model}-{context}-{kind}")
    return sorted(
        (path for path in paths if path.stem.split("-")[-1].isdigit()), key=lambda p: int(p.stem.split("-")[-1])
    )


def reads_rows(model: str, context: int) -> dict[str, Any]:
    """Results of all promises from the files of a model and context."""
    parts = [dict(np.load(path)) for path in found_of(model, context, "[0-9]*.npz")]
    rows: dict[str, Any] = {}
    if not parts:
        return rows
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    windows, place = documents(model, context)[0][0], 0
    named = ",".join(Path(text).stem for text in texts())
    for promise in PROMISES:
        rules = rules_of(promise, context)
        own = {name: found[name][:, :, place : place + len(rules)] for name in ("reads", "shared")}
        place += len(rules)
        options: dict[str, Any] = {"draws": DRAWS, "heads": 1.0, "seed": SEED}
        given = (model_of(model), windows, [], named, context, found | own, rules, promise, ())
        made = summarise(*given, **options)
        name = f"{model}, {context}, {promise[0]:g}, {promise[1]:g}"
        rows[name] = {key: value for key, value in made.document().items() if key not in ("heads", "made", "tasks")}
        rows[name] |= {"queries": int(np.isfinite(own["reads"][:, :, 0, :, 0]).sum()), "heads": len(made.heads)}
        rows[name]["lowest_held"] = min(head.held for head in made.heads)
        rows[name]["always_read_everything"] = [(one.layer, one.head) for one in made.heads if one.whole > 0.999]
        for rule in rules:  # queries whose coverage is below the promise, and heads by their mean coverage
            held = own["reads"][:, :, rules.index(rule), :, 1]
            low = [int(part) for part in np.unravel_index(np.nanargmin(np.nanmean(held, 0)), held.shape[1:])]
            rows[name].setdefault("lowest_head", {})[rule] = [*low, float(np.nanmin(np.nanmean(held, 0)))]
            rows[name].setdefault("queries_below", {})[rule] = float(np.nanmean(held < 1 - promise[1]))
        say(f"{name}: {made.rule}, " + ", ".join(
            f"{key} {row.read:.3f} held {row.held:.3f} rejected {row.rejected}" for key, row in made.rules.items()
        ))  # fmt: skip
    return rows


def task_rows(model: str, context: int) -> list[dict[str, Any]]:
    """Predictions on each task, from the files of a model and context."""
    parts = [json.loads(path.read_text()) for path in found_of(model, context, "tasks-*.json")]
    made = [task_result(task, [part[place] for part in parts]) for place, task in enumerate(TASKS) if parts]
    for row in made:
        say(f"{model} {context} {row.task}: {row}")
    return [{"model": model, "context": context, **vars(row)} for row in made]


def run() -> dict[str, Any]:
    for model, context, count in jobs_of("READS", READS):
        measure(model, context, count)
    for model, context, count in jobs_of("TASKS", PROMPTS):
        answer(model, context, count)
    if "CERTIFY_PART" in os.environ:
        raise SystemExit(0)
    rows: dict[str, Any] = {}
    for model, context, _ in jobs_of("READS", READS):
        rows |= reads_rows(model, context)
    rows["tasks"] = [row for model, context, _ in jobs_of("TASKS", PROMPTS) for row in task_rows(model, context)]
    return {"rows": rows}
