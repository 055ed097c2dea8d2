"""From heads to layers and the model: medians, counts of regimes, and how good the predicted rates are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from scipy import stats

from limitlens.errors import Array
from limitlens.heads.record import FORMULAS, HeadRecord
from limitlens.record import plain
from limitlens.statistics.tails import Verdict

MEDIANS = ("horizon", "mean_tilt", "score_std", "top_weight", "entropy", "sink_mass", "pareto_k", "local_dimension")


@dataclass(frozen=True)
class LayerRecord:
    """Whether the tokens of a layer are sub-Gaussian; there is none where too few of them were seen."""

    layer: int
    tokens: str  # what was judged: "hidden states", or "keys"
    verdict: Verdict  # as in `limitlens.statistics.tails.TailReport`
    variance_proxy: float
    pareto_norm: float
    pareto_norm_stderr: float

    @property
    def sub_gaussian(self) -> bool:
        """Whether the theorems hold for these tokens as they stand."""
        return self.verdict is Verdict.SUB_GAUSSIAN

    def document(self) -> dict[str, Any]:
        """The verdict in the document of its layer."""
        told = {"sub_gaussian": self.sub_gaussian, "meaning": self.verdict.meaning, "remedy": self.verdict.remedy}
        return {name: value for name, value in plain(self).items() if name != "layer"} | told


def layer_documents(heads: Iterable[HeadRecord], judged: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """Each layer: what its heads have in common, and the verdict on its tokens."""
    tails = {layer.layer: layer.document() for layer in judged}
    return [
        {"layer": layer, "tails": tails.get(layer), **summary(own := list(group))}
        | {name: getattr(own[0], name) for name in ("attention", "sliding_window")}
        for layer, group in groupby(heads, lambda head: head.layer)
    ]


def summary(heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """Medians over heads and how many heads there are of each regime."""
    return {
        "heads": len(heads),
        "regimes": dict(Counter(head.regime.value for head in heads)),
        "rate": _spread(head.curve.rate.slope for head in heads if head.curve.rate is not None),
        "error_at_largest_n": _spread(head.curve.error[-1] for head in heads),
        "median": {name: (_spread(getattr(head, name) for head in heads) or {}).get("median") for name in MEDIANS},
    }


def rate_skill(heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """Predicted rates against measured ones, the constant 1/2 beside them.

    The measured rate is that of the pooled law, without a sink, which is what theory speaks of. For each predictor: the
    mean absolute miss, and the rank correlation with the measured rates (none for a constant). The horizon, the score
    spread and the mean tilt are ranked too: they predict no number, only an order.
    """
    known = [(head, head.law.rate.slope) for head in heads if head.law.rate is not None]
    measured = np.array([slope for _, slope in known])
    result: dict[str, Any] = {"heads": len(known), "predictors": {}}
    for name in (*FORMULAS, "rate_pilot", "rate_constant"):
        predicted = np.array([head.predicted_rates[name] for head, _ in known], dtype=float)
        if np.isnan(predicted).any():
            continue
        result["predictors"][name] = {
            "mean_absolute_miss": float(np.abs(predicted - measured).mean()) if known else None,
            "rank_correlation": _rank_correlation(predicted, measured),
        }
    for name in ("horizon", "score_std", "mean_tilt"):
        values = np.array([getattr(head, name) for head, _ in known], dtype=float)
        result[f"rank_correlation_{name}"] = _rank_correlation(values, measured)
    return result


def _rank_correlation(a: Array, b: Array) -> float | None:
    ranked = len(a) >= 3 and np.ptp(a) > 0 and np.ptp(b) > 0
    return float(stats.spearmanr(a, b).statistic) if ranked else None


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """The least, the middle and the largest of those that are known."""
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    return {"smallest": min(known), "median": float(np.median(known)), "largest": max(known)} if known else None
