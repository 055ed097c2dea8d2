"""Figures of the scaling limits: the three regimes, temperature schedules, the backward heat flow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import Array, InputError
from limitlens.experiments.weight_samples import sample_ordered, sample_weights
from limitlens.report.style import BLUE, CYCLE, GREEN, GREY, ORANGE, RED, figure_style, saved
from limitlens.theory.scaling import (
    KeyPoints,
    PoissonPoints,
    beta_sharing,
    critical_beta,
    drift_to_noise,
    heat_growth,
    participation,
    regime,
    theta,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from limitlens.theory.scaling import GapLaw
    from limitlens.theory.schedules import ScheduleStep

SHOWN = ((400.0, "averages", BLUE), (5.0, "selects", GREEN), (1.05, "collapses", RED))  # by keys sharing the mass
_COLOURS = {"averaging": BLUE, "selective": GREEN, "frozen": RED}
_MAP_KEYS = 60  # keys within the window of a map
_FEWEST_KEYS = 400
_RANKS = 64
_REPLICATES = 1000


def plot_regimes(law: GapLaw, n: float, seed: int = 0, path: str | None = None) -> Figure:
    """The same keys at three temperatures, their ordered weights, and Σw² along the whole scale of θ.

    Above, each disc is a key at its true distance from the query and at a random angle; its area is its weight. The
    temperatures are those at which 400, 5 and 1.05 keys share the mass. Below, points are simulations of n keys, with
    95% bars: on the left against the scaling limit, on the right against the exact expectation and the limit.
    """
    from matplotlib.figure import Figure

    if n < _FEWEST_KEYS:
        raise InputError(f"n is {n:g}; expected at least {_FEWEST_KEYS} keys, to draw what θ = 100 of them do")
    rng = np.random.default_rng(seed)
    with figure_style():
        figure = Figure(figsize=(5.2, 4.9), layout="constrained")
        upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.25)))
        count = np.cumsum(rng.standard_exponential(int(min(n, 40 * _MAP_KEYS))))
        angle = rng.uniform(0, 2 * np.pi, count.size)
        maps = upper.subplots(1, 3)
        shown = [KeyPoints(law, n, beta_sharing(n, law, min(keys, n / 4))) for keys, _, _ in SHOWN]
        for axes, points, (_, verb, colour) in zip(maps, shown, SHOWN, strict=True):
            _draw_map(axes, points, count, angle, colour)
            axes.set_title(f"θ = {_short(points.log_theta)}: {verb}", color=colour, loc="center")
        upper.legend(*maps[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handletextpad=0.2)
        left, right = lower.subplots(1, 2)
        _draw_ordered(left, shown, rng)
        _draw_participation(right, shown, rng)
        return saved(figure, path)


def plot_schedules(steps: dict[str, list[ScheduleStep]], path: str | None = None) -> Figure:
    """β, the keys that share the mass and the entropy as the context grows, one line per schedule."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panels = {"beta": "inverse temperature β", "sharing_keys": "keys sharing the mass", "entropy": "entropy (nats)"}
    with figure_style():
        figure = Figure(figsize=(5.2, 2.4), layout="constrained")
        for axes, (field, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for (name, rows), colour, marker in zip(steps.items(), CYCLE, "osD^", strict=False):
                value = [getattr(row, field) for row in rows]
                axes.plot([row.n for row in rows], value, marker + "-", color=colour, label=name)
            axes.set_xscale("log")
            if field != "entropy":
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if field == "beta" else (1,)))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("context length n")
            axes.set_title(label, fontsize=9)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(steps))
        return saved(figure, path)


