"""Figures of tails: from softmax to hardmax as the horizon grows, and attention beyond its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from limitlens.report.style import CYCLE, GREY, figure_style, saved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from limitlens.experiments.hardmax import HardmaxCurve
    from limitlens.experiments.heavy_tails import HeavyCurve


def plot_crossover(curves: Sequence[HardmaxCurve], path: str | None = None) -> Figure:
    """E|mean output| against n, one line per horizon, hardmax last: straight lines bend into the logarithm.

    Each label says which law fits better and by how much (difference of information criteria).
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure()
        axes = figure.add_subplot()
        shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(curves)))
        for curve, colour in zip(curves, shades, strict=True):
            rate = curve.rate
            verdict = "" if rate is None else f" ({rate.law} law, {abs(rate.evidence):.0f})"
            value, bar = curve.measured, 1.96 * curve.stderr
            axes.errorbar(
                curve.sizes, value, yerr=(np.minimum(bar, 0.9 * value), bar), fmt="o-", color=colour, capsize=2,
                label=curve.label + verdict,
            )  # fmt: skip
            if "finite" in curve.predicted:
                axes.plot(
                    curve.sizes, curve.predicted["finite"], "--", color=GREY, zorder=5, label="hardmax, finite-n law"
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("number of tokens n")
        axes.set_ylabel("E|mean output|")
        axes.set_title("softmax to hardmax, Gaussian tokens in d = 1")
        axes.legend(fontsize=7)
        return saved(figure, path)


def plot_heavy(curves: Sequence[HeavyCurve], path: str | None = None) -> Figure:
    """Share of the largest weight and median output against n, one line per law and tilt."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        share, output = figure.subplots(1, 2)
        for curve, colour in zip(curves, CYCLE, strict=False):
            found = curve.summary()
            label = f"{curve.law}, t = {curve.tilt:g}: {curve.existence.value}"
            share.errorbar(
                curve.sizes, found["top_weight"], yerr=1.96 * found["top_weight_stderr"], fmt="o-", color=colour
            )
            output.plot(curve.sizes, found["median_output"], "o-", color=colour, label=label)
            if curve.limit is not None:
                output.axhline(curve.limit, color=colour, linestyle=":", linewidth=1)
        share.set_ylabel("largest attention weight")
        share.set_ylim(0, 1)
        output.set_ylabel("median output")
        output.set_yscale("log")
        for axes in (share, output):
            axes.set_xscale("log")
            axes.set_xlabel("number of tokens n")
        figure.legend(loc="outside lower center", ncols=1, fontsize=7)
        return saved(figure, path)
