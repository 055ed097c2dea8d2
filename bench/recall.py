"""Recall and likelihood of text with a cut cache: plans on one or two axes against baselines, on the same prompts.

`python -m bench recall` measures smollm2 on a CPU (about an hour on one core); the environment variables of `OPTIONS`
change model, context, share, prompts and texts. Plans are kept in the folder RECALL_PLANS, so that an interrupted run
goes on; the prompts are written to RECALL_PROMPTS, on which `bench/recall_kvpress.py` runs kvpress's own methods.
`python -m bench.recall RESULTS.json PROBE` then compares the heads that recall with a probe of the model in a folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import limitlens as ll
from limitlens.attention.policies import POLICIES, SHARED
from limitlens.cache.budgets import fisher_costs
from limitlens.cache.cut import cut_windows, measure_cut, window_order
from limitlens.cache.layers import layer_caches
from limitlens.cache.plan import Plan, make_plan
from limitlens.cache.reading import read_prompt
from limitlens.cache.recall import TwoAxes
from limitlens.cache.tasks import SOLVED, TEXT, Prompt, make_prompt, needle, prompts_of
from limitlens.models import load
from limitlens.statistics.documents import paired_mean

OPTIONS = {
    "MODEL": "smollm2", "CORPUS": "stdlib-docs", "CONTEXT": "512", "SHARE": "0.25", "DOCUMENTS": "16", "WINDOWS": "3,2",
    "TASKS": "text,needle1,needle8", "DTYPE": "float32", "POLICIES": ",".join(POLICIES),
    "UNIFORM": "expected,reconstruction,snapkv,streaming,knorm",  # policies with equal budgets
    "ASKED": "0",  # 8: each of the eight numbers of a `needle8` prompt is asked for, instead of one; 0 to 8
    # Plans as policy:goal; a goal is fisher (text, by Fisher information), text (directional costs), both (and recall).
    "GOALS": "expected:fisher,expected:text,reconstruction:fisher,reconstruction:text,expected:both,"
             "reconstruction:both",
}  # fmt: skip
SEED = 0
SCORES = ("accuracy", "nll", "kl", "agreement")


def option(name: str) -> str:
    return os.environ.get(f"RECALL_{name}", OPTIONS.get(name, ""))


def plans(loaded: Any, folder: Path) -> dict[str, Plan]:
    """Plans by name: for text by Fisher information, for text by directional costs, and for text and recall."""
    context, share = int(option("CONTEXT")), float(option("SHARE"))
    fitted, checked = map(int, option("WINDOWS").split(","))
    windows = cut_windows(loaded, option("CORPUS"), "auto", context)
    order = window_order(windows, SEED)[: fitted + checked]
    measured: list[Any] = []  # curves and Fisher costs, if a plan is missing
    found = {}
    for name in option("GOALS").split(","):
        policy, _, goal = name.partition(":")
        path = folder / name.replace(":", "-")
        if not path.exists():
            began = time.perf_counter()
            if not measured:
                curves = measure_cut(loaded, windows, order, context, tuple(option("POLICIES").split(",")), seed=SEED)
                measured += [curves, fisher_costs(loaded, windows, order[:fitted], context, seed=SEED)]
                print(f"curves and Fisher costs: {time.perf_counter() - began:.0f} s", flush=True)
                began = time.perf_counter()
            weights = {"fisher": None, "text": {"text": 1.0}, "both": {"text": 1.0, "recall": 1.0}}[goal]
            axes = None
            if weights is not None:
                axes = TwoAxes(loaded, windows, order[:fitted], measured[0], weights, SEED)
            made = make_plan(*measured, layer_caches(loaded, context), policy=policy, share=share, fitted=fitted,
                             axes=axes)  # fmt: skip
            replace(made, model=loaded.name, corpus=option("CORPUS"), seed=SEED).save(path)
            seconds = time.perf_counter() - began
            (path / "seconds.json").write_text(json.dumps(seconds))
            print(f"{name}: {seconds:.0f} s {made.recall}", flush=True)
        found[name] = ll.load(path)
    return found


def recalling_heads(with_recall: Plan, without: Plan) -> list[tuple[int, int]]:
    """Heads (layer, kv head) that a plan keeps at recall weight 1 and not at 0: at least twice the keys, and 1/8."""
    table = with_recall.table.merge(without.table, on=["layer", "kv_head"], suffixes=("", "_text"))
    more = table[(table["share"] >= 2 * table["share_text"]) & (table["share"] >= 1 / 8)]
    return [(int(row.layer), int(row.kv_head)) for row in more.itertuples()]


def questions(loaded: Any, prompt: Prompt, window: list[int], row: int) -> list[Prompt]:
    """The prompt, or as many questions about the numbers of its context as are asked for."""
    if prompt.task != "needle8" or option("ASKED") == "0":
        return [prompt]
    makers = [needle(8, place) for place in range(int(option("ASKED")))]
    asked = [make_prompt(loaded, prompt.task, window, len(prompt.context), [SEED + 1, row], one) for one in makers]
    assert all(one.context == prompt.context for one in asked), "questions about other contexts"
    return asked


def run() -> dict[str, Any]:
    loaded = load(option("MODEL"), head=True, dtype=getattr(torch, option("DTYPE")))
    folder = Path(option("PLANS") or "runs/recall")
    made = plans(loaded, folder)
    context, tasks, share = int(option("CONTEXT")), option("TASKS").split(","), float(option("SHARE"))
    first = next(iter(made.values()))
    windows = cut_windows(loaded, option("CORPUS"), "auto", context)
    order = window_order(windows, SEED)[first.fitted + first.checked :][: int(option("DOCUMENTS"))]
    shape = np.shape(first.budgets)
    whole = round(share * first.total.entries_without_plan)
    rng = np.random.default_rng(SEED)
    ablated = {}
    for policy in [name.partition(":")[0] for name in made if name.endswith(":both")]:
        heads = recalling_heads(made[f"{policy}:both"], made[f"{policy}:text"])
        others = [place for place in np.ndindex(shape) if place not in heads]
        drawn = [others[k] for k in rng.permutation(len(others))[: len(heads)]]
        ablated |= {f"only the {policy} recall heads cut": heads, f"{policy}: as many random heads cut": drawn}
    allocations = made[next(iter(made))].allocations
    scores: dict[str, dict[str, list[list[float]]]] = {}
    saved = []
    began = time.perf_counter()
    for row in order:
        for prompt in prompts_of(loaded, windows, row, tasks, context, SEED + 1):
            read = read_prompt(loaded, prompt, SEED)
            hooks = {name: read.cut(plan.policies, plan.budgets) for name, plan in made.items()}
            hooks |= {name: read.shared(name, whole) for name in SHARED}
            hooks["duo"] = read.cut("streaming", allocations["streaming"]["duo"])
            for name in option("UNIFORM").split(","):
                hooks[f"{name}, uniform"] = read.cut(name, allocations[name]["uniform"])
            for name, heads in ablated.items():
                counts = np.full(shape, context)
                for layer, head in heads:
                    counts[layer, head] = context // 16
                hooks[name] = read.cut("streaming", counts)
            for asked in questions(loaded, prompt, windows[row].tolist(), row):
                saved.append(vars(asked))
                one = replace(read, prompt=asked)
                found = {"full": asked.score(one.full, one.full)}
                found |= {name: asked.score(one.predict(hook), one.full) for name, hook in hooks.items()}
                for name, cut in found.items():
                    scores.setdefault(prompt.task, {}).setdefault(name, []).append([cut[key] for key in SCORES])
        done = len(scores[tasks[0]]["full"]) // (int(option("ASKED")) or 1 if tasks[0] == "needle8" else 1)
        print(f"{time.perf_counter() - began:.0f} s: {done} of {len(order)}", flush=True)
        if option("PROMPTS"):
            Path(option("PROMPTS")).write_text(json.dumps(saved))
    return {
        "command": "python -m bench recall", "options": {name: option(name) for name in OPTIONS},
        "kvpress": "not measured", "prompts": len(order), "tasks": summary(scores),
        "plans": {name: {"recall": None if plan.recall is None else vars(plan.recall), "share": plan.total.share,
                         "seconds": json.loads((folder / name.replace(":", "-") / "seconds.json").read_text())}
                  for name, plan in made.items()},
        "heads": {name: [list(map(int, place)) for place in heads] for name, heads in ablated.items()},
        "scores": scores,
    }  # fmt: skip


def summary(scores: dict[str, dict[str, list[list[float]]]], baseline: str = "kvzip") -> dict[str, Any]:
    """Means and standard errors of every method, and paired differences of KL and accuracy from a baseline.

    A method that was run on the first prompts only is compared with the baseline on these.
    """
    found: dict[str, Any] = {}
    for task, methods in scores.items():
        arrays = {name: np.array(rows) for name, rows in methods.items()}
        rows = {}
        for name, values in arrays.items():
            means = {key: paired_mean(values[:, place]) for place, key in enumerate(SCORES)}
            row = {key: [mean.value, mean.stderr] for key, mean in means.items() if task != TEXT or key != "accuracy"}
            for key, place in (("kl", 2), ("accuracy", 0)):
                less = paired_mean(values[:, place], arrays[baseline][: len(values), place])
                row[f"{key}_minus_{baseline}"] = [less.value, less.stderr]
            rows[name] = row
        solved = None if task == TEXT else bool(arrays["full"][:, 0].mean() >= SOLVED)
        found[task] = {"solved_with_the_full_cache": solved, "methods": rows}
    return found


def compared(heads: list[list[int]], run: Any, kv_heads: int) -> dict[str, Any]:
    """Query heads of some key/value heads against all others in a probe: regimes, and medians with rank tests.

    The test is that of Mann and Whitney, two-sided; with five quantities, one p-value of 0.05 is to be expected in 20
    comparisons by chance.
    """
    groups = 1 + max(record.head for record in run.records)
    groups //= kv_heads
    inside = np.array([[record.layer, record.head // groups] in heads for record in run.records])
    found: dict[str, Any] = {"query_heads": int(inside.sum()), "others": int((~inside).sum())}
    regimes = np.array([record.regime.value if record.regime else "unknown" for record in run.records])
    found["regimes"] = {name: [int((regimes[part] == name).sum()) for part in (inside, ~inside)]
                        for name in sorted(set(regimes))}  # fmt: skip
    columns = {
        "layer": [record.layer for record in run.records],
        "horizon": [record.horizon for record in run.records],
        "score_std": [record.score_std for record in run.records],
        "effective_tokens": [record.effective_tokens[-1] for record in run.records],
        "sink_mass": [record.sink_mass for record in run.records],
    }
    for name, column in columns.items():
        values = np.array([np.nan if value is None else value for value in column], dtype=float)
        parts = [part[np.isfinite(part)] for part in (values[inside], values[~inside])]
        test = stats.mannwhitneyu(*parts).pvalue if all(map(len, parts)) else np.nan
        found[name] = {"median": float(np.median(parts[0])) if len(parts[0]) else None,
                       "median_of_others": float(np.median(parts[1])), "p_value": float(test)}  # fmt: skip
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    results, probed = json.loads(path.read_text()), ll.load(sys.argv[2])
    kv = 1 + max(record.kv_head for record in probed.records)
    results["probe"] = {
        name: compared(heads, probed, kv) for name, heads in results["heads"].items() if name.startswith("only")
    }
    results["tasks"] = summary(results["scores"])  # with the rows of kvpress, if they were added
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results["probe"], indent=1))