def plot_heat(document: dict[str, Any], path: str | None = None) -> Figure:
    """The first mode of a density through layers against the backward heat equation, and when n tokens can feel it."""
    from matplotlib.figure import Figure

    inputs, tokens = document["inputs"], document["tokens"]
    mode = np.asarray(document["path"]["modes"])[:, 0]
    time = np.asarray(document["path"]["layer"]) / inputs["beta"]
    every = slice(None, None, max(1, mode.size // 12))
    dim, n, amplitude = inputs["dim"], inputs["n"], inputs["amplitude"]
    with figure_style():
        figure = Figure(figsize=(5.2, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        heat = mode[0] * np.exp(heat_growth(1, dim) * time)
        left.plot(time, heat, color=ORANGE, linewidth=3, alpha=0.6, label="backward heat equation")
        left.plot(time[every], mode[every], "o", color=BLUE, label=f"attention, β = {inputs['beta']:g}")
        left.set(xlabel="time t = layers / β", ylabel="amplitude of the first mode")
        left.set_ylim(top=float(heat[-1]) + 0.3 * float(heat[-1] - heat[0]))  # room for the legend
        left.legend(loc="upper left")
        beta = np.geomspace(min(token["beta"] for token in tokens) / 3, 3 * max(token["beta"] for token in tokens), 60)
        right.loglog(beta, [drift_to_noise(n, float(b), dim, amplitude) for b in beta], color=GREY, label="predicted")
        ratio = [token["drift_to_noise"] for token in tokens]
        right.errorbar(
            [token["beta"] for token in tokens], [r["measured"] for r in ratio],
            yerr=[1.96 * r["stderr"] for r in ratio], fmt="o", color=BLUE, label=f"{n:,} tokens",
        )  # fmt: skip
        right.axhline(1, color=RED, linestyle=":")
        right.set(xlabel="inverse temperature β", ylabel="drift over noise of a token")
        right.legend()
        return saved(figure, path)


def _draw_map(axes: Axes, points: KeyPoints, count: Array, angle: Array, colour: str) -> None:
    x = points.reach(np.minimum(count, points.total))
    distance = np.sqrt(2 * x / points.beta)
    across, up = distance * np.cos(angle), distance * np.sin(angle)
    weight = np.exp(x[0] - x)
    weight /= weight.sum()
    window = distance[min(_MAP_KEYS, distance.size) - 1]
    axes.scatter(across, up, s=3, color=GREY, alpha=0.6, linewidths=0, label="key")
    axes.scatter(across, up, s=900 * weight, color=colour, alpha=0.6, linewidths=0)
    axes.plot(0, 0, "+", color="black", markersize=7, markeredgewidth=1.2, label="query")
    ring = {"markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 1.2}
    axes.plot(weight @ across, weight @ up, "o", markersize=8, label="output", **ring)  # type: ignore[arg-type]
    axes.set(xlim=(-window, window), ylim=(-window, window), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(GREY)
    axes.set_xlabel(f"β = {points.beta:,.3g}" if points.beta < 100 else f"β = {points.beta:,.0f}")


def _draw_ordered(axes: Axes, shown: list[KeyPoints], rng: np.random.Generator) -> None:
    ranks = int(min(_RANKS, shown[0].n))
    drawn = np.unique(np.geomspace(1, ranks, 12).round().astype(int))
    for points, (_, _, colour) in zip(shown, SHOWN, strict=True):
        limit = sample_ordered(
            PoissonPoints(theta(points.n, points.beta, points.law), points.a), ranks, 4 * _REPLICATES, rng
        )
        axes.loglog(np.arange(1, ranks + 1), limit.mean(axis=0), "--", color=colour)
        _points(axes, drawn, sample_ordered(points, ranks, _REPLICATES, rng)[:, drawn - 1], colour)
    axes.plot([], [], "--", color=GREY, label="scaling limit")
    axes.plot([], [], "o", color=GREY, label=f"{shown[0].n:,} keys" if shown[0].n < 1e6 else f"{shown[0].n:.3g} keys")
    axes.set_ylim(1e-4, 2)
    axes.set(xlabel="rank of the key", ylabel="mean weight")
    axes.legend(loc="upper right")


def _draw_participation(axes: Axes, shown: list[KeyPoints], rng: np.random.Generator) -> None:
    law, n = shown[0].law, shown[0].n
    span = (shown[0].log_theta, shown[-1].log_theta - 2)
    for log_theta in np.linspace(*span, 9):
        points = KeyPoints(law, n, critical_beta(n, law, math.exp(log_theta)))
        colour = _COLOURS[regime(participation(points))]
        _points(axes, math.exp(log_theta), sample_weights(points, _REPLICATES // 2, rng).participation, colour)
    fine = np.exp(np.linspace(*span, 41))
    exact = [participation(KeyPoints(law, n, critical_beta(n, law, float(value)))) for value in fine]
    axes.loglog(fine, exact, color="black", label="exact")
    axes.loglog(
        fine, [participation(PoissonPoints(float(value), law.a)) for value in fine], "--", color=GREY, label="limit"
    )
    axes.set_ylim(min(exact) / 3, 2)
    axes.invert_xaxis()  # the temperature falls from left to right
    axes.set(xlabel="effective number of keys θ", ylabel="E Σw²")
    axes.legend(loc="lower right")


def _points(axes: Axes, x: Any, samples: Array, colour: str) -> None:
    """Means over replicates (first axis) with 95% bars, clipped where they would reach zero on a logarithmic axis."""
    columns = samples.reshape(samples.shape[0], -1)
    mean, bar = columns.mean(axis=0), 1.96 * columns.std(axis=0, ddof=1) / np.sqrt(samples.shape[0])
    axes.errorbar(x, mean, yerr=(np.minimum(bar, 0.9 * mean), bar), fmt="o", color=colour)


def _short(log_value: float) -> str:
    """e^log_value in two digits, as a power of ten where it is very small."""
    value = math.exp(log_value)
    if value >= 1e-3:
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"$10^{{{log_value / math.log(10):.0f}}}$"
