"""From heads to layers and the model: medians, counts of regimes, and how good the predicted rates are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from scipy import stats

from limitlens.errors import Array
from limitlens.heads.geometry import LayerGeometry

PREDICTORS = ("rate_sharp", "rate_sharp_output", "rate_rms_output", "rate_drawn", "rate_constant")
_MEDIANS = ("horizon", "mean_tilt", "score_std", "top_weight", "entropy", "sink_mass", "pareto_k", "local_dimension")


def layer_record(layer: int, heads: list[dict[str, Any]], geometry: LayerGeometry) -> dict[str, Any]:
    """A layer: what its heads have in common, and the verdict on its tokens."""
    tails = geometry.tails
    return {
        "layer": layer,
        **summary(heads),
        "attention": heads[0]["attention"],
        "sliding_window": heads[0]["sliding_window"],
        "tails": None
        if tails is None
        else {
            "tokens": geometry.tokens,
            "verdict": tails.verdict.value,
            "sub_gaussian": tails.verdict.value == "sub-Gaussian",
            "variance_proxy": tails.variance_proxy,
            "pareto_norm": tails.pareto_norm,
            "pareto_norm_stderr": tails.pareto_norm_stderr,
            "meaning": tails.verdict.meaning,
            "remedy": tails.verdict.remedy,
        },
    }


def summary(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over heads and how many heads there are of each regime."""
    slopes = _numbers([head["rate"] and head["rate"]["slope"] for head in heads])
    last = _numbers([head["relative_output_error"][-1] for head in heads])
    return {
        "heads": len(heads),
        "regimes": dict(Counter(head["regime"] for head in heads)),
        "rate": _spread(slopes),
        "error_at_largest_n": _spread(last),
        "median": {name: _median(_numbers([head[name] for head in heads])) for name in _MEDIANS},
    }


def rate_skill(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Predicted rates against measured ones, the constant 1/2 beside them.

    The measured rate is that of the pooled law, without a sink, which is what theory speaks of. For each predictor: the
    mean absolute miss, and the rank correlation with the measured rates (none for a constant). The horizon, the score
    spread and the mean tilt are ranked too: they predict no number, only an order.
    """
    rates = [(head["without_sink"] or head)["rate"] for head in heads]
    known = [i for i, rate in enumerate(rates) if rate is not None]
    measured = np.array([rates[i]["slope"] for i in known])
    result: dict[str, Any] = {"heads": len(known), "predictors": {}}
    for name in PREDICTORS:
        predicted = np.array([heads[i][name] for i in known], dtype=float)
        result["predictors"][name] = {
            "mean_absolute_miss": float(np.abs(predicted - measured).mean()) if known else None,
            "rank_correlation": _rank_correlation(predicted, measured),
        }
    for name in ("horizon", "score_std", "mean_tilt"):
        values = np.array([heads[i][name] for i in known], dtype=float)
        result[f"rank_correlation_{name}"] = _rank_correlation(values, measured)
    return result


def _rank_correlation(a: Array, b: Array) -> float | None:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(stats.spearmanr(a, b).statistic)


def _numbers(values: list[Any]) -> Array:
    return np.array([value for value in values if value is not None and np.isfinite(value)], dtype=float)


def _median(values: Array) -> float | None:
    return float(np.median(values)) if len(values) else None


def _spread(values: Array) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"smallest": float(values.min()), "median": float(np.median(values)), "largest": float(values.max())}
