"""`scaling` on real keys: local exponent of the keys near each query, critical β and softmax weights of the query.

Keys and queries lie on the unit sphere. The scaling limit with the local exponent of the nearest keys predicts the
weights at any β; softmax over the given keys gives the measured weights. The β at which five keys share the mass
assumes no law: a query outside the keys' support has no local exponent, and only this β is known for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, as_array
from limitlens.estimate import Estimate
from limitlens.experiments.weight_samples import Quantity, sample_weights
from limitlens.measures.named import sample_from_file
from limitlens.report.text import falling, join, short
from limitlens.report.view import Axis, Block, Figure, Section, Table, View, line, points
from limitlens.results import Result
from limitlens.statistics import local_exponent as local
from limitlens.statistics.local_exponent import OUTSIDE, LocalExponent
from limitlens.theory import PoissonPoints, mean_top, participation, regime
from limitlens.theory import theta as theta_of
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.control import Regime, check_beta

QUERY_SECONDS, PAIR_SECONDS = 0.3, 1e-6  # estimated time for a query, and for the distance of a query to one key
COLUMNS = ("query", "exponent", "critical β", "five-key β", "β", "θ", "Σw², limit", "Σw², measured", "regime")
_REPLICATES = 2000
_LARGEST_LOG_BETA = 100.0  # here only keys at exactly the same distance still share the mass


@dataclass(frozen=True)
class QueryKeys:
    """One query over given keys: local exponent (of key density near it), critical β, and softmax weights at one β."""

    exponent: Quantity  # local exponent with its 95% interval; unknown outside the support, like `critical_beta`
    radius: float  # distance of the farthest key used for the exponent
    critical_beta: Quantity  # β of θ = 1 by the local law
    five_key_beta: Quantity  # β at which five keys of the sample share the mass
    beta: float
    theta: Quantity  # at β: predicted by the scaling limit and measured on the keys, like the next two
    participation: Quantity
    top_weight: Quantity
    regime: Regime
    support: float = 1.0  # share of keys with neighbours as far away (`statistics.local_exponent.support`)


@dataclass(frozen=True, eq=False, repr=False)
class RealKeys(Result):
    """Result of `scaling` on given keys: local exponent, critical β and softmax weights of every query."""

    kind, file = "keys", "scaling"
    inputs: Mapping[str, Any]  # number of keys, `beta` or the `theta` of each query, and the files of keys and queries
    median: Mapping[str, float | None]  # of `exponent` and `critical_beta`, over queries within the keys' support
    queries: tuple[QueryKeys, ...]

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per query: β, regime, local exponent, critical β and measured softmax weights."""
        names = ("exponent", "critical_beta", "five_key_beta", "theta", "participation", "top_weight")
        return pd.DataFrame(
            {"query": index, "beta": row.beta, "regime": row.regime, "support": row.support}
            | {name: getattr(row, name).measured.value for name in names}
            | {f"{name}_stderr": getattr(row, name).measured.stderr for name in ("exponent", "critical_beta")}
            for index, row in enumerate(self.queries)
        )

    def view(self) -> View:
        """Page of the result: local exponent, critical β and softmax weights of every query."""
        inside = [row.participation for row in self.queries if row.support >= OUTSIDE]
        many = "1 query" if len(self.queries) == 1 else f"{len(self.queries):,} queries"
        keys, neighbours = f"{self.inputs['keys']:,}", self.inputs["neighbours"]
        trust = ["The scaling limit of a real head is a heuristic: it assumes a power law of keys near the query."]
        if outside := len(self.queries) - len(inside):
            trust.append(
                f"{outside:,} of {many} lie outside the keys' support: their neighbours are farther away than those of "
                "any of 64 keys. They have no local exponent."
            )
        rows = [
            (
                *(index, row.exponent.measured, row.critical_beta.measured, row.five_key_beta.measured, row.beta),
                *(row.theta.predicted, row.participation.predicted, row.participation.measured.value, row.regime),
            )
            for index, row in enumerate(self.queries)
        ]
        lead = "A query on the diagonal has the weights of the scaling limit; single queries scatter widely."
        blocks: list[Block] = [_limit_figure(inside)] if inside else []
        blocks.append(Table("queries", COLUMNS, rows, shown=40))
        return View(
            f"{many} on {keys} real keys",
            f"{neighbours} nearest keys behind each exponent",
            (
                f"For each of {many}, the {neighbours} nearest of {keys} keys gave the local exponent: how the density "
                "of keys falls towards the query.",
                *self._conclusions(),
            ),
            [Section("Exponents and weights", lead, blocks)],
            trust=trust,
        )

    def _conclusions(self) -> tuple[str, str]:
        regimes = [row.regime for row in self.queries]
        counts = join([f"{regimes.count(name)} {name}" for name in get_args(Regime) if name in regimes])
        if exponent := self.median["exponent"]:
            critical = short(self.median["critical_beta"], 4)
            return (
                f"The median local exponent is {short(exponent)}, the median critical inverse temperature {critical}; "
                f"queries are {counts}.",
                f"To keep these queries selective in a longer context, let β grow like {falling(-2 / exponent)}.",
            )
        return (
            "There is no local exponent: the queries lie outside the keys' support. At the β where five keys share the "
            f"mass they are {counts}.",
            "Use the five-key β, which assumes nothing about the keys.",
        )


def _limit_figure(shares: Sequence[Quantity]) -> Figure:
    x = [float(row.predicted or 0.0) for row in shares]  # predicted for every query within the support
    y = [row.measured.value for row in shares]
    ends = [min(x + y), max(x + y)]
    across, up = Axis("predicted by the scaling limit", log=True), Axis("measured Σw²", log=True)
    series = [points("queries", x, y), line("equal", ends, ends, "grey", "dashed")]
    return Figure("Σw² of each query against its scaling limit", across, up, series)


