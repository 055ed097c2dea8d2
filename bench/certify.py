"""Certified reads: keys and bytes read, how often the promised error held, and recall tasks, of smollm2 and qwen.

`python -m bench certify` measures everything; a GPU needs minutes. Documents and prompts are measured one at a time,
each into a file of the folder CERTIFY_RUNS, so that an interrupted run goes on. Several processes can share the work:
with CERTIFY_SHARE=1 each takes what no other has begun, and none writes the result; a last run without it does.
CERTIFY_SECONDS stops a run in time, CERTIFY_READ_SECONDS its documents.

CERTIFY_TEXTS=a.txt,b.zip are texts (a zip file of texts is one text), CERTIFY_READS=smollm2:4096:20:1:main,... models,
contexts, documents, shares of heads measured in each and sets of rules, CERTIFY_TASKS=smollm2:4096:120,... those of
the prompts (CERTIFY_TEXT_PROMPTS of them also go on with their text), CERTIFY_SMOLLM2 and CERTIFY_QWEN folders of the
models.
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

MAIN, FEW = ("denominator", "both", "output", "int4", "int3"), ("denominator", "int4", "int3")
SETS: dict[str, dict[tuple[float, float], tuple[str, ...]]] = {
    "main": {(0.1, 0.1): MAIN, (0.05, 0.1): MAIN, (0.2, 0.05): MAIN},
    "few": {(0.1, 0.1): MAIN, (0.05, 0.1): FEW, (0.2, 0.05): FEW},
    "all": {(0.1, 0.1): tuple(RULES)},
}
DRAWS, SEED = 64, 1
JOINED = 3_500_000  # characters of the texts of a zip file
TASKS = ("needle1", "needle8", "text")
READS = "smollm2:4096:20:1:main,smollm2:8192:20:0.5:main,smollm2:4096:4:1:all,qwen:32640:20:0.25:few"
PROMPTS = "smollm2:4096:120,qwen:4096:120"
BEGUN = time.monotonic()


def option(name: str, default: str) -> str:
    return os.environ.get(f"CERTIFY_{name}", default)


def reads_asked() -> list[tuple[str, int, int, float, str]]:
    parts = (part.split(":") for part in option("READS", READS).split(",") if part)
    return [(model, int(context), int(count), float(share), rules) for model, context, count, share, rules in parts]


def tasks_asked() -> list[tuple[str, int, int]]:
    parts = (part.split(":") for part in option("TASKS", PROMPTS).split(",") if part)
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
            joined.with_suffix(f".{os.getpid()}").write_text("\n\n".join(parts)[:JOINED])
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


def free(path: Path, limit: str) -> bool:
    """Whether this process measures what belongs into a file: it is not there, no other process has begun, in time."""
    if path.is_file() or time.monotonic() - BEGUN > float(limit):
        return False
    try:
        path.with_suffix(".begun").touch(exist_ok="CERTIFY_SHARE" not in os.environ)
    except FileExistsError:
        return False
    return True


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def measure(model: str, context: int, count: int, share: float, name: str) -> None:
    """Measure the reads of documents that have no file yet."""
    jobs = [(promise, rule) for promise, rules in SETS[name].items() for rule in rules]
    for k in range(count):
        path = folder() / f"{model}-{context}-{name}-{k}.npz"
        if free(path, option("READ_SECONDS", option("SECONDS", "inf"))) and k < len(documents(model, context)):
            windows, index = documents(model, context)[k]
            options: dict[str, Any] = {"draws": DRAWS, "seed": SEED, "heads": share, "turn": k // 2}
            found = measure_reads(model_of(model), windows, [index], context, jobs, **options)
            np.savez_compressed(path.with_suffix(".part.npz"), **found)
            path.with_suffix(".part.npz").replace(path)
            say(f"{path.stem} of {count}")


def answer(model: str, context: int, count: int) -> None:
    """Measure the predictions for prompts that have no file yet."""
    for k in range(count):
        path = folder() / f"{model}-{context}-tasks-{k}.json"
        if free(path, option("SECONDS", "inf")) and k < len(documents(model, context)):
            given, tasks = documents(model, context)[k], TASKS if k < int(option("TEXT_PROMPTS", "40")) else TASKS[:-1]
            options = (context, (0.1, 0.1), LIVE, SEED)
            found = {task: prompt_scores(model_of(model), *given, task, *options) for task in tasks}
            path.with_suffix(".part").write_text(json.dumps(found))
            path.with_suffix(".part").replace(path)
            if k < 12 or k % 12 == 0:
                say(f"{path.stem} of {count}: {path.read_text()}")


def found_of(model: str, context: int, kind: str) -> list[Path]:
    paths = folder().glob(f"{model}-{context}-{kind}")
    return sorted(
        (path for path in paths if path.stem.split("-")[-1].isdigit()), key=lambda p: int(p.stem.split("-")[-1])
    )


def reads_rows(model: str, context: int, share: float, rules_name: str) -> dict[str, Any]:
    """Results of all promises from the files of a model, context and set of rules."""
    parts = [dict(np.load(path)) for path in found_of(model, context, f"{rules_name}-*.npz")]
    rows: dict[str, Any] = {}
    if not parts:
        return rows
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    windows, place = documents(model, context)[0][0], 0
    named = ",".join(Path(text).stem for text in texts())
    for promise, rules in SETS[rules_name].items():
        own = {name: found[name][:, :, place : place + len(rules)] for name in ("reads", "shared")}
        place += len(rules)
        options: dict[str, Any] = {"draws": DRAWS, "heads": share, "seed": SEED}
        given = (model_of(model), windows, [], named, context, found | own, rules, promise, ())
        made = summarise(*given, **options)
        name = f"{model}, {context}, {promise[0]:g}, {promise[1]:g}" + (", all rules" if rules_name == "all" else "")
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
    rows = {task: [part[task] for part in parts if task in part] for task in TASKS}
    made = [task_result(task, found) for task, found in rows.items() if len(found) > 1]
    for row in made:
        say(f"{model} {context} {row.task}: {row}")
    return [{"model": model, "context": context, **vars(row)} for row in made]


def run() -> dict[str, Any]:
    for asked in reads_asked():
        measure(*asked)
    for model, context, count in tasks_asked():
        answer(model, context, count)
    if "CERTIFY_SHARE" in os.environ:
        raise SystemExit(0)
    rows: dict[str, Any] = {}
    for model, context, _, share, name in reads_asked():
        rows |= reads_rows(model, context, share, name)
    rows["tasks"] = [row for model, context, _ in tasks_asked() for row in task_rows(model, context)]
    return {"rows": rows}
