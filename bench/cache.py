"""Plans of the cache in a live model at full size: every choice of keys and allocation, two texts, at equal memory.

`python -m bench.cache MODEL TEXT OTHER [CONTEXT [SHARES [DOCUMENTS [POLICIES [FITTED]]]]]`: MODEL an alias or a GGUF
file, TEXT what plans are fitted on, OTHER a text never seen, POLICIES some of the choices, FITTED windows behind the
curves (half as many check them). It leaves bench/results/cache-CONTEXT.json after each trial, so that a run that is cut
short keeps its numbers. Five minutes on one H200 for a context of 1,024; hours on two cores.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from limitlens.attention.device import choose_device
from limitlens.attention.policies import POLICIES
from limitlens.cache.cache_plan import CHECKED, FITTED, cut_windows, make_plan, order_of
from limitlens.cache.cut import measure_cut
from limitlens.cache.fisher import effects
from limitlens.cache.trial import trial
from limitlens.models import load
from limitlens.record import json_text, to_json

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results"))


def tell(done: float, total: float) -> None:
    print(f"  {done:g} of {total:g}", flush=True)


def main(
    model: str, text: str, other: str, context: int = 1024, shares: str = "0.5,0.25", documents: int = 24,
    choices: str = ",".join(POLICIES), fitted: int = FITTED,
) -> None:  # fmt: skip
    loaded = load(model, device=choose_device("auto"), head=True)
    windows, began = cut_windows(loaded, text, "auto", context), time.perf_counter()
    order = order_of(windows, 0)[: fitted + fitted * CHECKED // FITTED]
    curves = measure_cut(loaded, windows, order, context, tuple(choices.split(",")), progress=tell)
    print(f"curves of {len(order)} windows: {time.perf_counter() - began:.0f} s", flush=True)
    gains = effects(loaded, windows, order[:fitted], context)
    print(f"and effects: {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, Any] = {"context": context, "sizes": curves.sizes, "plans": {}, "trials": []}
    for error in (0.05, 0.1, 0.2):
        made = make_plan(loaded.name, text, "auto", curves, gains, error=error, fitted=fitted)
        found["plans"][f"error {error:g}"] = to_json(made.totals)
        print(f"error {error:g}", [(t.choice, f"{t.share:.3f}", f"{t.error:.4f}") for t in made.totals], flush=True)
    for share in map(float, shares.split(",")):
        made = make_plan(loaded.name, text, "auto", curves, gains, total=share, fitted=fitted)
        found["plans"][f"total {share:g}"] = to_json(made.totals)
        for where in (None, other):
            began = time.perf_counter()
            tried = trial(made, documents=documents, corpus=where, model=loaded, progress=tell)
            print(f"{share:.0%} of the cache, {where or text}: {time.perf_counter() - began:.0f} s", flush=True)
            for one in tried.ranked:
                against = {"uniform": one.against_uniform, "equal error": one.against_equal}
                beside = "".join(f", against {way} {gain.measured:+.4f} ± {gain.stderr:.4f}"
                                 for way, gain in against.items() if gain is not None)  # fmt: skip
                kl = f"KL {one.divergence.measured:.4f} ± {one.divergence.stderr:.4f}"
                print(f"  {one.choice} {one.allocation}: {kl}{beside}", flush=True)
            names = {"model": Path(tried.model).name, "corpus": Path(tried.corpus).name}
            found["trials"].append(tried.document() | names)
            (RESULTS / f"cache-{context}.json").write_text(json_text(to_json(found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    model, text, other, *rest = sys.argv[1:]
    main(model, text, other, *(kind(value) for kind, value in zip((int, str, int, str, int), rest, strict=False)))
