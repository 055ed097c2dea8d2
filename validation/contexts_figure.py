"""Draw docs/contexts.svg: errors of contexts of minilm on stdlib-docs beside those of independent tokens."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import numpy as np
from matplotlib import pyplot as plt

import limitlens as ll

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    run = ll.predict("minilm", "stdlib-docs", window=512, context=512, sizes="32:512:5")
    found = [head.contexts for head in run.records]
    n = found[0].n  # type: ignore[union-attr]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
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
    worth = np.array([one.worth[-1] for one in found])  # type: ignore[union-attr, index]
    long = np.array([one.memory.verdict == "long memory" for one in found])  # type: ignore[union-attr]
    bins = np.geomspace(np.nanmin(worth), np.nanmax(worth) * 1.01, 16)
    right.hist([worth[~long], worth[long]], bins=bins, stacked=True, label=["plateau", "long memory"])
    right.set(xscale="log", xlabel=f"independent tokens that a context of {int(n[-1])} is worth", ylabel="heads")
    right.legend(fontsize=8)
    right.set_xticks([50, 100, 200, 400], ["50", "100", "200", "400"])
    right.minorticks_off()
    left.set_yticks([0.1, 0.2, 0.4, 0.8], ["0.1", "0.2", "0.4", "0.8"])
    figure.savefig(DOCS / "contexts.svg", metadata={"Date": None})
    print(*(f"{label}: {np.median(rows, 0).round(3)}" for label, rows in lines.items()), within, sep="\n")
    print(f"median worth {np.nanmedian(worth):.0f} of {int(n[-1])}; long memory {long.sum()} of {len(long)} heads")


if __name__ == "__main__":
    main()
