"""Results for one attention head, measured by `probe` or predicted by `predict`, and their JSON form.

An attention sink is always kept. The error of keeping n of the other tokens of a context of C tokens is estimated as

    e(n; C) = e_rest(n) · e(C)/e_rest(C)   (heuristic),

with e the error curve with the sink and e_rest the curve without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import numpy as np

from limitlens.errors import Array, check_relative
from limitlens.record import from_json, to_json
from limitlens.statistics.contexts import ContextRecord
from limitlens.statistics.critical_factor import CriticalFactor
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.regimes import Regime
from limitlens.statistics.tokens_for import TokensFor
from limitlens.theory import rates

ERRORS = (0.1, 0.05, 0.01)  # relative errors for which n(ε) is given
# names of functions in `theory.rates`: FORMULAS of the horizon, COUPLED of the coupling
FORMULAS = ("rate_sharp", "rate_rms", "rate_sharp_output", "rate_rms_output", "rate_drawn")
COUPLED = ("rate_drawn_coupling", "rate_proved")
UNSETTLED = 0.5  # the reference has not converged if its error exceeds this share of the error at the largest n
CONSTANT_RATE = 0.5  # rate of plain averaging, the baseline for all predicted rates
CURVE_FIELDS = ("curve", "without_sink", "moment_curves")  # fields of `HeadRecord` that JSON holds in another form
# Names of the errors of each of `HeadRecord.curves` in tables and JSON.
ERROR_NAMES = {
    "curve": "relative_output_error", "without_sink": "relative_output_error_without_sink",
    "mean": "relative_mean_error", "covariance": "relative_covariance_error", "hardmax": "hardmax_error",
}  # fmt: skip
CURVES = ("mean", "covariance", "hardmax")  # names of `HeadRecord.moment_curves`


@dataclass(frozen=True, eq=False)
class Sink:
    """Attention sink of a head: the first token, or a learned score, that every context contains exactly once."""

    kind: str  # "first token", "learned sink", or both
    share: Array  # (sizes,): share of the softmax mass on the sink among n other tokens
    share_in_window: float  # share of the softmax mass on the sink in a window of the probe
    dilution_length: float | None  # number of other tokens at which the share is one half; None if there is none

    @property
    def keys(self) -> int:
        """Number of cache entries that the sink takes: 1 for a first token, 0 for a learned score, which has no key."""
        return 1 if "first token" in self.kind else 0


@dataclass(frozen=True, eq=False, repr=False)
class HeadRecord:
    """Results for one query head: its error curves over sample sizes n and, if measured, its diagnostics.

    Arrays have one number per size. A predicted head has no replicates, and no diagnostics but those of its sink.
    """

    layer: int
    head: int
    kv_head: int
    sliding_window: int | None  # length of the layer's sliding window; None if the layer attends to all tokens
    curve: ErrorCurve  # relative output error over n tokens, with the sink if every context has one
    without_sink: ErrorCurve | None  # relative output error over n tokens without the sink; None if there is no sink
    sink: Sink | None
    horizon: float | None = None  # geometry of the head's scores (`probing.diagnostics.LayerGeometry`)
    horizon_one_sided: float | None = None  # None, like the coupling, if the layer has no known score matrix
    coupling: float | None = None
    geometry_note: str | None = None  # why the one-sided horizon is not known, or a caveat
    mean_tilt: float | None = None
    score_std: float | None = None
    effective_tokens: Array | None = None  # 1/Σw²
    effective_tokens_growth: float | None = None  # exponent of n with which effective tokens grow over the last sizes
    top_weight: float | None = None  # mean over queries of the largest softmax weight, at the largest size
    entropy: float | None = None  # mean over queries of the entropy of softmax weights, at the largest size
    sink_mass: float | None = None  # share of softmax mass on the sink in a window, or on an encoder's special tokens
    pareto_k: float | None = None
    regime: Regime | None = None
    regime_reason: str | None = None
    regime_agreement: float | None = None  # share of bootstrap resamples (queries, replicates) that give this regime
    critical: CriticalFactor | None = None
    contexts: ContextRecord | None = None  # errors over consecutive tokens
    # Error curves without the sink: "mean" and "covariance" of outputs over queries, "hardmax" (argmax for softmax).
    moment_curves: Mapping[str, ErrorCurve] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """Index of the layer, and index of the head within the layer."""
        return self.layer, self.head

    @property
    def name(self) -> str:
        """Name of the head for messages and pages, such as "layer 3, head 0"."""
        return f"layer {self.layer}, head {self.head}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sample sizes n of the head's error curves."""
        return self.curve.sizes

    @property
    def curve_without_sink(self) -> ErrorCurve:
        """Error curve without the attention sink, to which theory applies; `curve` itself if the head has no sink."""
        return self.without_sink or self.curve

    @property
    def curves(self) -> dict[str, ErrorCurve]:
        """All error curves of the head by name: "curve", "without_sink" if there is a sink, and `moment_curves`."""
        bare = {} if self.without_sink is None else {"without_sink": self.without_sink}
        return {"curve": self.curve, **bare, **self.moment_curves}

    @property
    def slopes(self) -> dict[str, float | None]:
        """Fitted exponent β of each error curve, which falls like n^−β, by name; None if none could be fitted."""
        return {name: None if curve.rate is None else curve.rate.slope for name, curve in self.curves.items()}

    @property
    def attention(self) -> str:
        """Kind of attention of the head's layer: "full" or "sliding window"."""
        return "full" if self.sliding_window is None else "sliding window"

    @property
    def error_is_lower_bound(self) -> bool:
        """Whether the measured errors are too small, because attention over all tokens read has not itself converged.

        True if the head is frozen onto one key, or if the estimated error of that reference exceeds half of the error
        at the largest n.
        """
        return self.regime is Regime.FROZEN or self.curve_without_sink.pool_share > UNSETTLED

    @property
    def pilot_error(self) -> Array | None:
        """Errors at the head's sizes, predicted from the run's tokens (`theory.exact_bootstrap`); None if not known."""
        prediction = self.curve.prediction
        return None if prediction is None or not prediction.defined else np.exp(prediction.at(self.sizes)[0])

    @cached_property
    def predicted_rates(self) -> dict[str, float | None]:
        """Predicted exponents β of the error, by name: formulas, the run's own tokens ("rate_pilot"), and 1/2."""
        horizon, psi = self.horizon, self.coupling  # from the covariance, which need not be a variance proxy
        prediction, exact = self.curve_without_sink.prediction, None
        if prediction is not None and prediction.defined and len(self.sizes) > 1:
            exact = prediction.rate(self.sizes).slope
        found = {name: None if horizon is None else getattr(rates, name)(horizon) for name in FORMULAS}
        found["rate_pilot"] = exact
        found |= {name: None if psi is None else getattr(rates, name)(psi) for name in COUPLED}
        return found | {"rate_constant": CONSTANT_RATE}

    def context(self, tokens: float) -> float:
        """Number of keys that the head can see in a context of `tokens` tokens: all, or at most its sliding window."""
        return min(tokens, self.sliding_window or math.inf)

    def keys_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Number of random keys, the sink included, with which the head's relative error in a context is `error`."""
        check_relative(error)
        atoms = self.sink.keys if self.sink else 0
        rest = max(self.context(context) - atoms, 1)
        factor = self.sink_factor(rest)  # dividing the error is cheaper than multiplying all resamples of the curve
        return self.curve_without_sink.tokens_for(error / factor if 0 < factor < math.inf else error, rest).plus(atoms)

    def sink_factor(self, context: float) -> float:
        """Ratio of the errors with and without the sink among `context` other tokens (heuristic); 1 without a sink."""
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
        """The head's entry in the JSON document of a run."""
        measured = self.curve.measured
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in CURVE_FIELDS}
        found |= {"attention": self.attention, "n": self.sizes, **_curve_document(self.curve)}
        found["without_sink"] = self.without_sink and _curve_document(self.without_sink)
        found["remedy"] = self.regime and self.regime.remedy
        found["error_is_lower_bound"] = self.error_is_lower_bound if measured else None
        found["pool_error_share"] = self.curve_without_sink.pool_share if measured else None
        if self.curve.prediction is not None:
            found["pilot_error"] = self.pilot_error
        if self.contexts is not None:
            found["autocorrelation_time"] = self.contexts.memory.document()
        for name, curve in self.moment_curves.items():
            found |= error_columns(ERROR_NAMES[name], curve)
            found[f"rate_{name}"] = curve.rate and curve.rate.document()
        return to_json(found | self.predicted_rates)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, entry: Mapping[str, Any], **curves: Any) -> Self:
        """Build a head record from its JSON entry (`document`) and its error curves, given by field name."""
        whole = {**entry, **curves}
        return from_json(cls, {part.name: whole[part.name] for part in fields(cls)})  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        rate = "no rate" if self.curve.rate is None else f"rate {self.curve.rate.slope:.2f}"
        last = f"error {self.curve.error[-1]:.3g} at n = {self.sizes[-1]:,}"
        kind = self.regime.value if self.regime else "predicted"
        return f"<HeadRecord of {self.name}: {kind}, {rate}, {last}>"


