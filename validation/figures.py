"""Draw the figures of docs/ideas.md, docs/gallery.md and docs/results/recall.md: `python -m validation.figures [NAME]`.

Each figure of the gallery comes from the command that the page shows with it: its run folder is loaded and drawn.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import limitlens as ll
from limitlens.report.paper import PALETTE, figure_style
from limitlens.results import save_figure

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "bench" / "results"
BLUE, GREEN, GREY, ORANGE, RED = (PALETTE[name] for name in ("blue", "green", "grey", "orange", "red"))
ENTRY = re.compile(r"```bash\n(limitlens [^\n]*--out runs/(\S+)[^\n]*)\n```\n\n!\[[^\]]*\]\(figures/(\S+)\.png\)")


def gallery() -> list[tuple[str, str, str]]:
    """Command, folder under runs/ and picture of every entry of the gallery."""
    return ENTRY.findall((DOCS / "gallery.md").read_text(encoding="utf-8"))


def draw_entry(command: str, folder: str, name: str, runs: Path) -> None:
    """Run a command of the gallery in the folder `runs` and draw its result."""
    program = [sys.executable, "-c", "from limitlens.cli import main; main()"]
    subprocess.run([*program, *shlex.split(command)[1:]], cwd=runs, check=True, stdout=subprocess.DEVNULL)
    ll.load(runs / "runs" / folder).plot(DOCS / "figures" / f"{name}.png")


def limit() -> Figure:
    """Attention over n tokens of a mixture, and over infinitely many: the gradient of K."""
    mu = ll.GaussianMixture([0.7, 0.3], [[-1.0], [2.0]], [0.3, 0.3])
    x, head, rng = np.linspace(-2, 3, 121)[:, None], ll.Head(1.0), np.random.default_rng(3)
    tokens = np.where(rng.random((1000, 1)) < 0.7, -1.0, 2.0) + np.sqrt(0.3) * rng.standard_normal((1000, 1))
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for n, colour in ((10, ORANGE), (100, GREEN), (1000, BLUE)):
        axes.plot(x, ll.attend(tokens[:n], head, x), color=colour, label=f"{n:,} tokens")
    axes.plot(x, ll.limit(mu, head, x), "--", color="black", label="infinitely many: ∇K(t)")
    axes.set(xlabel="tilt t of the query", ylabel="output of attention")
    axes.legend()
    return figure


def merge() -> Figure:
    """Two sets of tokens, the state of each, and the merged state: the mean of both outputs, weighted by mass."""
    rng = np.random.default_rng(5)
    sets = [
        (rng.normal(centre, 0.6, (40, 2)), rng.normal(0, 1, 40) + shift)
        for centre, shift in (((-1, -0.3), 0.0), ((1.2, 0.7), 0.6))
    ]
    states = [(np.exp(scores).sum(), np.exp(scores) @ values / np.exp(scores).sum()) for values, scores in sets]
    (mass, output), (other, second) = states
    both = (mass * output + other * second) / (mass + other)
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for (values, scores), (own, centre), colour, name in zip(sets, states, (BLUE, ORANGE), "ST", strict=True):
        axes.scatter(*values.T, s=9 * np.exp(scores), color=colour, alpha=0.35, linewidths=0)
        label = f"state of {name}: mass {own:.0f} of {mass + other:.0f}"
        axes.plot(*centre, "o", color=colour, markersize=9, markeredgecolor="black", label=label)
    axes.plot(*np.transpose([output, second]), color=GREY, linewidth=0.8)
    axes.plot(*both, "D", color="black", markersize=8, label="state of both: exact")
    axes.set(xlabel="value, first coordinate", ylabel="second", xlim=(-3, 4))
    axes.legend(loc="upper left")
    return figure


def cells() -> Figure:
    """Tokens of a stream assigned to three replicates, and the nested samples of each at four sizes."""
    rng, sizes = np.random.default_rng(1), (2, 4, 8, 16)
    owner = rng.permutation(np.repeat(np.arange(3), sizes[-1]))
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 3.4))
    colours = np.array([BLUE, GREEN, RED])
    above.bar(np.arange(owner.size), 1, 0.85, color=colours[owner])
    above.set(title="one pass over a stream of 48 tokens", xticks=[], yticks=[])
    above.spines[:].set_visible(False)
    for replicate in range(3):
        for place in range(sizes[-1]):
            step = int(np.searchsorted(sizes, place, side="right"))
            below.bar(place, 0.8, 0.85, replicate - 0.4, color=colours[replicate], alpha=1 - 0.22 * step)
    for size in sizes:
        below.axvline(size - 0.5, color="black", linewidth=0.8)
        below.text(size - 0.55, 2.55, f"n = {size}", ha="right", fontsize=7)
    below.set(yticks=range(3), yticklabels=[f"replicate {r}" for r in (1, 2, 3)], xticks=[], ylim=(-0.6, 2.9))
    below.set_xlabel("its cells, merged from the left: a sample of each size")
    return figure


def control() -> Figure:
    """Error of the mean output estimated from m of n queries, with and without the limit as control variate."""
    n, replicates, strength = 2000, 60, 0.5
    rng = np.random.default_rng(0)
    counts = np.unique(np.geomspace(8, n, 12).round().astype(int))
    plain, controlled = np.empty((2, replicates, counts.size))
    for row in range(replicates):
        x = rng.standard_normal(n)
        weights = np.exp(strength * np.outer(x, x))
        outputs, exact = weights @ x / weights.sum(1), strength * x
        for column, m in enumerate(counts):
            plain[row, column] = abs(outputs[:m].mean())
            controlled[row, column] = abs((outputs - exact)[:m].mean() + exact.mean())
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for found, colour, name in ((plain, ORANGE, "m queries alone"), (controlled, BLUE, "with the limit taken out")):
        error = 1.96 * found.std(0, ddof=1) / np.sqrt(replicates)
        axes.errorbar(counts, found.mean(0), error, fmt="o-", color=colour, label=name, linewidth=0.8)
    axes.axhline(controlled[:, -1].mean(), color=GREY, linestyle="--", linewidth=0.8, label=f"all {n:,} queries")
    axes.set(xscale="log", yscale="log", xlabel="queries m", ylabel="estimated error of the mean")
    axes.legend()
    return figure


def recall() -> Figure:
    """Recall of one of eight planted numbers, and KL on text, against the share of the cache: qwen, 4,096 tokens."""
    found = json.loads((RESULTS / "recall-qwen.json").read_text())["4096"]
    rows = [("reconstruction:text", RED, "limitlens plan for text"), ("kvzip", BLUE, "KVzip's rule")]
    rows += [("adakv", ORANGE, "AdaKV's rule, SnapKV's scores"), ("streaming:uniform", GREY, "StreamingLLM's rule")]
    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    for axes, number, label in zip(
        figure.subplots(1, 2), ("accuracy", "text_kl"), ("share of planted numbers found", "KL on text, nats a token"),
        strict=True,
    ):  # fmt: skip
        for row, colour, name in rows:
            by_share = found["by_share"][row]["shares"]
            shares = sorted(by_share, key=float)
            values = np.array([by_share[share][number] for share in shares])
            percent = [100 * float(share) for share in shares]
            axes.errorbar(percent, values[:, 0], values[:, 1], fmt="o-", color=colour, label=name, linewidth=1)
        both = found["by_share"]["best:strong"]["shares"]["0.25"][number]
        axes.errorbar([25], both[:1], both[1:], fmt="*", color=RED, markersize=11, label="plan for text and recall")
        axes.set(xscale="log", xlabel="share of the KV cache, %", ylabel=label)
        axes.set_xticks(percent, [f"{share:g}" for share in percent])
        axes.minorticks_off()
        if number == "accuracy":
            full = found["by_share"]["kvzip"]["full"]
            axes.axhline(full, color=GREEN, linestyle="--", linewidth=0.8, label="whole cache")
            axes.set_ylim(-0.02, 1.02)
            legend = axes.get_legend_handles_labels()
        else:
            axes.set_yscale("log")
            figure.legend(*legend, loc="outside lower center", ncols=3, fontsize=7)
    return figure


IDEAS = {"recall": recall, "idea-limit": limit, "idea-merge": merge, "idea-cells": cells, "idea-control": control}


def main(wanted: list[str]) -> None:
    """Draw the named figures, or all."""
    for name, draw in IDEAS.items():
        if not wanted or name in wanted:
            with figure_style():
                save_figure(draw(), DOCS / "figures" / f"{name}.png")
    with tempfile.TemporaryDirectory() as runs:
        for command, folder, name in gallery():
            if not wanted or name in wanted:
                print(command, flush=True)
                draw_entry(command, folder, name, Path(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
