"""From heads to layers and the model: medians and counts of regimes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from limitlens.heads.record import HeadRecord
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
        """Whether nothing was seen that exceeds a Gaussian, where it would have been seen."""
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
        "rate_mean": _rates(heads, "mean"),
        "rate_covariance": _rates(heads, "covariance"),
        "rate_hardmax": _rates(heads, "hardmax"),
        "error_at_largest_n": _spread(head.curve.error[-1] for head in heads),
        "critical_factor": _spread(head.critical.factor for head in heads if head.critical is not None),
        "median": {name: (_spread(getattr(head, name) for head in heads) or {}).get("median") for name in MEDIANS},
    }


def _rates(heads: Sequence[HeadRecord], kind: str) -> dict[str, float] | None:
    """The slopes of another curve than the output's."""
    found = [head.others[kind].rate for head in heads if kind in head.others]
    return _spread(rate.slope for rate in found if rate is not None)


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """The least, the middle and the largest of those that are known."""
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    return {"smallest": min(known), "median": float(np.median(known)), "largest": max(known)} if known else None
