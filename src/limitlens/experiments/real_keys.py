"""Where a sample of real keys puts attention: the local exponent at a query, the critical β, and the weights it gives.

Keys and queries lie on the unit sphere. The scaling limit with the local exponent of the nearest keys says what weights
to expect at any β, beside what softmax over the sample does. The β at which five keys share the mass needs no law: it
is all there is for a query outside the keys' support, which has no local exponent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, as_array
from limitlens.experiments.quantity import Quantity
from limitlens.experiments.weight_samples import sample_weights
from limitlens.report.view import Block, Guide, Row, Table, View, line, points
from limitlens.report.words import falling, join, read_words, short, worded_figure, worded_view
from limitlens.results import Result
from limitlens.statistics.local_exponent import (
    OUTSIDE,
    LocalExponent,
    local_exponent,
    on_sphere,
    query_distances,
    support,
)
from limitlens.theory import PoissonPoints, mean_top, participation, regime
from limitlens.theory import theta as theta_of
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.control import Regime, check_beta

WORDS = read_words("experiments/scaling_words.json")["keys"]
INSIDE = "within the keys' support"
_REPLICATES = 2000
_COLDEST = 100.0  # of log β: by then only keys at the very same distance still share the mass


@dataclass(frozen=True)
class QueryKeys:
    """One query against the keys at one β."""

    exponent: Quantity  # local, with its 95% interval; it and what follows from it are unknown outside the support
    radius: float  # distance of the farthest key behind it
    critical_beta: Quantity  # the β of θ = 1 by the local law
    five_key_beta: Quantity  # at which five keys of the sample share the mass
    beta: float
    theta: Quantity  # at β, of the scaling limit and of the sample, as what follows
    participation: Quantity
    top_weight: Quantity
    regime: Regime
    support: float = 1.0  # share of keys with neighbours as far away (`statistics.local_exponent.support`)


@dataclass(frozen=True, eq=False, repr=False)
class RealKeys(Result):
    """Queries against real keys."""

    kind, file = "keys", "scaling"
    inputs: Mapping[str, Any]  # number of keys, `beta` or the `theta` of each query, and where keys were read from
    median: Mapping[str, float | None]  # of `exponent` and `critical_beta`, over queries within the keys' support
    queries: tuple[QueryKeys, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One row per query."""
        names = ("exponent", "critical_beta", "five_key_beta", "theta", "participation", "top_weight")
        return pd.DataFrame(
            {"query": index, "beta": row.beta, "regime": row.regime, "support": row.support}
            | {name: getattr(row, name).measured for name in names}
            | {"exponent_stderr": row.exponent.stderr, "critical_beta_stderr": row.critical_beta.stderr}
            for index, row in enumerate(self.queries)
        )

    def view(self) -> View:
        """Local exponent, critical temperature and weights per query."""
        regimes = [row.regime for row in self.queries]
        counts = join([f"{regimes.count(name)} {name}" for name in get_args(Regime) if name in regimes])
        alphas, shares = [row.exponent for row in self.queries], [row.participation for row in self.queries]
        expected, found = ([getattr(row, name) for row in shares] for name in ("predicted", "measured"))
        inside = [index for index, row in enumerate(self.queries) if row.support >= OUTSIDE]
        figures = []
        if inside:
            exponents, bars = zip(*((alphas[i].measured, alphas[i].stderr) for i in inside), strict=True)
            x, y = zip(*((expected[i], found[i]) for i in inside), strict=True)
            ends = [min(x + y), max(x + y)]
            local = [points("measured", inside, exponents, stderr=bars)]
            weights = [points("queries", x, y), line("equal", ends, ends, "grey", "dashed")]
            median = Guide("median", y=self.median["exponent"])
            figures = [worded_figure(WORDS["local"], local, median), worded_figure(WORDS["weights"], weights)]
        outside, exponent = len(self.queries) - len(inside), self.median["exponent"]
        cells = [(row.exponent.cell, row.critical_beta.cell, row.five_key_beta.cell) for row in self.queries]
        rows = [
            (index, *cells[index], row.beta, row.theta.predicted, expected[index], found[index], row.regime)
            for index, row in enumerate(self.queries)
        ]
        many = "1 query" if len(self.queries) == 1 else f"{len(self.queries):,} queries"
        known = {"outside": outside, "many": many, "exponent": short(exponent), "regimes": counts}
        known |= {"critical_beta": short(self.median["critical_beta"], 4)}
        known |= {"growth": falling(-2 / exponent) if exponent else ""}
        said = {name: text.format(**known) for name, text in WORDS["said"].items()}
        found_do = ("found", "do") if inside else ("nothing", "five")
        told = dict(zip(("found", "do"), (said[name] for name in found_do), strict=True))
        blocks: list[Block] = [Row(figures), Table("queries", WORDS["queries"], rows, shown=40)]
        words = {**WORDS, "trust": [*WORDS["trust"], *([said["outside"]] if outside else [])]}
        return worded_view(words, blocks if inside else blocks[1:], of=self, many=many, **told)

    def __repr__(self) -> str:
        told = "median local exponent {exponent:.3g}, median critical β {critical_beta:.4g}"
        told = told.format(**self.median) if self.median["exponent"] else f"none {INSIDE}"
        return f"<RealKeys: {len(self.queries)} queries on {self.inputs['keys']:,} keys, {told}>"


