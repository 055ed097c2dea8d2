"""Where a sample of real keys puts attention: the local exponent at a query, the critical β, and the weights it gives.

Keys and queries lie on the unit sphere. The local power law is estimated from the nearest keys; the scaling limit with
that exponent then says what to expect of the weights at any β, beside what softmax over the sample does. In high
dimension the limit is far away at any real n; the β at which five keys of the sample share the mass needs no law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from limitlens.errors import Array, InputError, as_array
from limitlens.experiments.weight_samples import sample_weights
from limitlens.statistics.local_exponent import LocalExponent, local_exponent, query_distances
from limitlens.theory.prediction import Status
from limitlens.theory.scaling import PoissonPoints, mean_top, participation, regime, theta_asymptotic
from limitlens.theory.scaling.control import check_beta

_REPLICATES = 2000
_COLDEST = 100.0  # of log β: by then only keys at the very same distance still share the mass


def keys_document(
    queries: ArrayLike,
    keys: ArrayLike,
    *,
    beta: float | None = None,
    effective: float = 1.0,
    neighbours: int | None = None,
    normalise: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Every query (rows of (q, d)) against the keys (n, d), at β, or at the β where each query has θ = `effective`."""
    rng = np.random.default_rng(seed)
    found = []
    for estimate, distances in _estimates(queries, keys, neighbours, normalise):
        tilt = check_beta(beta) if beta is not None else estimate.critical_beta(theta=effective)[0]
        found.append(_query_document(estimate, distances, tilt, rng))
    return {
        "inputs": {"keys": estimate.n, "beta": beta, "theta": None if beta is not None else effective}
        | {"neighbours": estimate.neighbours, "seed": seed},
        "median": {
            name: float(np.median([entry[name]["measured"] for entry in found]))
            for name in ("exponent", "critical_beta")
        },
        "queries": found,
    }


def median_exponent(
    queries: ArrayLike, keys: ArrayLike, neighbours: int | None = None, normalise: bool = False
) -> LocalExponent:
    """The estimate at the query whose critical β is the median one: a single local law to stand for the head."""
    estimates = [estimate for estimate, _ in _estimates(queries, keys, neighbours, normalise)]
    return sorted(estimates, key=lambda estimate: estimate.critical_beta()[0])[(len(estimates) - 1) // 2]


def _estimates(
    queries: ArrayLike, keys: ArrayLike, neighbours: int | None, normalise: bool
) -> Iterator[tuple[LocalExponent, Array]]:
    asked = as_array("queries", queries, ndim=2)
    if not len(asked):
        raise InputError("there are no queries; expected at least one row")
    for query in asked:
        distances = query_distances(query, keys, normalise)
        yield local_exponent(distances, neighbours), distances


def _query_document(estimate: LocalExponent, distances: Array, beta: float, rng: np.random.Generator) -> dict[str, Any]:
    critical, relative = estimate.critical_beta()
    effective = theta_asymptotic(estimate.n, beta, estimate.local)
    points = PoissonPoints(effective, estimate.local.a)
    limit = sample_weights(points, _REPLICATES, rng)
    gaps = np.square(distances) / 2
    shared, top = _shares(gaps, beta)
    status = Status.HEURISTIC.value  # it rests on the power law reaching from r_k down to the nearest keys
    return {
        "exponent": {"measured": estimate.exponent, "stderr": estimate.stderr, "interval": estimate.interval},
        "radius": estimate.radius,
        "critical_beta": {"measured": critical, "stderr": critical * relative},
        "five_key_beta": {"measured": _sharing_beta(gaps, 5.0)},
        "beta": beta,
        "theta": {"predicted": effective, "status": status, "measured": float(np.exp(-beta * gaps).sum())},
        "participation": {
            "predicted": participation(points),
            "status": status,
            "measured": shared,
            "quantile_in_limit": float(np.mean(limit.participation <= shared)),
        },
        "top_weight": {
            "predicted": mean_top(points),
            "status": status,
            "measured": top,
            "quantile_in_limit": float(np.mean(limit.top <= top)),
        },
        "regime": regime(shared),
    }


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
