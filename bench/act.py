"""Time of cache plans on the CPU: error curves of key policies relative to a probe, and a trial.

Curves and probe read the same windows, as many as a plan uses; the probe holds out a tenth of them. Runs alternate,
and ratios are between neighbouring runs. Seconds exclude loading the model; user time is given too, since wall time
varies on a shared machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cache import planned, tell
from limitlens.attention.policies import POLICIES
from limitlens.cache.cut import BEHIND, cut_windows, measure_cut, window_order
from limitlens.cache.plan import CHECKED, FITTED
from limitlens.cache.trial import trial
from limitlens.models import load
from limitlens.probing.probe import probe

CONTEXT = 1024
SIX = ("random", "streaming", "knorm", "snapkv", "expected", "priority")  # the slowest: two of them sample, twice each
WINDOWS, ROUNDS, DOCUMENTS = FITTED + CHECKED, 3, 10
TEXT = "stdlib-docs"
WANTED = {"curves_over_probe": 2.0, "trial_seconds": 300}


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Result of some work, its wall time and its user time in seconds."""
    began, before = time.perf_counter(), os.times().user
    found = work()
    return found, {"wall": time.perf_counter() - began, "user": os.times().user - before}


def beside_probe(model: str) -> dict[str, Any]:
    """Curves of six policies and a probe of the same windows alternately, and the median ratio of neighbours."""
    loaded, length = load(model), CONTEXT + BEHIND
    windows = cut_windows(loaded, TEXT, "auto", CONTEXT)
    tokens, rows = WINDOWS * length, range(WINDOWS)  # a probe opens the text at its beginning
    works: dict[str, Callable[[], Any]] = {
        "probe": lambda: probe(loaded, TEXT, tokens, window=length, sizes="64:512:4"),
        "curves": lambda: measure_cut(loaded, windows, rows, CONTEXT, SIX),
    }
    measure_cut(loaded, windows, rows[:1], CONTEXT, SIX)  # warm up
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            _, seconds = timed(work)
            taken[name].append(seconds)
            print(f"  {name}: {seconds['wall']:.1f} s, {seconds['user']:.1f} s of user time", flush=True)
    ratio = {
        kind: statistics.median(a[kind] / b[kind] for a, b in zip(taken["curves"], taken["probe"], strict=True))
        for kind in ("wall", "user")
    }
    print(
        f"{model}: {WINDOWS} windows of {length:,} tokens; curves of {len(SIX)} policies take {ratio['wall']:.2f} of a "
        f"probe ({ratio['user']:.2f} of its user time; wanted {WANTED['curves_over_probe']:g})",
        flush=True,
    )
    return {"windows": WINDOWS, "length": length, "policies": SIX, "seconds": taken, "ratio": ratio}


def whole_trial(model: str) -> dict[str, Any]:
    """The trial of a plan for a quarter of the cache: every policy with every allocation.

    The cost of a trial does not depend on the budgets, so these come from two windows with equal Fisher costs.
    """
    loaded = load(model, head=True)
    windows = cut_windows(loaded, TEXT, "auto", CONTEXT)
    curves = measure_cut(loaded, windows, window_order(windows, 0)[:2], CONTEXT, tuple(POLICIES))
    made = planned(loaded, TEXT, curves, np.ones(curves.full.shape[1:]), share=0.25, fitted=1)
    tried, seconds = timed(lambda: trial(made, documents=DOCUMENTS, model=loaded, progress=tell))
    print(
        f"{model}: {len(tried.rows)} rows on {tried.documents} documents of {CONTEXT:,} + {BEHIND} tokens: "
        f"{seconds['wall']:.0f} s, {seconds['user']:.0f} s of user time (wanted {WANTED['trial_seconds']:g} s)",
        flush=True,
    )
    return {"documents": tried.documents, "rows": len(tried.rows), "seconds": seconds}


def run() -> dict[str, Any]:
    return {"wanted": WANTED, "curves": beside_probe("smollm2"), "trial": whole_trial("smollm2")}