def error_columns(name: str, curve: ErrorCurve) -> dict[str, Array]:
    """Table columns of a curve under `name`: errors, standard errors and, if predicted, ends of their 95% intervals."""
    found = {name: curve.error, f"{name}_stderr": curve.stderr}
    return found if curve.measured else found | {f"{name}_low": curve.interval[0], f"{name}_high": curve.interval[1]}


def _curve_document(curve: ErrorCurve) -> dict[str, Any]:
    """JSON fields of one error curve of a head: errors, rate, and tokens needed for each error in `ERRORS`."""
    needed = {str(error): curve.tokens_for(error).document() for error in ERRORS}
    errors = error_columns("relative_output_error", curve)
    errors |= {"text_stderr": curve.text_stderr} if curve.measured else {}
    return {**errors, "rate": curve.rate and curve.rate.document(), "tokens_for": needed}


def kept_share(heads: Sequence[HeadRecord], error: float, context: int) -> float:
    """Share of the KV-cache entries of a context that random eviction must keep for a relative `error` of each head."""
    return share_of_keys(heads, [head.keys_for(error, context).n for head in heads], context)


def share_of_keys(heads: Sequence[HeadRecord], keys: Sequence[int | None], context: int) -> float:
    """Share of a context's KV-cache entries that is kept if each head needs the number of keys in `keys` (None: all).

    A key/value head keeps as many entries as the most demanding of the query heads that read it.
    """
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for head, needed in zip(heads, keys, strict=True):
        available = head.context(context)
        kept = available if needed is None else needed
        groups.setdefault((head.layer, head.kv_head), []).append((kept, available))
    total = sum(max(kept for kept, _ in group) for group in groups.values())
    return total / sum(group[0][1] for group in groups.values())
