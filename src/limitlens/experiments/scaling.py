"""Scaling limits, predicted beside measured: the ordered weights and the output of attention from one query.

For a law of the keys, n and β (or θ) one document holds, per quantity: the value of the scaling limit ("predicted"),
the exact expectation at this n ("exact"), and what a simulation of n keys gave ("measured", with its standard error).
The laws of the top weight, of Σw² and of the output are compared with the limit's by Kolmogorov-Smirnov tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from limitlens.errors import Array, InputError
from limitlens.experiments.weight_samples import WeightSample, check_replicates, sample_direct, sample_weights
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.control import (
    critical_beta,
    critical_beta_asymptotic,
    critical_n,
    critical_n_asymptotic,
    regime,
    theta,
    theta_asymptotic,
)
from limitlens.theory.scaling.laws import GapLaw, PowerGap, uniform
from limitlens.theory.scaling.points import KeyPoints, PoissonPoints
from limitlens.theory.scaling.regimes import (
    averaging,
    collapse_deficit,
    keys_holding,
    nearest_distance,
    shrinkage_expansion,
)
from limitlens.theory.scaling.top_weight import mean_inverse_top, mean_top
from limitlens.theory.scaling.weights import entropy, gap_mean, gap_variance, participation, tangential_variance

_MOST_NUMBERS = 2e8  # coordinates drawn by brute force before the nearest keys alone are drawn instead
_COLLAPSED_TOP = 0.9  # of E w₁: the formulas of the collapse are its first order, good to some percent from here on
_NEAR_LIMIT = 0.2  # in log E Σw²
_VERIFIED = Status.VERIFIED.value


def measure_weights(
    law: GapLaw, n: int, beta: float, replicates: int, rng: np.random.Generator
) -> tuple[WeightSample, str]:
    """Simulate n keys, and say how: "direct" while brute force is affordable, else "nearest keys"."""
    check_replicates(replicates)
    if isinstance(law, PowerGap) and law.power == 0 and float(n) * law.dim * replicates <= _MOST_NUMBERS:
        return sample_direct(law.dim, int(n), beta, replicates, rng), "direct"
    return sample_weights(KeyPoints(law, n, beta), replicates, rng, law.tangent_dim), "nearest keys"


def scaling_document(
    law: GapLaw,
    n: int,
    *,
    effective: float | None = None,
    beta: float | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything predicted and measured for attention over n keys of a law, at β or at the θ called `effective`."""
    if (effective is None) == (beta is None):
        raise InputError("expected exactly one of theta and beta: the other follows from it")
    tilt = critical_beta(n, law, effective) if effective is not None else float(beta or 0.0)
    exact_theta = theta(n, tilt, law)
    rng = np.random.default_rng(seed)
    found, method = measure_weights(law, n, tilt, replicates, rng)
    limit = sample_weights(PoissonPoints(exact_theta, law.a), replicates, rng, law.tangent_dim)
    finite, poisson = KeyPoints(law, n, tilt), PoissonPoints(exact_theta, law.a)
    quantities = _quantities(law, finite, poisson, found, limit)
    shared = quantities["participation"]["exact"]
    return {
        "inputs": {"law": law.name, **law.parameters, "n": n, "theta": exact_theta, "beta": tilt}
        | {"replicates": replicates, "seed": seed},
        "local": {"exponent": law.exponent, "a": law.a, "c": law.c},
        "control": _control(law, n, tilt, exact_theta),
        "regime": regime(shared),
        "quantities": quantities,
        "averaging": {"applies": regime(shared) == "averaging"} | _averaging(law, n, tilt, found),
        "collapse": {"applies": quantities["top_weight"]["exact"] > _COLLAPSED_TOP} | _collapse(law, n, tilt, found),
        "laws": _laws(law, n, tilt, found, limit),
        "warnings": _warnings(n, law, quantities["participation"]),
        "method": method,
        "replaced_mass": float(found.remainder.max()),
    }


def ambient_document(law: GapLaw, dim: int, n: int, replicates: int = 2000, seed: int = 0) -> dict[str, Any]:
    """What keys of low exponent get at the critical β of the sphere they lie in: mass spread thin, since α < d − 1."""
    beta = critical_beta(n, uniform(dim))
    found, _ = measure_weights(law, n, beta, replicates, np.random.default_rng(seed))
    points = KeyPoints(law, n, beta)
    return {
        "beta": beta,
        "theta": {"predicted": theta(n, beta, law), "status": _VERIFIED},
        "participation": {
            "predicted": participation(points),
            "status": _VERIFIED,
            **mean_and_stderr(found.participation),
        },
    }


def mean_and_stderr(values: Array) -> dict[str, Any]:
    """The mean of independent values with its standard error; null where a value is missing."""
    if np.isnan(values).any():
        return {"measured": None, "stderr": None}
    return {"measured": float(values.mean()), "stderr": float(values.std(ddof=1) / np.sqrt(values.size))}


def _warnings(n: int, law: GapLaw, shared: dict[str, Any]) -> list[str]:
    """Say so where the limit is not the law at this n: the higher the exponent, the farther away it is."""
    if abs(math.log(shared["exact"] / shared["predicted"])) < _NEAR_LIMIT:
        return []
    return [
        f"the scaling limit is not reached at n = {n:,} with local exponent {law.exponent:g}: E Σw² is "
        f"{shared['exact']:.3g}, the limit says {shared['predicted']:.3g}; trust the exact values"
    ]


