"""Figures of studies: error curves, rates over horizons, constants over radii."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from limitlens.report.style import BLUE, CYCLE, GREY, ORANGE, figure_style, plain_log, saved
from limitlens.theory import rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from limitlens.experiments.study_result import Curve
    from limitlens.experiments.sweeps import RadiusSweep

DRAWN = ("mean", "covariance", "output", "uniform")


def plot_curve(curve: Curve, path: str | None = None) -> Figure:
    """Errors against n on logarithmic axes: points with 95% bars, and the fitted power law over the sizes it used."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure()
        axes = figure.add_subplot()
        sizes = np.asarray(curve.sizes, dtype=float)
        for name, colour in zip((n for n in DRAWN if n in curve.names), CYCLE, strict=False):
            value, bar = curve.error(name), 1.96 * curve.stderr(name)
            rate = curve.rate(name)
            label = name if rate is None else f"{name}: rate {rate.slope:.3f} ± {rate.stderr:.3f}"
            low = np.minimum(bar, 0.9 * value)  # a bar that reaches zero has no place on a logarithmic axis
            axes.errorbar(sizes, value, yerr=(low, bar), fmt="o", color=colour, label=label, capsize=2)
            if rate is not None:
                used = np.asarray(rate.used, dtype=float)
                axes.plot(used, rate.constant * used**-rate.slope, color=colour, alpha=0.7)
            if name in curve.predicted:
                axes.plot(sizes, curve.predicted[name], ":", color="black", linewidth=1)
        _log_axes(axes, "number of tokens n", "error")
        if (curve.floor > 0).any() and curve.floor.max() > 0.02 * min(curve.error(n).min() for n in curve.names):
            axes.fill_between(sizes, curve.floor, 0, color=GREY, alpha=0.2, label="numerical floor")
        axes.set_title(f"horizon {curve.reach.horizon:.3g}, sharp rate {rates.rate_sharp(curve.reach.horizon):.3f}")
        if curve.predicted:
            axes.plot([], [], ":", color="black", linewidth=1, label="predicted at finite n")
        axes.legend()
        return saved(figure, path)


def plot_horizons(swept: list[tuple[float, Curve]], path: str | None = None) -> Figure:
    """Fitted rates against the horizon, over the proved, drawn and sharp lines."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure()
        axes = figure.add_subplot()
        horizons = np.array([horizon for horizon, _ in swept])
        fine = np.geomspace(horizons.min(), horizons.max(), 200)
        lines = (
            ("sharp, moments", rates.rate_sharp, "-"),
            ("sharp, output (rms)", rates.rate_rms_output, "--"),
            ("1/(2(1+H²))", rates.rate_drawn, ":"),
        )
        for label, function, style in lines:
            axes.plot(fine, [function(float(h)) for h in fine], style, color=GREY, label=label)
        for name, colour in zip(("mean", "covariance", "output"), CYCLE, strict=False):
            found = [(h, rate) for h, curve in swept if (rate := curve.rate(name)) is not None]
            if found:
                x, y = [h for h, _ in found], [rate.slope for _, rate in found]
                axes.errorbar(x, y, yerr=[1.96 * r.stderr for _, r in found], fmt="o", color=colour, label=name)
        plain_log(axes, "x")
        axes.set_xlabel("horizon H")
        axes.set_ylabel("rate β of n^(−β)")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)
        return saved(figure, path)


def plot_radii(swept: RadiusSweep, path: str | None = None) -> Figure:
    """Constants of the uniform and moment errors against the radius of the tokens."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure()
        axes = figure.add_subplot()
        for name, colour in zip(("uniform", "mean", "covariance"), (ORANGE, BLUE, CYCLE[2]), strict=True):
            value, stderr = swept.constants(name)
            growth = swept.growth(name)
            axes.errorbar(
                swept.radii, value, yerr=1.96 * stderr, fmt="o-", color=colour, capsize=2,
                label=f"{name}: {growth.law} growth",
            )  # fmt: skip
        plain_log(axes, "y")
        axes.set_xlabel("radius R of tokens and queries")
        axes.set_ylabel("√n × error")
        axes.legend()
        return saved(figure, path)


def _log_axes(axes: Axes, x: str, y: str) -> None:
    plain_log(axes, "x", "y")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
