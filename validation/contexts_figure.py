"""Draw docs/contexts.svg: errors of contexts beside those of independent tokens, and predicted beside measured errors.

The right half shows the tests in bench/results/contexts.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import numpy as np
from matplotlib import pyplot as plt

import limitlens as ll

ROOT = Path(__file__).parents[1]


def main() -> None:
    run = ll.predict("minilm", "stdlib-docs", window=512, context=512, sizes="32:512:5")
    found = [head.contexts for head in run.records]
    n = found[0].n  # type: ignore[union-attr]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    lines = {
        "n independent tokens": [np.exp(np.log(head.curve.error)) for head in run.records],
        "context of n tokens, against the corpus": [one.error for one in found],  # type: ignore[union-attr]
        "query in its own context": [one.in_use for one in found],  # type: ignore[union-attr]
    }
    for label, rows in lines.items():
        left.loglog(n, np.median(rows, 0), "o-", label=label)
    within = np.median([one.within for one in found], 0)  # type: ignore[union-attr]
    left.loglog(n[: len(within)], within, "o--", label="context, against its document")
    left.set(xlabel="n", ylabel="relative error, median head", xticks=n, xticklabels=[str(int(size)) for size in n])
    left.minorticks_off()
    left.legend(fontsize=8)
    left.set_yticks([0.1, 0.2, 0.4, 0.8], ["0.1", "0.2", "0.4", "0.8"])
    worth = np.array([one.worth[-1] for one in found])  # type: ignore[union-attr, index]
    parts = json.loads((ROOT / "bench" / "results" / "contexts.json").read_text())["parts"]
    ends = [np.inf, 0.0]
    for part in parts.values():
        if "by_head" not in part:
            continue
        places = [part["columns"].index(name) for name in ("measured", "predicted")]
        measured, predicted = np.array(part["by_head"])[:, places].T
        ends = [min(ends[0], *measured, *predicted), max(ends[1], *measured, *predicted)]
        miss = np.log(predicted / measured)
        apart = np.median(np.abs(np.expm1(miss - np.median(miss))))
        low, high = np.expm1(np.quantile(miss, (0.05, 0.95)))
        print(f"{part['model']} on {part['text']}: 90% of misses within {low:.1%} and {high:.1%};", end=" ")
        print(f"median {apart:.1%} without their median")
        label = f"{part['model']}, {part['text']}, n = {part['context']:,}"
        right.loglog(measured, predicted, "o", markersize=3, alpha=0.6, label=label)
    right.fill_between(ends, np.multiply(ends, 0.92), np.multiply(ends, 1.08), color="0.8", label="±8%")
    right.set(xlabel="error measured on other text", ylabel="error predicted from windows of n/4")
    right.legend(fontsize=8)
    figure.savefig(ROOT / "docs" / "contexts.svg", metadata={"Date": None})
    print(*(f"{label}: {np.median(rows, 0).round(3)}" for label, rows in lines.items()), within, sep="\n")
    print(f"median worth {np.nanmedian(worth):.0f} of {int(n[-1])}")


if __name__ == "__main__":
    main()
