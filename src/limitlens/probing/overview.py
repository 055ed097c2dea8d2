"""From heads to layers and the model: medians and counts of regimes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from limitlens.probing.record import OTHERS, HeadRecord
from limitlens.record import to_json
from limitlens.statistics.error_curve import ErrorCurve
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


def layer_documents(heads: Iterable[HeadRecord], judged: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """Each layer: what its heads have in common, and the verdict on its tokens."""

    def verdict(layer: LayerRecord) -> dict[str, Any]:
        told = {"meaning": layer.verdict.meaning, "remedy": layer.verdict.remedy}
        sure = layer.verdict is Verdict.SUB_GAUSSIAN  # nothing exceeds a Gaussian where it would have been seen
        return (
            {name: value for name, value in to_json(layer).items() if name != "layer"} | {"sub_gaussian": sure} | told
        )

    tails = {layer.layer: verdict(layer) for layer in judged}
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
        "rate": _rates(head.curve for head in heads),
        **{f"rate_{name}": _rates(head.others.get(name) for head in heads) for name in OTHERS},
        "error_at_largest_n": _spread(head.curve.error[-1] for head in heads),
        "critical_factor": _spread(head.critical.factor for head in heads if head.critical is not None),
        "median": {name: (_spread(getattr(head, name) for head in heads) or {}).get("median") for name in MEDIANS},
    }


def _rates(curves: Iterable[ErrorCurve | None]) -> dict[str, float] | None:
    """The slopes of those curves that have one."""
    return _spread(curve.rate.slope for curve in curves if curve is not None and curve.rate is not None)


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """The least, the middle and the largest of those that are known."""
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    return {"smallest": min(known), "median": float(np.median(known)), "largest": max(known)} if known else None