def _control(law: GapLaw, n: int, beta: float, effective: float) -> dict[str, Any]:
    pairs = {
        "theta": (effective, theta_asymptotic(n, beta, law)),
        "critical_beta": (critical_beta(n, law), critical_beta_asymptotic(n, law)),
        "critical_n": (critical_n(beta, law), critical_n_asymptotic(beta, law)),
    }
    return {
        name: {"predicted": exact, "asymptotic": asymptotic, "status": _VERIFIED}
        for name, (exact, asymptotic) in pairs.items()
    }


def _quantities(
    law: GapLaw, finite: KeyPoints, poisson: PoissonPoints, found: WeightSample, limit: WeightSample
) -> dict[str, Any]:
    """Per quantity: the limit, the exact value at n, the measurement."""
    pairs: dict[str, tuple[float | None, float | None, Array]] = {
        "participation": (participation(poisson), participation(finite), found.participation),
        "top_weight": (mean_top(poisson), mean_top(finite), found.top),
        "inverse_top_weight": (mean_inverse_top(poisson), mean_inverse_top(finite), 1 / found.top),
        "entropy": (entropy(poisson), entropy(finite), found.entropy),
        "output_gap": (gap_mean(poisson), gap_mean(finite), found.gap),
        "output_gap_variance": (
            gap_variance(poisson), gap_variance(finite), np.square(found.gap - found.gap.mean()) * _unbias(found),
        ),
    }  # fmt: skip
    if law.tangent_dim is not None:
        across = (tangential_variance(points, law.tangent_dim) for points in (poisson, finite))
        pairs["output_tangential_variance"] = (*across, np.square(found.tangential))  # type: ignore[assignment]
    document = {
        name: {"predicted": predicted, "status": _VERIFIED, "exact": exact, **mean_and_stderr(values)}
        for name, (predicted, exact, values) in pairs.items()
    }
    sampled = mean_and_stderr(limit.keys90)
    document["keys_holding_90"] = {
        "predicted": sampled["measured"],
        "predicted_stderr": sampled["stderr"],
        "status": _VERIFIED,
        "averaging": keys_holding(finite),
        **mean_and_stderr(found.keys90),
    }
    return document


def _averaging(law: GapLaw, n: int, beta: float, found: WeightSample) -> dict[str, Any]:
    """The subcritical formulas in the units of the output itself, <q, Γ> and one coordinate across."""
    limit = averaging(n, beta, law)
    radial = 1 - found.gap / beta
    document = {
        "mean": {"predicted": limit.mean + limit.bias, "status": _VERIFIED, **mean_and_stderr(radial)},
        "shrinkage": {"predicted": limit.shrinkage, "status": _VERIFIED},
        "bias": {"predicted": limit.bias, "status": _VERIFIED, **mean_and_stderr(radial - limit.mean)},
        "radial_variance": {
            "predicted": limit.radial_variance,
            "status": _VERIFIED,
            **mean_and_stderr(np.square(radial - radial.mean()) * _unbias(found)),
        },
        "effective_sample_size": {
            "predicted": limit.effective_sample_size,
            "status": Status.PROVED.value,
            "measured": 1 / found.participation.mean(),
            "stderr": found.participation.std(ddof=1) / found.participation.mean() ** 2 / np.sqrt(found.top.size),
        },
    }
    if isinstance(law, PowerGap) and law.power == 0:
        document["shrinkage"]["expansion"] = shrinkage_expansion(beta, law.dim)
    if limit.tangential_variance is not None:
        document["tangential_variance"] = {
            "predicted": limit.tangential_variance,
            "status": _VERIFIED,
            **mean_and_stderr(np.square(found.tangential) / beta),
        }
    return document


def _collapse(law: GapLaw, n: int, beta: float, found: WeightSample) -> dict[str, Any]:
    """The supercritical formulas: what leaks from the nearest key, and how far that key is."""
    document = {
        "nearest_distance": {
            "predicted": nearest_distance(n, law),
            "status": _VERIFIED,
            **mean_and_stderr(np.sqrt(2 * found.nearest / beta)),
        }
    }
    if law.a > 0.5:
        document["one_minus_top_weight"] = {
            "predicted": collapse_deficit(n, beta, law),
            "status": _VERIFIED,
            **mean_and_stderr(1 - found.top),
        }
    return document


def _laws(law: GapLaw, n: int, beta: float, found: WeightSample, limit: WeightSample) -> dict[str, Any]:
    """Kolmogorov-Smirnov tests of the measured laws against the limit, and of the output against a Gaussian."""
    compared = ["top", "participation", "gap"] + (["tangential"] if law.tangent_dim is not None else [])
    names = {"top": "top_weight", "gap": "output_gap", "tangential": "output_tangential"}
    document = {}
    for name in compared:
        test = stats.ks_2samp(getattr(found, name), getattr(limit, name))
        document[names.get(name, name)] = {"against": "limit", "ks": float(test.statistic), "p": float(test.pvalue)}
    shape = averaging(n, beta, law)
    centred = (shape.shrinkage - shape.bias - found.gap / beta) / np.sqrt(shape.radial_variance)
    test = stats.kstest(centred, "norm")
    document["output_gaussian"] = {"against": "averaging", "ks": float(test.statistic), "p": float(test.pvalue)}
    return document


def _unbias(found: WeightSample) -> float:
    """R/(R − 1), for variances about a mean estimated from the same R replicates."""
    return found.top.size / (found.top.size - 1)
