"""Certified reads of smollm2: keys and bytes read, and how often the promised error held, at two contexts.

`python -m bench certify` takes half an hour on one core. CERTIFY_TEXTS=a.txt,b.txt gives the texts, and
CERTIFY_CONTEXTS=4096:10:0.125 the contexts with documents of each text and share of heads; others keep their numbers.
Measured arrays are kept in the folder CERTIFY_RUNS, so that an interrupted run goes on. CERTIFY_MODEL names the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.attention.certified import RULES
from limitlens.cache.certify import LIVE, measure_reads, summarise, task_scores
from limitlens.cache.cut import cut_windows, window_order
from limitlens.models import load

RESULTS = Path(__file__).parent / "results" / "certify.json"
MAIN = ("denominator", "output", "int4", "int3")  # rules for the other promises and contexts
PROMISES = {(0.1, 0.1): tuple(RULES), (0.05, 0.1): MAIN, (0.2, 0.05): MAIN}
DRAWS, SEED, ALL = 64, 1, 4096  # all rules are measured at this context
TASKS = ("text", "needle1", "needle8")


def option(name: str, default: str) -> str:
    return os.environ.get(f"CERTIFY_{name}", default)


def rules_of(promise: tuple[float, float], context: int) -> tuple[str, ...]:
    return PROMISES[promise] if context == ALL else MAIN


def measured(loaded: Any, text: str, context: int, documents: int, heads: float) -> dict[str, Any]:
    """Arrays of `measure_reads` on one text, read from their file if they were measured before."""
    path = Path(option("RUNS", "runs/certify")) / f"{Path(text).stem}-{context}.npz"
    if not path.is_file():
        windows = cut_windows(loaded, text, "auto", context)
        jobs = [(promise, rule) for promise in PROMISES for rule in rules_of(promise, context)]
        order = window_order(windows, SEED)[:documents]
        options: dict[str, Any] = {"draws": DRAWS, "heads": heads, "seed": SEED}
        options["progress"] = lambda done, total: print(f"{path.stem} {done} of {total}", flush=True)
        found = measure_reads(loaded, windows, order, context, jobs, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **found)
    return dict(np.load(path))


def predicted(loaded: Any, text: str) -> list[dict[str, Any]]:
    """Predictions of the model on tasks with certified reads, read from their file if they were measured before."""
    path = Path(option("RUNS", "runs/certify")) / "tasks.json"
    if not path.is_file():
        windows = cut_windows(loaded, text, "auto", ALL)
        order = window_order(windows, SEED)[: int(option("PROMPTS", "6"))]
        found = [vars(task_scores(loaded, windows, order, task, ALL, (0.1, 0.1), LIVE, SEED)) for task in TASKS]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return list(json.loads(path.read_text()))


def run() -> dict[str, Any]:
    loaded = load(option("MODEL", "smollm2"), head=True)
    texts = option("TEXTS", "stdlib-docs").split(",")
    rows: dict[str, Any] = {}
    for part in option("CONTEXTS", "4096:10:0.125,8192:3:0.125").split(","):
        context, documents, heads = int(part.split(":")[0]), int(part.split(":")[1]), float(part.split(":")[2])
        parts = [measured(loaded, text, context, documents, heads) for text in texts]
        # Halves of the documents, from which reads are predicted and on which they are measured, hold every text.
        mixed = np.argsort(np.concatenate([np.arange(len(part["layers"])) for part in parts]), kind="stable")
        found = {name: np.concatenate([part[name] for part in parts])[mixed] for name in parts[0]}
        windows, place = cut_windows(loaded, texts[0], "auto", context), 0
        for error, delta in PROMISES:
            rules = rules_of((error, delta), context)
            own = {name: found[name][:, :, place : place + len(rules)] for name in ("reads", "shared")}
            place += len(rules)
            made = summarise(loaded, windows, [], ",".join(Path(text).stem for text in texts), context, found | own,
                             rules, (error, delta), (), draws=DRAWS, heads=heads, seed=SEED)  # fmt: skip
            name = f"{context}, {error:g}, {delta:g}"
            rows[name] = {key: value for key, value in made.document().items() if key not in ("heads", "made", "tasks")}
            rows[name] |= {"queries": int(np.isfinite(own["reads"][:, :, 0, :, 0]).sum()), "heads": len(made.heads)}
            rows[name]["lowest_held"] = min(head.held for head in made.heads)
            rows[name]["always_read_everything"] = [(one.layer, one.head) for one in made.heads if one.whole > 0.999]
            own_row = made.rules.get("int4", made.rules[made.rule])
            print(f"{name}: {made.rule}, int4 reads {own_row.read:.3f} and holds {own_row.held:.3f}", flush=True)
    if option("PROMPTS", "6") != "0":
        rows["tasks"] = predicted(loaded, texts[0])
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return {"model": loaded.name, "rows": kept.get("rows", {}) | rows}
