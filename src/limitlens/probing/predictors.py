"""Accuracy of predicted rates: measured rates of each kind of error against the formulas for it and constant baselines.

Output errors and errors of the outputs' moments have different exponents and are never compared with one another. All
curves of a probe are root mean squares over replicates. On real heads every formula is a heuristic, even one that is
proved for Gaussian tokens: H and Ψ come from the covariance, which need not be a variance proxy of the tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from limitlens.errors import Array
from limitlens.probing.record import CONSTANT_RATE, HeadRecord
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.theory.prediction import Status

OUTPUT = ("rate_rms_output", "rate_sharp_output", "rate_pilot")
MOMENT = ("rate_sharp", "rate_rms", "rate_drawn", "rate_drawn_coupling", "rate_proved")
PREDICTORS = {"output": OUTPUT, "mean": MOMENT, "covariance": MOMENT}  # formulas for the rate of each kind of error
DRAWN = ("rate_drawn", "rate_drawn_coupling")
ORDERED = ("horizon", "score_std", "mean_tilt")  # these predict an order of the heads, not a rate


def curve_of_kind(head: HeadRecord, kind: str) -> ErrorCurve | None:
    """A head's curve of a kind of error without a sink, to which theory applies."""
    return head.curve_without_sink if kind == "output" else head.moment_curves.get(kind)


def rate_skill(heads: Sequence[HeadRecord], kind: str = "output") -> dict[str, Any]:
    """Predicted rates of a kind of error against measured ones; without predictors where nothing was measured.

    For each predictor its status on real heads, the mean absolute error, the rank correlation with the measured rates
    (none for a constant), and the share of heads that converge at least as fast as it says, which for a bound should be
    all. The baselines are the constant 1/2 and the best single constant, the median of the measured rates.
    """
    curves = [(head, curve) for head in heads if (curve := curve_of_kind(head, kind)) is not None and curve.measured]
    known = [(head, curve.rate.slope) for head, curve in curves if curve.rate is not None]
    measured = np.array([slope for _, slope in known])
    result: dict[str, Any] = {"heads": len(known), "predictors": {}}
    if not known:
        return result
    predicted = {name: np.array([head.predicted_rates[name] for head, _ in known], float) for name in PREDICTORS[kind]}
    predicted["rate_constant"] = np.full(len(known), CONSTANT_RATE)
    predicted["rate_best_constant"] = np.full(len(known), np.median(measured))
    for name, values in predicted.items():
        if np.isnan(values).any():
            continue
        result["predictors"][name] = {
            "status": (Status.DRAWN if name in DRAWN else Status.HEURISTIC).value if name in PREDICTORS[kind] else None,
            "mean_absolute_miss": float(np.abs(values - measured).mean()),
            "rank_correlation": _rank_correlation(values, measured),
            "at_least_as_fast": float((measured >= values).mean()),
        }
    for name in ORDERED:
        values = np.array([getattr(head, name) for head, _ in known], dtype=float)
        result[f"rank_correlation_{name}"] = _rank_correlation(values, measured)
    return result


def rate_skills(heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """Accuracy of the predictors of the output's rate, and under "moments" of the mean's and the covariance's."""
    return rate_skill(heads) | {"moments": {kind: rate_skill(heads, kind) for kind in ("mean", "covariance")}}


def _rank_correlation(a: Array, b: Array) -> float | None:
    ranked = len(a) >= 3 and np.ptp(a) > 0 and np.ptp(b) > 0
    return float(stats.spearmanr(a, b).statistic) if ranked else None