def real_keys(
    queries: ArrayLike | str | Path | None, keys: ArrayLike | str | Path | None, beta: float | None = None,
    theta: float = 1.0, neighbours: int | None = None, *, normalise: bool = False, seed: int = 0, yes: bool = False,
) -> RealKeys:  # fmt: skip
    """Attention of queries (q, d) over given keys (n, d), at `beta` or at the β that gives `theta` effective keys.

    Queries and keys are arrays or .npy files; `normalise` projects them onto the unit sphere. The local law of the keys
    comes from the `neighbours` keys nearest to a query. A computation estimated to be too long starts only with `yes`.
    """
    if keys is None or queries is None:
        raise InputError("only one of keys and queries was given; expected both or neither")
    sources = {"keys": keys, "queries": queries}
    files = {name: str(path) for name, path in sources.items() if isinstance(path, (str, Path))}
    tokens = {name: sample_from_file(path).tokens for name, path in files.items()}
    vectors, rows = (as_array(name, part, ndim=2) for name, part in (sources | tokens).items())
    if not len(rows):
        raise InputError("there are no queries; expected at least one row")
    pairs = float(len(vectors)) * len(rows)
    check_cost("scaling", seconds=QUERY_SECONDS * len(rows) + PAIR_SECONDS * pairs, memory=16.0 * pairs, yes=yes)
    rng = np.random.default_rng(seed)
    distances = [local.query_distances(row, vectors, normalise) for row in rows]
    estimates = [local.local_exponent(row, neighbours) for row in distances]
    radii = [estimate.radius for estimate in estimates]
    shares = local.support(radii, local.on_sphere("a key", vectors, normalise), neighbours)
    found = [
        _query(estimate, row, share, beta, theta, rng)
        for estimate, row, share in zip(estimates, distances, shares.tolist(), strict=True)
    ]
    last = estimates[-1]
    inputs: dict[str, Any] = {"keys": last.n, "beta": beta, "theta": theta if beta is None else None, "seed": seed}
    inputs |= {"neighbours": last.neighbours, "normalise": normalise, **({"files": files} if files else {})}
    inside = [row for row in found if row.support >= OUTSIDE]
    known = {name: [getattr(row, name).measured.value for row in inside] for name in ("exponent", "critical_beta")}
    median = {name: float(np.median(values)) if values else None for name, values in known.items()}
    return RealKeys(inputs, median, tuple(found))


def _query(
    estimate: LocalExponent, distances: Array, share: float, beta: float | None, theta: float, rng: np.random.Generator
) -> QueryKeys:
    """Softmax weights of a query at `beta` or at the β of `theta`, from local exponent and `distances` to keys (n,)."""
    inside, gaps = share >= OUTSIDE, np.square(distances) / 2
    five = _sharing_beta(gaps, 5.0)
    default_beta = estimate.critical_beta(theta=theta)[0] if inside else five or 1.0
    beta = default_beta if beta is None else check_beta(beta)
    shared, top = _shares(gaps, beta)
    measured = {"theta": float(np.exp(-beta * gaps).sum()), "participation": shared, "top_weight": top}
    predicted, below = {}, {}
    exponent = critical = Quantity()
    if inside:  # the prediction is heuristic: it assumes the power law down to the nearest keys
        limit_theta = theta_of(estimate.n, beta, estimate.local)
        limit = PoissonPoints(limit_theta, estimate.local.a)
        drawn = sample_weights(limit, _REPLICATES, rng)
        predicted = {"theta": limit_theta, "participation": participation(limit), "top_weight": mean_top(limit)}
        pairs = {"participation": drawn.participation <= shared, "top_weight": drawn.top <= top}
        below = {name: float(share.mean()) for name, share in pairs.items()}
        exponent = Quantity(measured=Estimate(estimate.exponent, estimate.stderr, *estimate.interval))
        value, relative_stderr = estimate.critical_beta()
        critical = Quantity(measured=Estimate(value, value * relative_stderr))
    status = Status.HEURISTIC if inside else None
    quantities = {
        name: Quantity(predicted.get(name), status, measured=Estimate(number), quantile_in_limit=below.get(name))
        for name, number in measured.items()
    }
    return QueryKeys(
        exponent=exponent, radius=estimate.radius, support=share, critical_beta=critical,
        five_key_beta=Quantity(measured=Estimate.of(five)), beta=beta, regime=regime(shared), **quantities,
    )  # fmt: skip


def _shares(gaps: Array, beta: float) -> tuple[float, float]:
    """Σw² and largest weight of the softmax over keys at inverse temperature β, from gaps |q − k|²/2 (n,)."""
    weight = np.exp(beta * (gaps.min() - gaps))
    mass = float(weight.sum())
    return float(np.square(weight).sum()) / mass**2, 1 / mass


def _sharing_beta(gaps: Array, keys: float) -> float | None:
    """Inverse temperature β at which 1/Σw² = `keys` for a query with gaps |q − k|²/2 (n,) to keys; None if n ≤ keys."""
    if gaps.size <= keys:
        return None

    def excess(log_beta: float) -> float:
        return math.log(keys * _shares(gaps, math.exp(log_beta))[0])

    low = high = -math.log(float(np.median(gaps)))
    while excess(low) > 0:
        low -= 1
    while excess(high) < 0 and high < _LARGEST_LOG_BETA:
        high += 1
    return math.exp(float(optimize.brentq(excess, low, high))) if excess(high) >= 0 else None
