"""One head of a model, measured by a probe or predicted from a pilot, to and from JSON.

Where every context contains a sink, the sink is one key that is always kept. The error of keeping n of the other tokens
of a context of C tokens is then

    e(n; C) = e_rest(n) · e(C)/e_rest(C),

with e the error curve with the sink and e_rest the one without it: exact at n = C, and e_rest where C dilutes the sink.
The factor is a heuristic; beyond the sizes measured it tends to 1 as the sink's share falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from limitlens.errors import Array, check_relative
from limitlens.record import from_json, to_json
from limitlens.statistics.critical_factor import CriticalFactor
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.regimes import Regime
from limitlens.statistics.tokens_for import TokensFor
from limitlens.theory import rates

ERRORS = (0.1, 0.05, 0.01)  # relative errors for which n(ε) is given
# functions of `theory.rates`: of the horizon, and of the coupling
FORMULAS = ("rate_sharp", "rate_rms", "rate_sharp_output", "rate_rms_output", "rate_drawn")
COUPLED = ("rate_drawn_coupling", "rate_proved")
UNSETTLED = 0.5  # error of the pool over that at the largest n, from which on the pool has not converged
CONSTANT_RATE = 0.5  # the baseline of every predicted rate
CURVE_FIELDS = ("curve", "without_sink", "moment_curves")  # fields that a document writes in another form
CURVES = ("mean", "covariance", "hardmax")  # names of `HeadRecord.moment_curves`
MOMENTS = {"mean": "relative_mean_error", "covariance": "relative_covariance_error"}  # and their names in a document


@dataclass(frozen=True, eq=False)
class Sink:
    """A token, or a learned score, that every context contains once."""

    kind: str  # "first token", "learned sink", or both
    share: Array  # (sizes,): of the attention mass among n other tokens
    share_in_window: float  # the same in a window of the probe
    dilution_length: float | None  # tokens that halve its share; None where no number of them does

    @property
    def keys(self) -> int:
        """Number of keys that a cache keeps for it: a learned sink has none."""
        return 1 if "first token" in self.kind else 0


@dataclass(frozen=True, eq=False, repr=False)
class HeadRecord:
    """One query head: its error curves and, where it was measured, its diagnostics; arrays have one number per size n.

    A predicted head has curves without replicates, and None in place of every diagnostic but its sink.
    """

    layer: int
    head: int
    kv_head: int
    sliding_window: int | None  # tokens the layer sees at once, where that is bounded
    curve: ErrorCurve  # relative output error among n tokens, with the sink where every context has one
    without_sink: ErrorCurve | None  # the same without the sink; None where there is none
    sink: Sink | None
    horizon: float | None = None  # geometry of its scores (`probing.geometry`)
    horizon_one_sided: float | None = None  # None without a score matrix, as the coupling, and the note says why
    coupling: float | None = None
    geometry_note: str | None = None
    mean_tilt: float | None = None
    score_std: float | None = None
    effective_tokens: Array | None = None  # 1/Σw²
    effective_tokens_growth: float | None = None  # exponent with which they grow over the last sizes
    top_weight: float | None = None  # at the largest size, as is the entropy
    entropy: float | None = None
    sink_mass: float | None = None  # share of the mass in a window on the sink, or on an encoder's special tokens
    pareto_k: float | None = None
    regime: Regime | None = None
    regime_reason: str | None = None
    regime_agreement: float | None = None  # share of the resamples of queries and replicates with the same regime
    critical: CriticalFactor | None = None
    # errors of the "mean" and the "covariance" of the outputs over the queries, and of argmax in place of softmax
    # ("hardmax"); all without the sink
    moment_curves: Mapping[str, ErrorCurve] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """Layer and head."""
        return self.layer, self.head

    @property
    def name(self) -> str:
        """The head in words."""
        return f"layer {self.layer}, head {self.head}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes n of its curves."""
        return self.curve.sizes

    @property
    def curve_without_sink(self) -> ErrorCurve:
        """The error curve of the law of the tokens without a sink, to which theory applies."""
        return self.without_sink or self.curve

    @property
    def attention(self) -> str:
        """Which keys the layer attends to."""
        return "full" if self.sliding_window is None else "sliding window"

    @property
    def error_is_lower_bound(self) -> bool:
        """Whether the pool has not converged: one key holds it, or its error is over half of the smallest measured."""
        return self.regime is Regime.FROZEN or self.curve_without_sink.pool_share > UNSETTLED

    @property
    def pilot_error(self) -> Array | None:
        """Errors at its sizes that the run's own tokens predict (`theory.exact_bootstrap`); None if they cannot."""
        prediction = self.curve.prediction
        return None if prediction is None or not prediction.defined else prediction.error(self.sizes)[0]

    @cached_property
    def predicted_rates(self) -> dict[str, float | None]:
        """Rates by name: those of the formulas, of the exact law of the run's own tokens, and the constant baseline."""
        horizon, psi = self.horizon, self.coupling  # of the covariance, which need not be a variance proxy
        prediction, exact = self.curve_without_sink.prediction, None
        if prediction is not None and prediction.defined and len(self.sizes) > 1:
            exact = prediction.rate(self.sizes).slope
        found = {name: None if horizon is None else getattr(rates, name)(horizon) for name in FORMULAS}
        found["rate_pilot"] = exact
        found |= {name: None if psi is None else getattr(rates, name)(psi) for name in COUPLED}
        return found | {"rate_constant": CONSTANT_RATE}

    def context(self, tokens: float) -> float:
        """Number of keys in a context: all tokens, or the layer's sliding window where that is shorter."""
        return min(tokens, self.sliding_window or math.inf)

    def keys_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Number of random keys that keep the head within an error in a context, its sink among them."""
        check_relative(error)
        atoms = self.sink.keys if self.sink else 0
        rest = max(self.context(context) - atoms, 1)
        factor = self.sink_factor(rest)  # dividing the error by it is cheaper than scaling all resamples of the curve
        return self.curve_without_sink.tokens_for(error / factor if 0 < factor < math.inf else error, rest).plus(atoms)

    def sink_factor(self, context: float) -> float:
        """e(C)/e_rest(C) of a context of C tokens besides the sink; 1 where there is none."""
        if self.without_sink is None or self.sink is None:
            return 1.0
        n = np.asarray(self.sizes, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.curve.error / self.without_sink.error
        if context <= n[-1]:
            return float(np.interp(math.log(context), np.log(n), ratio))
        length = self.sink.dilution_length
        dilution = 1 / length if length else 0.0
        left = 1.0 if not dilution else (1 + dilution * n[-1]) / (1 + dilution * context)
        left = left if math.isfinite(left) else 0.0  # in an infinite context the sink has no share
        return 1 - (1 - float(ratio[-1])) * left

    def document(self) -> dict[str, Any]:
        """The head as the JSON of the contract."""
        measured = self.curve.measured
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in CURVE_FIELDS}
        found |= {"attention": self.attention, "n": self.sizes, **_curve_document(self.curve)}
        found["without_sink"] = self.without_sink and _curve_document(self.without_sink)
        found["remedy"] = self.regime and self.regime.remedy
        found["error_is_lower_bound"] = self.error_is_lower_bound if measured else None
        found["pool_error_share"] = self.curve_without_sink.pool_share if measured else None
        if self.curve.prediction is not None:
            found["pilot_error"] = self.pilot_error
        for name, curve in self.moment_curves.items():
            error = MOMENTS.get(name, f"{name}_error")
            found |= {error: curve.error, f"{error}_stderr": curve.stderr}
            found[f"rate_{name}"] = curve.rate and curve.rate.document()
        return to_json(found | self.predicted_rates)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, entry: Mapping[str, Any], **curves: Any) -> HeadRecord:
        """The head with this `document`, given its `curve`, `without_sink` and `moment_curves`."""
        whole = {**entry, **curves}
        return from_json(cls, {part.name: whole[part.name] for part in fields(cls)})  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        rate = "no rate" if self.curve.rate is None else f"rate {self.curve.rate.slope:.2f}"
        last = f"error {self.curve.error[-1]:.3g} at n = {self.sizes[-1]:,}"
        kind = self.regime.value if self.regime else "predicted"
        return f"<HeadRecord of {self.name}: {kind}, {rate}, {last}>"


def _curve_document(curve: ErrorCurve) -> dict[str, Any]:
    """An error curve in a head's document."""
    needed = {str(error): curve.tokens_for(error).document() for error in ERRORS}
    found = {"relative_output_error": curve.error, "relative_output_error_stderr": curve.stderr}
    if not curve.measured:
        found |= {"relative_output_error_low": curve.interval[0], "relative_output_error_high": curve.interval[1]}
    return {**found, "rate": curve.rate and curve.rate.document(), "tokens_for": needed}


def kept_share(heads: Sequence[HeadRecord], error: float, context: int) -> float:
    """Share of the KV entries of a context that random eviction keeps for an error (`share_of_keys`)."""
    return share_of_keys(heads, [head.keys_for(error, context).n for head in heads], context)


def share_of_keys(heads: Sequence[HeadRecord], keys: Sequence[int | None], context: int) -> float:
    """Share of the KV entries of a context that are kept; None in `keys` keeps all of them.

    A key/value head keeps as many as the most demanding of its query heads.
    """
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for head, needed in zip(heads, keys, strict=True):
        available = head.context(context)
        kept = available if needed is None else needed
        groups.setdefault((head.layer, head.kv_head), []).append((kept, available))
    total = sum(max(kept for kept, _ in group) for group in groups.values())
    return total / sum(group[0][1] for group in groups.values())
