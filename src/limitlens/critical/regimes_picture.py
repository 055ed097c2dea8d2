"""The three-regimes picture: the same keys at three temperatures, their ordered weights, and Σw² along θ.

`draw_regimes` draws it for print, `regime_figures` describes its first two parts for a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitlens.critical.weight_samples import sample_ordered, sample_weights
from limitlens.errors import Array, InputError
from limitlens.lazily import Axes, Drawing
from limitlens.report.style import BLUE, GREEN, GREY, PALETTE, RED, figure_style, saved
from limitlens.report.view import Axis, Colour, Figure, Series, line, points
from limitlens.report.words import short
from limitlens.theory import GapLaw, KeyPoints, PoissonPoints, beta_sharing, critical_beta, participation, regime, theta

SHARING = (400.0, 5.0, 1.05)  # keys that share the mass at the three temperatures
SHOWN: tuple[tuple[str, Colour], ...] = (("averages", "blue"), ("selects", "green"), ("collapses", "red"))
_COLOURS = {"averaging": BLUE, "selective": GREEN, "frozen": RED}
_MAP_KEYS = 60  # keys within the window of a map
_FEWEST_KEYS = 400
_RANKS = 64
_REPLICATES = 1000
_DISC = 30  # pixels, radius of a key that holds all of the mass on a page


def draw_regimes(law: GapLaw, n: float, seed: int = 0, path: str | Path | None = None) -> Drawing:
    """Simulate and draw n keys where 400, 5 and 1.05 of them share the mass, and Σw² in between.

    Above, each disc is a key at its true distance from the query and at a random angle; its area is its weight. Below,
    points are simulations of n keys, with 95% bars: on the left against the scaling limit, on the right against the
    exact expectation and the limit.
    """
    from limitlens.report.paper import Picture

    if n < _FEWEST_KEYS:
        raise InputError(f"n is {n:g}; expected at least {_FEWEST_KEYS} keys, to draw what θ = 100 of them do")
    rng = np.random.default_rng(seed)
    places, count, angle = _keys_around(law, n, rng)
    with figure_style():
        figure = Picture(figsize=(5.2, 4.9), layout="constrained")
        upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.25)))
        maps, (left, right) = upper.subplots(1, 3), lower.subplots(1, 2)
        for axes, points, (verb, colour) in zip(maps, places, SHOWN, strict=True):
            axes.set_title(f"θ = {_short(points.log_theta)}: {verb}", color=PALETTE[colour], loc="center")
            _draw_map(axes, points, count, angle, PALETTE[colour])
            _draw_ordered(left, points, PALETTE[colour], rng)
        upper.legend(*maps[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handletextpad=0.2)
        left.plot([], [], "--", color=GREY, label="scaling limit")
        left.plot([], [], "o", color=GREY, label=f"{n:,} keys" if n < 1e6 else f"{n:.3g} keys")
        left.set(xlabel="rank of the key", ylabel="mean weight", ylim=(1e-4, 2))
        left.legend(loc="upper right")
        _draw_participation(right, law, n, (places[0].log_theta, places[-1].log_theta - 2), rng)
        return saved(figure, path)


def regime_figures(law: GapLaw, n: float, seed: int = 0) -> list[Figure]:
    """The three maps and the ordered weights of `draw_regimes`, for a page; none where there are too few keys."""
    if n < _FEWEST_KEYS:
        return []
    rng = np.random.default_rng(seed)
    (places, count, angle), maps, ordered = _keys_around(law, n, rng), [], []
    for keys, (verb, colour) in zip(places, SHOWN, strict=True):
        across, up, weight, window = _around(keys, count, angle)
        seen = np.maximum(np.abs(across), np.abs(up)) < window
        sizes = np.maximum(_DISC * np.sqrt(weight), 2.0)[seen].tolist()
        discs = Series(
            "key, its area its weight", "points", across[seen].tolist(), up[seen].tolist(), colour, sizes=sizes
        )
        centre = [points("query", [0], [0], "ink", dash="dotted")]
        centre += [points("output", [weight @ across], [weight @ up], "ink", dash="dashed")]
        side = partial(Axis, low=-window, high=window)
        title, name = f"θ = {short(math.exp(keys.log_theta), 2)}: {verb}", f"across, at β = {short(keys.beta)}"
        maps.append(Figure(title, side(name), side("up"), [discs, *centre]))
        ranks, limit, samples = _ordered(keys, rng, _REPLICATES // 4)
        error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
        ordered.append(points(f"{verb}: {short(n)} keys", ranks, samples.mean(axis=0), colour, error))
        own = not ordered[1:]
        ordered.append(line("scaling limit", np.arange(1, limit.size + 1), limit, colour, "dashed", listed=own))
    low = Axis("mean weight", log=True, low=1e-4, high=2)
    return [*maps, Figure("Their ordered weights", Axis("rank of the key", log=True), low, ordered)]


def _keys_around(law: GapLaw, n: float, rng: np.random.Generator) -> tuple[list[KeyPoints], Array, Array]:
    """The keys at the three temperatures, and how many are nearer than each of the nearest, with its angle."""
    count = np.cumsum(rng.standard_exponential(int(min(n, 40 * _MAP_KEYS))))
    places = [KeyPoints(law, n, beta_sharing(n, law, min(keys, n / 4))) for keys in SHARING]
    return places, count, rng.uniform(0, 2 * np.pi, count.size)


def _around(points: KeyPoints, count: Array, angle: Array) -> tuple[Array, Array, Array, float]:
    """Where the keys of ordered `count` lie around the query, their weights, and the half width of a map of them."""
    x = points.reach(np.minimum(count, points.total))
    distance, weight = np.sqrt(2 * x / points.beta), np.exp(x[0] - x)
    window = float(distance[min(_MAP_KEYS, x.size) - 1])
    return distance * np.cos(angle), distance * np.sin(angle), weight / weight.sum(), window


def _draw_map(axes: Axes, points: KeyPoints, count: Array, angle: Array, colour: str) -> None:
    """The keys of ordered `count` around the query, and the output among them."""
    across, up, weight, window = _around(points, count, angle)
    axes.scatter(across, up, s=3, color=GREY, alpha=0.6, linewidths=0, label="key")
    axes.scatter(across, up, s=900 * weight, color=colour, alpha=0.6, linewidths=0)
    axes.plot(0, 0, "+", color="black", markersize=7, markeredgewidth=1.2, label="query")
    ring = {"markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 1.2}
    axes.plot(weight @ across, weight @ up, "o", markersize=8, label="output", **ring)  # type: ignore[arg-type]
    axes.set(xlim=(-window, window), ylim=(-window, window), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(GREY)
    axes.set_xlabel(f"β = {points.beta:,.3g}" if points.beta < 100 else f"β = {points.beta:,.0f}")


def _ordered(
    points: KeyPoints, rng: np.random.Generator, replicates: int = _REPLICATES
) -> tuple[NDArray[Any], Array, Array]:
    """Some ranks, the mean ordered weights of the scaling limit at every rank, and samples of n keys at those ranks."""
    most = int(min(_RANKS, points.n))
    ranks = np.unique(np.geomspace(1, most, 12).round().astype(int))
    poisson = PoissonPoints(theta(points.n, points.beta, points.law), points.a)
    limit = sample_ordered(poisson, most, 4 * replicates, rng).mean(axis=0)
    return ranks, limit, sample_ordered(points, most, replicates, rng)[:, ranks - 1]


def _draw_ordered(axes: Axes, points: KeyPoints, colour: str, rng: np.random.Generator) -> None:
    """Mean ordered weights: of the scaling limit, and of n keys at some ranks."""
    ranks, limit, samples = _ordered(points, rng)
    axes.loglog(np.arange(1, limit.size + 1), limit, "--", color=colour)
    _bars(axes, ranks, samples, [colour] * len(ranks))


def _draw_participation(axes: Axes, law: GapLaw, n: float, span: tuple[float, float], rng: np.random.Generator) -> None:
    """E Σw² along θ: measured in the colours of the regimes, exact at n, and in the limit."""
    coarse, fine = (np.exp(np.linspace(*span, number)) for number in (9, 41))
    samples = [sample_weights(_keys(law, n, value), _REPLICATES // 2, rng).participation for value in coarse]
    shades = [_COLOURS[regime(participation(_keys(law, n, value)))] for value in coarse]
    _bars(axes, coarse, np.stack(samples, axis=1), shades)
    exact = [participation(_keys(law, n, value)) for value in fine]
    limit = [participation(PoissonPoints(float(value), law.a)) for value in fine]
    axes.loglog(fine, exact, color="black", label="exact")
    axes.loglog(fine, limit, "--", color=GREY, label="limit")
    axes.set(xlabel="effective number of keys θ", ylabel="E Σw²", ylim=(min(exact) / 3, 2))
    axes.invert_xaxis()  # the temperature falls from left to right
    axes.legend(loc="lower right")


def _keys(law: GapLaw, n: float, target: float) -> KeyPoints:
    return KeyPoints(law, n, critical_beta(n, law, float(target)))


def _bars(axes: Axes, x: NDArray[Any], samples: Array, colours: Sequence[str]) -> None:
    """Means over samples (replicates, x) with 95% bars, clipped where they would reach zero on a logarithmic axis."""
    mean, bar = samples.mean(axis=0), 1.96 * samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    low = np.minimum(bar, 0.9 * mean)
    for i, colour in enumerate(colours):
        axes.errorbar(x[i], mean[i], yerr=([low[i]], [bar[i]]), fmt="o", color=colour)


def _short(log_value: float) -> str:
    """e^log_value in two digits, as a power of ten where it is very small."""
    value = math.exp(log_value)
    if value >= 1e-3:
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"$10^{{{log_value / math.log(10):.0f}}}$"
