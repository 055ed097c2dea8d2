"""Cache plans in a live model at full size: every key policy and allocation on two texts, at equal cache size.

`python -m bench.cache MODEL TEXT OTHER [CONTEXT [SHARES [DOCUMENTS [POLICIES [FITTED]]]]]`: MODEL is an alias or a GGUF
file, TEXT the calibration text, OTHER a second text, POLICIES a comma-separated list, FITTED the windows behind the
curves (half as many check them). The file bench/results/cache-CONTEXT.json is written after each trial, so that an
interrupted run keeps its numbers. It takes five minutes on one H200 for a context of 1,024; hours on two cores.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from limitlens.attention.kernels import choose_device
from limitlens.attention.policies import POLICIES
from limitlens.cache.budgets import fisher_costs
from limitlens.cache.cut import cut_windows, measure_cut, window_order
from limitlens.cache.layers import layer_caches
from limitlens.cache.plan import CHECKED, FITTED, Plan, make_plan
from limitlens.cache.trial import trial
from limitlens.models import LoadedModel, load
from limitlens.record import json_text, to_json

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results"))


def tell(done: float, total: float) -> None:
    print(f"  {done:g} of {total:g}", flush=True)


def planned(loaded: LoadedModel, text: str, *args: Any, **options: Any) -> Plan:
    """A plan from curves and Fisher costs that are measured already."""
    curves, costs = args
    made = make_plan(curves, costs, layer_caches(loaded, curves.context), **options)
    return replace(made, model=loaded.name, corpus=text)


def main(
    model: str, text: str, other: str, context: int = 1024, shares: str = "0.5,0.25", documents: int = 24,
    policies: str = ",".join(POLICIES), fitted: int = FITTED,
) -> None:  # fmt: skip
    loaded = load(model, device=choose_device("auto"), head=True)
    windows = cut_windows(loaded, text, "auto", context)
    began = time.perf_counter()
    order = window_order(windows, 0)[: fitted + fitted * CHECKED // FITTED]
    curves = measure_cut(loaded, windows, order, context, tuple(policies.split(",")), progress=tell)
    print(f"curves of {len(order)} windows: {time.perf_counter() - began:.0f} s", flush=True)
    costs = fisher_costs(loaded, windows, order[:fitted], context)
    print(f"with Fisher costs: {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, Any] = {"context": context, "sizes": curves.sizes, "plans": {}, "trials": []}
    for error in (0.05, 0.1, 0.2):
        made = planned(loaded, text, curves, costs, error=error, fitted=fitted)
        found["plans"][f"error {error:g}"] = to_json(made.totals)
        print(
            f"error {error:g}", [(t.policy, f"{t.share:.3f}", f"{t.error.value:.4f}") for t in made.totals], flush=True
        )
    for share in map(float, shares.split(",")):
        made = planned(loaded, text, curves, costs, share=share, fitted=fitted)
        found["plans"][f"total {share:g}"] = to_json(made.totals)
        for corpus in (None, other):
            began = time.perf_counter()
            tried = trial(made, documents=documents, corpus=corpus, model=loaded, progress=tell)
            print(f"{share:.0%} of the cache, {corpus or text}: {time.perf_counter() - began:.0f} s", flush=True)
            for row in tried.ranked:
                numbers = {name: row.estimate(name) for name in ("kl", "kl_minus_uniform", "kl_minus_equal_error")}
                parts = [f"{name} {one.value:.4f} ± {one.stderr:.4f}" for name, one in numbers.items() if one.known]
                print(f"  {row.policy} {row.allocation}: {', '.join(parts)}", flush=True)
            names = {"model": Path(tried.model).name, "corpus": Path(tried.corpus).name}
            found["trials"].append(tried.document() | names)
            (RESULTS / f"cache-{context}.json").write_text(json_text(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    model, text, other, *rest = sys.argv[1:]
    main(model, text, other, *(kind(value) for kind, value in zip((int, str, int, str, int), rest, strict=False)))
