"""Everything predicted for one law, one head and one n, as one document; each number with its standing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array
from limitlens.measures.base import Measure
from limitlens.measures.gaussian import Gaussian
from limitlens.theory import bounds, constants, curve, finite, hardmax, influence, rates, validity
from limitlens.theory.reach import Reach, reach, square_root, whitened

TILTS = (0.5, 1.0, 2.0, 3.0)
"""Queries shown one by one: this many standard deviations along the direction of the horizon."""


def theory_document(
    measure: Measure,
    A: ArrayLike,
    n: float,
    *,
    sizes: ArrayLike | None = None,
    radius: float | None = None,
    error: float = 0.1,
    mask_self: bool = False,
) -> dict[str, Any]:
    """Every prediction for attention over n tokens of a law, without sampling.

    Parameters
    ----------
    measure : Measure
    A : array of shape (d, d)
        The score matrix; values are the tokens themselves.
    n : float
        Number of tokens.
    sizes : array of shape (sizes,), optional
        Numbers of tokens for the predicted curve; n alone when absent.
    radius : float, optional
        Radius of the ball of the uniform bound; the root mean square norm of the tokens when absent.
    error : float
        Relative error whose probability is bounded at each query shown.
    mask_self : bool
        Whether a query's own token is left out of its softmax.
    """
    if not 2 <= n < float("inf"):
        raise InputError(f"n is {n}; expected a number of tokens of at least 2")
    score = as_array("A", A, ndim=2)
    covariance = measure.covariance
    of = reach(covariance, score)
    gaussian = isinstance(measure, Gaussian)
    ball = float(np.sqrt(np.trace(covariance) + measure.mean @ measure.mean)) if radius is None else radius
    counts = np.atleast_1d(as_array("sizes", n if sizes is None else sizes, ndim=(0, 1)))
    listed = rates.predictions(of, gaussian=gaussian, compact=bool(np.isfinite(measure.radius)))
    warnings = validity.warnings(of, n, mask_self=mask_self)
    if not gaussian:
        warnings.append("sharp rates hold for Gaussian tokens; for this law they are those of its covariance alone")
    document: dict[str, Any] = {
        "inputs": {"measure": repr(measure), "dim": measure.dim, "n": n, "radius": ball, "mask_self": mask_self},
        "theory": {
            "horizon": of.horizon,
            "horizon_one_sided": of.horizon_one_sided,
            "coupling": of.coupling,
            "frobenius": of.frobenius,
            "trace": of.trace,
            **{prediction.name: prediction.value for prediction in listed},
        },
        "rates": {prediction.name: prediction.as_dict() for prediction in listed},
        "uniform": _uniform(of, covariance, score, ball, n, gaussian),
        "queries": [_query(measure, score, spread, n, error) for spread in TILTS],
    }
    if isinstance(measure, Gaussian):
        document["local_rates"] = _local_rates(of, n)
        document["constants"] = _constants(of, covariance, score)
        document["curve"] = _curve(measure, score, counts, mask_self)
        if measure.dim == 1:
            scale = float(np.sqrt(covariance[0, 0]))
            document["hardmax"] = {
                "finite": {"predicted": hardmax.hardmax_finite(n, scale), "status": "verified"},
                "asymptotic": {"predicted": hardmax.hardmax_asymptotic(n, scale), "status": "proved"},
            }
    document["warnings"] = warnings
    return document


def _local_rates(of: Reach, n: float) -> dict[str, Any]:
    """Slopes of the sharp law at n, its logarithms included."""
    status = "heuristic" if validity.is_pre_asymptotic(of, n) else "verified"
    laws = {moment: rates.sharp_law(of.horizon, moment) for moment in ("mean", "covariance")}
    return {
        moment: {
            "predicted": law.local_rate(n),
            "exponent": law.exponent,
            "log_power": law.log_power,
            "status": status,
            "formula": "n^(−exponent) (ln n)^log_power",
        }
        for moment, law in laws.items()
    }


def _constants(of: Reach, covariance: Array, A: Array) -> dict[str, Any] | None:
    """n · Cov of the moments while H < 1; None from 1 on, where there is no such constant."""
    if of.horizon >= 1:
        return None
    matrix = constants.mean_error_covariance(covariance, A)
    found: dict[str, Any] = {
        "mean": {"predicted": float(np.trace(matrix)), "status": "verified", "formula": "tr of n·Cov(mean output)"}
    }
    if of.dim == 1:
        value = constants.covariance_error_variance_1d(of.horizon) * float(covariance[0, 0]) ** 2
        found["covariance"] = {"predicted": value, "status": "verified", "formula": "n·Var(variance of the outputs)"}
    return found


def _uniform(of: Reach, covariance: Array, A: Array, radius: float, n: float, gaussian: bool) -> dict[str, Any]:
    found = [bounds.uniform_exponential(radius, of.horizon_one_sided)]
    if gaussian:
        found.append(bounds.uniform_gaussian(covariance, A, radius))
    return {
        bound.prediction.name: {**bound.prediction.as_dict(), "at_n": bound.at(n), "useful_from": bound.useful_from}
        for bound in found
    }


def _query(measure: Measure, A: Array, spread: float, n: float, error: float) -> dict[str, Any]:
    """Central limit theorem, its validity and the finite-n bounds at one query."""
    root = square_root(measure.covariance)
    direction = np.linalg.svd(whitened(measure.covariance, A))[2][0]
    tilt = A @ (measure.mean + spread * root @ direction)
    cost = finite.tilt_cost(measure, tilt)
    # For Gaussian tokens the cost is τ²; for other laws this is the Gaussian tilt that costs as much.
    flag = validity.interval_validity(n, tilt=float(np.sqrt(max(cost.log_cost, 0.0))))
    wanted = error * cost.limit
    found: dict[str, Any] = {
        "deviations": spread,
        "tilt": float(np.linalg.norm(root @ tilt)),
        "limit": cost.limit,
        "effective_sample_size": {
            "predicted": float(n * np.exp(-cost.log_cost)),
            "status": "proved",
        },
        "rms_error": {
            "predicted": float(np.sqrt(finite.mean_square_asymptotic(cost, n))),
            "status": "proved",
            "note": "as n → ∞, by the central limit theorem",
        },
        "rms_error_bound": {
            "predicted": float(np.sqrt(finite.mean_square_bound(cost, n))),
            "status": "proved",
            "note": "at every n, bounded laws only",
            "useful_from": finite.mean_square_useful_from(cost),
        },
        "quadratic_error_95": {"predicted": finite.quadratic_error_quantile(cost, n), "status": "proved"},
        "deviation": {
            "error": wanted,
            "probability_at_most": finite.deviation_bound(cost, n, wanted) if wanted > 0 else 1.0,
            "useful_from": finite.deviation_useful_from(cost, wanted) if wanted > 0 else float("inf"),
            "status": "proved",
        },
        "interval": {"validity": flag.value, "meaning": flag.meaning, "remedy": flag.remedy},
    }
    if isinstance(measure, Gaussian):
        square = curve.query_error(measure.covariance, A, spread * direction[None], n, mean=measure.mean)[0, 0]
        found["rms_error_exact"] = {
            "predicted": float(np.sqrt(square)),
            "status": "verified",
            "note": "at this n, exactly, Gaussian tokens",
        }
    return found


def _curve(measure: Gaussian, A: Array, sizes: Array, mask_self: bool) -> dict[str, Any]:
    """Predicted error curves over the sizes."""
    covariance = measure.covariance
    B = whitened(covariance, A)
    limit = covariance @ A
    scale = float(
        np.sqrt(np.sum((limit @ square_root(covariance)) ** 2) + np.sum(((limit + np.eye(len(B))) @ measure.mean) ** 2))
    )
    output = curve.output_error(covariance, A, sizes, mean=measure.mean, mask_self=mask_self)
    found: dict[str, Any] = {
        "n": sizes,
        "output": {"predicted": output, "status": "verified", "note": "root mean square over queries and samples"},
        "relative_output": {"predicted": output / scale if scale > 0 else None, "status": "verified"},
    }
    centred = not measure.mean.any()
    mean = curve.mean_error(covariance, A, sizes) if centred else None
    if mean is not None:
        # In d = 1 the finite-n law, held against simulations to H = 1; beyond d = 1 its limit, slow near 1.
        status = "verified" if np.linalg.norm(B, 2) <= (1.0 if len(B) == 1 else 0.7) else "heuristic"
        found["mean"] = {"predicted": mean, "status": status, "note": "E|error of the mean output|"}
    if len(B) == 1 and mean is not None:
        found["covariance"] = {
            "predicted": float(covariance[0, 0]) * influence.variance_error_1d(float(B[0, 0]), sizes),
            "status": "heuristic",
            "note": "E|error of the variance of the outputs|",
        }
    if len(B) == 1 and centred:
        found["averaged"] = {
            "predicted": float(np.sqrt(covariance[0, 0])) * curve.averaged_error_1d(float(B[0, 0]), sizes),
            "status": "verified" if abs(B[0, 0]) <= curve.VERIFIED_HORIZON else "heuristic",
            "note": "E|Γ_n − Γ| averaged over queries, by the three-piece law",
        }
    return found
