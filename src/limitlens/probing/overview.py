"""Summaries of the heads of a layer or a model: medians and counts of regimes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from limitlens.probing.record import CURVES, HeadRecord
from limitlens.record import to_json
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.tails import Verdict

MEDIANS = ("horizon", "mean_tilt", "score_std", "top_weight", "entropy", "sink_mass", "pareto_k", "local_dimension")


@dataclass(frozen=True)
class LayerRecord:
    """Tail test of the tokens of a layer; there is none where too few tokens were seen."""

    layer: int
    tokens: str  # what was tested: "hidden states", or "keys"
    verdict: Verdict  # and the numbers below as in `statistics.tails.TailReport`
    variance_proxy: float
    pareto_norm: float
    pareto_norm_stderr: float


def layer_documents(heads: Iterable[HeadRecord], layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The JSON of each layer: a summary of its heads, and the tail test of its tokens."""

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
    """Medians over heads and the number of heads in each regime."""
    return {
        "heads": len(heads),
        "regimes": dict(Counter(head.regime.value for head in heads if head.regime)),
        "rate": _rates(head.curve for head in heads),
        **{f"rate_{name}": _rates(head.moment_curves.get(name) for head in heads) for name in CURVES},
        "error_at_largest_n": _spread(head.curve.error[-1] for head in heads),
        "critical_factor": _spread(head.critical.factor for head in heads if head.critical is not None),
        "median": {name: (_spread(getattr(head, name) for head in heads) or {}).get("median") for name in MEDIANS},
    }


def _rates(curves: Iterable[ErrorCurve | None]) -> dict[str, float] | None:
    """Spread of the rates of the curves that have one."""
    return _spread(curve.rate.slope for curve in curves if curve is not None and curve.rate is not None)


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """The smallest, the median and the largest of the known values; None where there is none."""
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    return {"smallest": min(known), "median": float(np.median(known)), "largest": max(known)} if known else None