def real_keys(
    queries: ArrayLike,
    keys: ArrayLike,
    beta: float | None = None,
    theta: float = 1.0,
    neighbours: int | None = None,
    *,
    normalise: bool = False,
    seed: int = 0,
    files: Mapping[str, str] | None = None,
) -> RealKeys:
    """Every query (rows of (q, d)) against the keys (n, d), at β, or at the β where each query has this θ."""
    rng = np.random.default_rng(seed)
    found = []
    for estimate, distances, usual in _estimates(queries, keys, neighbours, normalise):
        found.append(_query(estimate, distances, usual, beta, theta, rng))
    inputs: dict[str, Any] = {"keys": estimate.n, "beta": beta, "theta": theta if beta is None else None, "seed": seed}
    inputs |= {"neighbours": estimate.neighbours, "normalise": normalise, **({"files": files} if files else {})}
    names = ("exponent", "critical_beta")
    inside = [row for row in found if row.support >= OUTSIDE]
    known = {name: [getattr(row, name).measured for row in inside] for name in names}
    median = {name: float(np.median(values)) if values else None for name, values in known.items()}
    return RealKeys(inputs, median, tuple(found))


def median_exponent(
    queries: ArrayLike, keys: ArrayLike, neighbours: int | None = None, normalise: bool = False
) -> LocalExponent:
    """The estimate at the query whose critical β is the median one: a single local law to stand for the head."""
    found = _estimates(queries, keys, neighbours, normalise)
    estimates = [estimate for estimate, _, usual in found if usual >= OUTSIDE]
    if not estimates:
        raise InputError(f"no query lies {INSIDE}, so there is no local exponent; expected queries among the keys")
    return sorted(estimates, key=lambda estimate: estimate.critical_beta()[0])[(len(estimates) - 1) // 2]


def _estimates(
    queries: ArrayLike, keys: ArrayLike, neighbours: int | None, normalise: bool
) -> Iterator[tuple[LocalExponent, Array, float]]:
    asked = as_array("queries", queries, ndim=2)
    if not len(asked):
        raise InputError("there are no queries; expected at least one row")
    rows = [query_distances(query, keys, normalise) for query in asked]
    found = [local_exponent(distances, neighbours) for distances in rows]
    vectors = on_sphere("a key", as_array("keys", keys, ndim=2), normalise)
    usual = support([estimate.radius for estimate in found], vectors, neighbours)
    yield from zip(found, rows, usual.tolist(), strict=True)


def _query(
    estimate: LocalExponent, distances: Array, usual: float, beta: float | None, theta: float, rng: np.random.Generator
) -> QueryKeys:
    gaps = np.square(distances) / 2
    five, inside = _sharing_beta(gaps, 5.0), usual >= OUTSIDE
    critical_beta = estimate.critical_beta(theta=theta)[0] if inside else five or 1.0
    at = critical_beta if beta is None else check_beta(beta)
    shared, top = _shares(gaps, at)
    numbers = {"theta": float(np.exp(-at * gaps).sum()), "participation": shared, "top_weight": top}
    found = {name: Quantity(measured=number) for name, number in numbers.items()}
    exponent = critical = Quantity()
    if inside:
        reached = theta_of(estimate.n, at, estimate.local)
        limit = PoissonPoints(reached, estimate.local.a)
        drawn = sample_weights(limit, _REPLICATES, rng)
        expected = {"theta": reached, "participation": participation(limit), "top_weight": mean_top(limit)}
        below = {"participation": float(np.mean(drawn.participation <= shared))}
        below["top_weight"] = float(np.mean(drawn.top <= top))
        for name, value in expected.items():  # the power law is assumed to reach from r_k down to the nearest keys
            share = below.get(name)
            found[name] = Quantity(value, Status.HEURISTIC, measured=numbers[name], quantile_in_limit=share)
        exponent = Quantity(measured=estimate.exponent, stderr=estimate.stderr, interval=estimate.interval)
        middle, relative = estimate.critical_beta()
        critical = Quantity(measured=middle, stderr=middle * relative)
    return QueryKeys(
        exponent=exponent, radius=estimate.radius, support=usual, critical_beta=critical,
        five_key_beta=Quantity(measured=five), beta=at, regime=regime(shared), **found,
    )  # fmt: skip


def _shares(gaps: Array, beta: float) -> tuple[float, float]:
    """Σw² and the top weight of the sample at β."""
    weight = np.exp(beta * (gaps.min() - gaps))
    mass = float(weight.sum())
    return float(np.square(weight).sum()) / mass**2, 1 / mass


def _sharing_beta(gaps: Array, keys: float) -> float | None:
    """The β at which `keys` keys of the sample share the mass, 1/Σw² = keys: no law is assumed; None when n ≤ keys."""
    if gaps.size <= keys:
        return None

    def excess(log_beta: float) -> float:
        return math.log(keys * _shares(gaps, math.exp(log_beta))[0])

    low = high = -math.log(float(np.median(gaps)))
    while excess(low) > 0:
        low -= 1
    while excess(high) < 0 and high < _COLDEST:
        high += 1
    return math.exp(float(optimize.brentq(excess, low, high))) if excess(high) >= 0 else None
