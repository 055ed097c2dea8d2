"""Figures of the three regimes: the same keys at three temperatures, their ordered weights, and Σw² against θ."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array
from limitlens.experiments.weight_samples import sample_ordered, sample_weights
from limitlens.report.text import short
from limitlens.report.view import Axis, Colour, Figure, Series, line, points
from limitlens.theory import GapLaw, KeyPoints, PoissonPoints, beta_sharing, critical_beta, participation, regime, theta

SHARING = (400.0, 5.0, 1.05)  # keys that share the mass at the three temperatures
SHOWN: tuple[tuple[str, str, Colour], ...] = (
    ("averages", "averaging", "blue"), ("selects", "selective", "green"), ("collapses", "frozen", "red")
)  # fmt: skip
_MAP_KEYS = 60  # keys shown on a map
FEWEST_KEYS = 400
_RANKS = 64
_REPLICATES = 500
_DISC = 30  # pixels, radius of a key that holds all of the mass


def regime_figures(law: GapLaw, n: float, seed: int = 0) -> list[Figure]:
    """Simulate n keys at the β where 400, 5 and 1.05 of them share the mass; no figures where n < `FEWEST_KEYS`.

    On the three maps each disc is a key at its true distance from the query and at a random angle; its area is its
    weight. The other figures compare simulations of n keys, with 95% bars, with theory: their ordered weights with the
    scaling limit, and Σw² with the exact expectation and the limit.
    """
    if n < FEWEST_KEYS:
        return []
    rng, maps, ordered = np.random.default_rng(seed), [], []
    count = np.cumsum(rng.standard_exponential(int(min(n, 40 * _MAP_KEYS))))  # expected number of keys nearer than each
    places = [KeyPoints(law, n, beta_sharing(n, law, min(keys, n / 4))) for keys in SHARING]
    angle = rng.uniform(0, 2 * np.pi, count.size)  # of each key around the query
    for keys, (verb, _, colour) in zip(places, SHOWN, strict=True):
        across, up, weight, window = _around(keys, count, angle)
        inside = np.maximum(np.abs(across), np.abs(up)) < window
        sizes = np.maximum(_DISC * np.sqrt(weight), 2.0)[inside].tolist()
        discs = Series(verb, "points", across[inside].tolist(), up[inside].tolist(), colour, sizes=sizes)
        centre = [points("query", [0], [0], "ink", dash="dotted")]
        centre += [points("output", [weight @ across], [weight @ up], "ink", dash="dashed")]
        side = partial(Axis, low=-window, high=window)
        title = f"θ = {short(math.exp(keys.log_theta), 2)}: {verb}"
        maps.append(Figure(title, side(f"across, at β = {short(keys.beta)}"), side("up"), [discs, *centre]))
        ranks, limit, samples = _ordered(keys, rng)
        error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
        ordered.append(points(verb, ranks, samples.mean(axis=0), colour, error))
        ordered.append(line(f"limit: {verb}", np.arange(1, limit.size + 1), limit, colour, "dashed", listed=False))
    low = Axis("mean weight", log=True, low=1e-4, high=2)
    weights = Figure("Ordered weights", Axis("rank of the key", log=True), low, ordered)
    shared = [*_along_theta(law, n, (places[0].log_theta, places[-1].log_theta - 2), rng)]
    across_theta, up_theta = Axis("effective number of keys θ", log=True), Axis("E Σw²", log=True, high=2)
    return [*maps, weights, Figure("Σw² against the effective number of keys", across_theta, up_theta, shared)]


def _around(points: KeyPoints, count: Array, angle: Array) -> tuple[Array, Array, Array, float]:
    """Coordinates of the keys around the query, their weights, and the half width of the map."""
    x = points.reach(np.minimum(count, points.total))
    distance, weight = np.sqrt(2 * x / points.beta), np.exp(x[0] - x)
    window = float(distance[min(_MAP_KEYS, x.size) - 1])
    return distance * np.cos(angle), distance * np.sin(angle), weight / weight.sum(), window


def _ordered(points: KeyPoints, rng: np.random.Generator) -> tuple[NDArray[Any], Array, Array]:
    """Ranks, mean ordered weights of the scaling limit at every rank, and samples of n keys at those ranks."""
    most = int(min(_RANKS, points.n))
    ranks = np.unique(np.geomspace(1, most, 12).round().astype(int))
    poisson = PoissonPoints(theta(points.n, points.beta, points.law), points.a)
    limit = sample_ordered(poisson, most, 4 * _REPLICATES, rng).mean(axis=0)
    return ranks, limit, sample_ordered(points, most, _REPLICATES, rng)[:, ranks - 1]


def _along_theta(law: GapLaw, n: float, span: tuple[float, float], rng: np.random.Generator) -> Iterator[Series]:
    """E Σw² against θ: exact at n, in the limit, and measured, coloured by regime."""
    coarse, fine = (np.exp(np.linspace(*span, number)) for number in (9, 41))
    yield line("exact", fine, [participation(_keys(law, n, value)) for value in fine], "ink")
    limit = [participation(PoissonPoints(float(value), law.a)) for value in fine]
    yield line("scaling limit", fine, limit, "grey", "dashed")
    samples = [sample_weights(_keys(law, n, value), _REPLICATES, rng).participation for value in coarse]
    stderr = [values.std(ddof=1) / math.sqrt(len(values)) for values in samples]
    measured = [*zip(coarse, [values.mean() for values in samples], stderr, strict=True)]
    regimes = [regime(participation(_keys(law, n, value))) for value in coarse]
    for verb, name, colour in SHOWN:
        if rows := [row for row, found in zip(measured, regimes, strict=True) if found == name]:
            x, y, bars = zip(*rows, strict=True)
            yield points(verb, x, y, colour, bars)


def _keys(law: GapLaw, n: float, target: float) -> KeyPoints:
    return KeyPoints(law, n, critical_beta(n, law, float(target)))
