"""Figures of a probe for papers: the map of all heads, rates against the horizon, the curve of one head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError
from limitlens.report.style import BLUE, GREEN, GREY, ORANGE, RED, figure_style, saved
from limitlens.theory import rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"averaging": BLUE, "selective": GREEN, "frozen": RED}
LABELS = {
    "rate": "rate β of the error",
    "horizon": "horizon H",
    "score_std": "score spread",
    "mean_tilt": "mean tilt",
    "pareto_k": "tail of the weights k̂",
    "sink_mass": "mass on the sink",
    "top_weight": "largest weight",
    "entropy": "entropy (nats)",
    "local_dimension": "local dimension",
}


def plot_rates(result: Mapping[str, Any], path: str | None = None) -> Figure:
    """Fitted rates against the horizon, one point a head, over the proved, drawn and sharp lines.

    Where there is a sink the rates are those of the pooled law without it, which is what theory speaks of.
    """
    from matplotlib.figure import Figure

    found = [
        (head["horizon"], rate["slope"], rate["stderr"], head["regime"])
        for head in result["heads"]
        if (rate := (head.get("without_sink") or head)["rate"]) is not None and head["horizon"]
    ]
    if not found:
        raise InputError("no head of this run has both a rate and a horizon; probe at three sizes or more to fit rates")
    with figure_style():
        figure = Figure()
        axes = figure.add_subplot()
        horizons = [entry[0] for entry in found]
        fine = np.geomspace(min(horizons), max(horizons), 200)
        lines = (
            ("sharp, moments", rates.rate_sharp, "-", "black"),
            ("sharp, output (heuristic)", rates.rate_sharp_output, "--", "black"),
            ("drawn, 1/(2(1+H²))", rates.rate_drawn, ":", ORANGE),
            ("proved at best, Ψ = H²", lambda h: rates.rate_proved(h**2), "-", GREY),
        )
        for label, rate, style, colour in lines:
            axes.plot(fine, [rate(float(h)) for h in fine], style, color=colour, label=label, linewidth=1)
        for regime, colour in COLOURS.items():
            own = [entry for entry in found if entry[3] == regime]
            if own:
                x, y, stderr, _ = zip(*own, strict=True)
                bars = 1.96 * np.asarray(stderr)
                axes.errorbar(x, y, yerr=bars, fmt="o", color=colour, elinewidth=0.6, markersize=3, label=regime)
        axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel("horizon H")
        axes.set_ylabel(r"rate β of $n^{-β}$")
        axes.set_ylim(bottom=min(0.0, *(entry[1] for entry in found)))
        axes.legend(ncols=2, fontsize=7)
        return saved(figure, path)


def plot_map(result: Mapping[str, Any], quantity: str = "rate", path: str | None = None) -> Figure:
    """All heads, layer by head, coloured by a quantity: `rate`, "regime", or any number of a head."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    heads = result["heads"]
    layers, widest = sorted({head["layer"] for head in heads}), 1 + max(head["head"] for head in heads)
    values = np.full((len(layers), widest), np.nan)
    names = list(COLOURS)
    for head in heads:
        values[layers.index(head["layer"]), head["head"]] = _number(head, quantity, names)
    if np.isnan(values).all():
        known = ", ".join(
            ("regime", *(name for name in LABELS if any(_number(h, name, names) is not None for h in heads)))
        )
        raise InputError(f"no head of this run has a number {quantity!r}; expected one of {known}")
    with figure_style():
        figure = Figure(figsize=(5.2, 0.9 + min(4.5, 0.32 * len(layers))), layout="constrained")
        axes = figure.add_subplot()
        if quantity == "regime":
            image = axes.imshow(values, cmap=ListedColormap(list(COLOURS.values())), vmin=-0.5, vmax=2.5, aspect="auto")
            bar = figure.colorbar(image, ax=axes, ticks=range(len(names)))
            bar.ax.set_yticklabels(names)
        else:
            image = axes.imshow(values, cmap="viridis", aspect="auto")
            figure.colorbar(image, ax=axes, label=LABELS.get(quantity, quantity))
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        axes.locator_params(axis="y", nbins=12)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="head", ylabel="layer")
        return saved(figure, path)


def plot_head(result: Mapping[str, Any], layer: int, head: int, path: str | None = None) -> Figure:
    """The error curve of one head with its 95% band and fitted rate, and its effective tokens."""
    from matplotlib.figure import Figure

    record = next((h for h in result["heads"] if (h["layer"], h["head"]) == (layer, head)), None)
    if record is None:
        raise InputError(f"there is no layer {layer}, head {head} in this run; see its heads table")
    n = np.asarray(record["n"], dtype=float)
    error, bar = (
        np.asarray(record[name], dtype=float) for name in ("relative_output_error", "relative_output_error_stderr")
    )
    with figure_style():
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.fill_between(n, np.maximum(error - 1.96 * bar, 0.05 * error), error + 1.96 * bar, color=BLUE, alpha=0.2)
        left.loglog(n, error, "o", color=BLUE, label="measured")
        if (rate := record["rate"]) is not None:
            label = f"rate {rate['slope']:.3f} ± {rate['stderr']:.3f}"
            left.loglog(n, rate["constant"] * n ** -rate["slope"], color=BLUE, label=label)
        if record.get("predicted_error"):
            left.loglog(n, record["predicted_error"], ":", color="black", label="predicted")
        left.set(xlabel="number of tokens n", ylabel="relative output error")
        left.legend()
        colour = COLOURS.get(record["regime"], BLUE)
        right.loglog(n, record["effective_tokens"], "o", color=colour, label=record["regime"])
        right.loglog(n, n, "--", color=GREY, label="every token alike")
        right.set(xlabel="number of tokens n", ylabel="effective tokens")
        right.legend()
        figure.suptitle(f"layer {layer}, head {head}", x=0.02, ha="left", fontsize=10)
        return saved(figure, path)


def _number(head: Mapping[str, Any], quantity: str, regimes: list[str]) -> float | None:
    if quantity == "regime":
        return regimes.index(head["regime"])
    if quantity == "rate":
        return None if head["rate"] is None else float(head["rate"]["slope"])
    value = head.get(quantity)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
