"""One head: everything a probe has to say about it, typed, to and from JSON.

Where every context contains a sink, the sink is one key that is always kept, and the curve of the rest is taken at the
share that the rest has in a context of C tokens,

    e(n; C) = e_rest(n) · e(C)/e_rest(C),

with e the error curve beside the sink and e_rest without it: exact at n = C, and e_rest where C dilutes the sink. The
factor is a heuristic; beyond the sizes measured it tends to 1 as the sink's share falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from limitlens.errors import Array, check_relative
from limitlens.probing.critical_factor import CriticalFactor
from limitlens.probing.regimes import Regime
from limitlens.record import from_json, to_json
from limitlens.statistics.error_curve import ErrorCurve, TokensFor
from limitlens.theory import rates

ERRORS = (0.1, 0.05, 0.01)  # relative errors for which n(ε) is given
# of `theory.rates`: from the horizon, and from the coupling
FORMULAS = ("rate_sharp", "rate_rms", "rate_sharp_output", "rate_rms_output", "rate_drawn")
COUPLED = ("rate_drawn_coupling", "rate_proved")
UNSETTLED = 0.5  # error of the pool over that at the largest n, from which on the pool has not converged
CONSTANT_RATE = 0.5  # the baseline of every prediction
# their documents look different
APART = ("curve", "pooled", "centred", "pooled_centred", "ranks", "ordered_weights", "others")
OTHERS = ("mean", "covariance", "hardmax")  # curves of a head besides that of its output
MOMENTS = {"mean": "relative_mean_error", "covariance": "relative_covariance_error"}  # and their names in a document


@dataclass(frozen=True, eq=False)
class Sink:
    """What is in every context once."""

    kind: str  # "first token", "learned sink", or both
    share: Array  # (sizes,): of the mass among n other tokens
    share_in_window: float  # the same in a window of the probe
    dilution_length: float | None  # tokens that halve its share; None where no number of them does

    @property
    def keys(self) -> int:
        """Keys that a cache keeps for it: a learned sink has none."""
        return 1 if "first token" in self.kind else 0


@dataclass(frozen=True, eq=False, repr=False)
class HeadRecord:
    """What was measured of one query head; arrays have one number for each size n."""

    layer: int
    head: int
    kv_head: int
    sliding_window: int | None  # tokens the layer sees at once, where that is bounded
    horizon: float  # geometry of its scores (`probing.geometry`); None without a score matrix, and the note says why
    horizon_one_sided: float | None
    coupling: float | None
    geometry_note: str | None
    mean_tilt: float
    score_std: float
    curve: ErrorCurve  # relative output error among n tokens, beside the sink where every context has one
    pooled: ErrorCurve | None  # the same without the sink; None where there is none
    centred: Array  # errors relative to how much the output differs between queries
    pooled_centred: Array | None
    predicted_error: Array  # by the central limit theorem
    effective_tokens: Array  # 1/Σw²
    effective_tokens_growth: float | None  # exponent with which they grow over the last sizes
    top_weight: float  # at the largest size, as is the entropy
    entropy: float
    ranks: tuple[int, ...]  # of the ordered weights
    ordered_weights: Array
    sink: Sink | None
    sink_mass: float | None  # share of the mass in a window on the sink, or on the special tokens of an encoder
    pareto_k: float | None
    local_dimension: float | None
    regime: Regime
    regime_reason: str
    regime_agreement: float | None = None  # share of the resamples of queries and replicates with the same regime
    outside_support: float | None = None  # share of the queries outside the keys' support, which have no local exponent
    critical: CriticalFactor | None = None
    # of the pooled law: of the "mean" and the "covariance" of the outputs over the queries, and of "hardmax", argmax in
    # the place of softmax
    others: Mapping[str, ErrorCurve] = field(default_factory=dict)

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
        """The sizes n measured."""
        return self.curve.sizes

    @property
    def law(self) -> ErrorCurve:
        """The curve of the pooled law, without a sink: what theory speaks of."""
        return self.pooled or self.curve

    @property
    def attention(self) -> str:
        """What the layer sees."""
        return "full" if self.sliding_window is None else "sliding window"

    @property
    def error_is_lower_bound(self) -> bool:
        """The pool itself has not converged: it holds one key, or its own error is half of the smallest measured."""
        return self.regime is Regime.FROZEN or self.law.pool_share > UNSETTLED

    @property
    def foretold(self) -> Array | None:
        """Errors that the run's own tokens foretell at its sizes (`theory.pilot_errors`); None if they cannot."""
        ahead = self.curve.foresight
        return None if ahead is None or not ahead.defined else ahead.error(self.sizes)[0]

    @cached_property
    def predicted_rates(self) -> dict[str, float | None]:
        """Rates that theory and the constant baseline predict, by name."""
        ahead = self.law.foresight
        found: dict[str, float | None] = {name: getattr(rates, name)(self.horizon) for name in FORMULAS}
        found["rate_pilot"] = ahead.slope(self.sizes)[0] if ahead is not None and ahead.defined else None
        psi = self.coupling  # of the covariance: a heuristic where that is no variance proxy of the tokens
        found |= {name: None if psi is None else getattr(rates, name)(psi) for name in COUPLED}
        return found | {"rate_constant": CONSTANT_RATE}

    def context(self, tokens: float) -> float:
        """Keys there are in a context: all of it, or the layer's sliding window where that is shorter."""
        return min(tokens, self.sliding_window or math.inf)

    def keys_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Random keys that keep the head within an error in a context, its sink among them."""
        check_relative(error)
        own, atoms = self.context(context), self.sink.keys if self.sink else 0
        rest = max(own - atoms, 1)
        factor = self.sink_factor(rest)  # of a curve: scaling what is asked of it spares scaling its resamples
        return self.law.tokens_for(error / factor if 0 < factor < math.inf else error, rest).plus(atoms)

    def sink_factor(self, context: float) -> float:
        """e(C)/e_rest(C) of a context of C tokens besides the sink; 1 where there is none."""
        if self.pooled is None or self.sink is None:
            return 1.0
        n = np.asarray(self.sizes, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.curve.error / self.pooled.error
        if context <= n[-1]:
            return float(np.interp(math.log(context), np.log(n), ratio))
        length = self.sink.dilution_length
        dilution = 1 / length if length else 0.0
        left = 1.0 if not dilution else (1 + dilution * n[-1]) / (1 + dilution * context)
        left = left if math.isfinite(left) else 0.0  # an endless context leaves the sink nothing
        return 1 - (1 - float(ratio[-1])) * left

    def document(self) -> dict[str, Any]:
        """The head as the JSON of the contract."""
        bare = None if self.pooled is None else _curve_document(self.pooled, self.pooled_centred)
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in APART}
        found |= {"attention": self.attention, "n": self.sizes, **_curve_document(self.curve, self.centred)}
        found |= {"ordered_weights": {"rank": self.ranks, "weight": self.ordered_weights}, "without_sink": bare}
        found |= {"remedy": self.regime.remedy, "error_is_lower_bound": self.error_is_lower_bound}
        found |= {"pool_error_share": self.law.pool_share}
        if self.curve.foresight is not None:
            found["pilot_error"] = self.foretold
        for name, curve in self.others.items():
            error = MOMENTS.get(name, f"{name}_error")
            found |= {error: curve.error, f"{error}_stderr": curve.stderr}
            found[f"rate_{name}"] = curve.rate and curve.rate.document()
        return to_json(found | self.predicted_rates)  # type: ignore[no-any-return]

    @classmethod
    def of(
        cls, entry: Mapping[str, Any], curve: ErrorCurve, pooled: ErrorCurve | None, others: Mapping[str, ErrorCurve]
    ) -> HeadRecord:
        """The head whose `document` this is, with the curves that its run stored."""
        weights, bare = entry["ordered_weights"], entry["without_sink"]
        apart = {"curve": curve, "pooled": pooled, "ranks": weights["rank"], "ordered_weights": weights["weight"]}
        apart |= {"centred": entry["relative_centred_error"], "others": others}
        apart |= {"pooled_centred": None if bare is None else bare["relative_centred_error"]}
        return from_json(cls, {**entry, **apart})  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        rate = "no rate" if self.curve.rate is None else f"rate {self.curve.rate.slope:.2f}"
        last = f"error {self.curve.error[-1]:.3g} at n = {self.sizes[-1]:,}"
        return f"<HeadRecord of {self.name}: {self.regime.value}, {rate}, {last}>"


def _curve_document(curve: ErrorCurve, centred: Array | None) -> dict[str, Any]:
    """An error curve in a head's document."""
    needed = {str(error): curve.tokens_for(error).document() for error in ERRORS}
    found = {"relative_output_error": curve.error, "relative_output_error_stderr": curve.stderr}
    rate = curve.rate and curve.rate.document()
    return {**found, "relative_centred_error": centred, "rate": rate, "tokens_for": needed}


def kept_share(heads: Sequence[HeadRecord], error: float, context: int) -> float:
    """The share of KV entries kept for an error in a context (`share_kept`)."""
    return share_kept(heads, [head.keys_for(error, context).n for head in heads], context)


def share_kept(heads: Sequence[HeadRecord], keys: Sequence[int | None], context: int) -> float:
    """KV entries kept over those there are, key/value heads keeping the most `keys` that a head asks for; None: all."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for head, needed in zip(heads, keys, strict=True):
        own = head.context(context)
        groups.setdefault((head.layer, head.kv_head), []).append((own if needed is None else needed, own))
    kept = sum(max(needed for needed, _ in group) for group in groups.values())
    return kept / sum(group[0][1] for group in groups.values())
