"""Summaries of the heads of a layer or a model: medians, regimes, slowest heads, and the accuracy of predicted rates.

On real heads every formula for a rate is a heuristic, even one that is proved for Gaussian tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from scipy import stats

from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.probing.record import CONSTANT_RATE, CURVES, HeadRecord
from limitlens.record import to_json
from limitlens.statistics.regimes import Regime
from limitlens.statistics.tails import Verdict
from limitlens.theory.prediction import Status

MEDIANS = ("horizon", "mean_tilt", "score_std", "top_weight", "entropy", "sink_mass", "pareto_k")
OUTPUT = ("rate_rms_output", "rate_sharp_output", "rate_pilot")
MOMENT = ("rate_sharp", "rate_rms", "rate_drawn", "rate_drawn_coupling", "rate_proved")
PREDICTORS = {"output": OUTPUT, "mean": MOMENT, "covariance": MOMENT}  # formulas for the rate of each kind of error
DRAWN = ("rate_drawn", "rate_drawn_coupling")  # formulas whose status is `Status.DRAWN`
ORDERED = ("horizon", "score_std", "mean_tilt")  # quantities that predict the order of the heads by rate, not the rate


@dataclass(frozen=True)
class LayerRecord:
    """Result of the tail test of the tokens of one layer; layers with too few tokens have no record."""

    layer: int
    tokens: str  # the tokens tested: "hidden states" or "keys"
    verdict: Verdict  # verdict, variance proxy and Pareto shape as in `statistics.tails.TailReport`
    variance_proxy: float
    pareto_norm: Estimate


def slowest(heads: Iterable[HeadRecord]) -> list[HeadRecord]:
    """Heads sorted by error at the largest n, the largest error first and heads without a defined error last."""
    return sorted(heads, key=lambda head: -head.curve.error[-1] if head.curve.defined else np.inf)


def count_regimes(heads: Iterable[Any]) -> dict[Regime, int]:
    """Number of heads in each regime (averaging, selective, frozen) that occurs, in the order of `Regime`."""
    found = Counter(head.regime for head in heads)
    return {regime: found[regime] for regime in Regime if regime in found}


def layer_documents(heads: Iterable[HeadRecord], layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """JSON entry of each layer: summary of the layer's heads, and tail test of the layer's tokens if there is one."""

    def verdict(layer: LayerRecord) -> dict[str, Any]:
        found = {name: value for name, value in to_json(layer).items() if name != "layer"}
        found["sub_gaussian"] = layer.verdict is Verdict.SUB_GAUSSIAN
        return found | {"meaning": layer.verdict.meaning, "remedy": layer.verdict.remedy}

    tails = {layer.layer: verdict(layer) for layer in layers}
    return [
        {"layer": layer, "tails": tails.get(layer), **summary(own := list(group))}
        | {name: getattr(own[0], name) for name in ("attention", "sliding_window")}
        for layer, group in groupby(heads, lambda head: head.layer)
    ]


def summary(heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """Summary of heads as JSON: number in each regime, spread of rates and errors, medians of other quantities."""
    return {
        "heads": len(heads),
        "regimes": dict(Counter(head.regime.value for head in heads if head.regime)),
        "rate": _spread(head.slopes["curve"] for head in heads),
        **{f"rate_{name}": _spread(head.slopes.get(name) for head in heads) for name in CURVES},
        "hardmax": _hardmax_laws(heads),
        "error_at_largest_n": _spread(head.curve.error[-1] for head in heads),
        "critical_factor": _spread(head.critical.factor for head in heads if head.critical is not None),
        "median": {name: (_spread(getattr(head, name) for head in heads) or {}).get("median") for name in MEDIANS},
    }


def _hardmax_laws(heads: Sequence[HeadRecord]) -> dict[str, Any] | None:
    """Laws of the argmax error (power of n, of ln n, or undecided) by number of heads, and n that would decide them."""
    curves = (head.moment_curves.get("hardmax") for head in heads)
    rates = [curve.rate for curve in curves if curve is not None and curve.rate is not None]
    if not rates:
        return None
    decides = {f"decides_if_{law}": _spread(rate.decides_at(law) for rate in rates) for law in ("power", "log")}
    return {"laws": dict(Counter(rate.law for rate in rates)), **decides}


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Smallest, median and largest of the values that are finite numbers; None if there are none."""
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    return {"smallest": min(known), "median": float(np.median(known)), "largest": max(known)} if known else None


def rate_skill(heads: Sequence[HeadRecord], kind: str = "output") -> dict[str, Any]:
    """Accuracy of each predicted rate (exponent of the error in n), over the heads whose rate was measured.

    Gives the mean absolute error, the rank correlation with measured rates, and the share of heads that converge at
    least as fast as predicted (1 for a true bound). Baselines are 1/2 and the median of the measured rates.
    """
    # Theory is about samples without the sink.
    curves = [head.curve_without_sink if kind == "output" else head.moment_curves.get(kind) for head in heads]
    rates = [curve.rate if curve is not None and curve.measured else None for curve in curves]
    known = [(head, rate.slope) for head, rate in zip(heads, rates, strict=True) if rate is not None]
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
    """Accuracy (`rate_skill`) of predicted rates of the output error, and under "moments" of mean and covariance."""
    return rate_skill(heads) | {"moments": {kind: rate_skill(heads, kind) for kind in ("mean", "covariance")}}


def _rank_correlation(a: Array, b: Array) -> float | None:
    ranked = len(a) >= 3 and np.ptp(a) > 0 and np.ptp(b) > 0
    return float(stats.spearmanr(a, b).statistic) if ranked else None
