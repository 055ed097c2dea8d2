"""Data that the interactive parts of a probe's page read: the map, the panel of one head, rates, budgets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from limitlens.probing import findings
from limitlens.probing.figures import COLOURS, rate_lines
from limitlens.probing.record import ERRORS, MOMENTS, HeadRecord, share_of_keys
from limitlens.record import to_json
from limitlens.statistics.answers import CONTEXTS, answers
from limitlens.statistics.answers import ERRORS as WANTED

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

BEYOND = "beyond"  # in place of a number of tokens that lies beyond the largest size predicted
RATE = {"rate": "slope", "rate_stderr": "stderr", "rate_constant": "constant"}  # of a head, of its `Rate`
# Fields of a head that a page reads under their own names.
FIELDS = (
    "layer", "head", "kv_head", "horizon", "horizon_one_sided", "coupling", "mean_tilt", "score_std", "top_weight",
    "entropy", "sink_mass", "pareto_k", "sliding_window", "regime_reason",
)  # fmt: skip

CRITICAL = "Above 1 the head averages, below 1 it has concentrated: the largest weight is 1/5 with scores times this."


class Quantity(NamedTuple):
    """A number of a head: its key in the page's data, its label and help; with a `kind` it can colour the map."""

    key: str
    label: str
    help: str = ""
    kind: str = ""  # "number" or "regime"
    log: bool = False


QUANTITIES = (
    Quantity("rate", "Rate β of the error", "The error falls like n to the −β: 0.5 is plain averaging.", "number"),
    Quantity("rate_mean", "Rate of the mean's error", "Rate for the mean of the outputs over the queries.", "number"),
    Quantity("rate_covariance", "Rate of the covariance's error", "Rate for the outputs' covariance.", "number"),
    Quantity("rate_interval", "Rate, 95% interval"),
    Quantity("law", "Law that fits better", "Power of n or of ln n, where the evidence decides."),
    Quantity("tokens_0.1", "Tokens for 10% error"),
    Quantity("tokens_0.05", "Tokens for 5% error", "Random tokens for an output within 5%.", "number", True),
    Quantity("tokens_0.01", "Tokens for 1% error"),
    Quantity("regime", "Regime", "Averaging over many tokens, selective among a few, or frozen onto one.", "regime"),
    Quantity("score_std", "Score spread", "Standard deviation of a query's scores over the tokens.", "number"),
    Quantity("pareto_k", "Tail of the weights, k̂", "Pareto shape of the largest weights: 0 is a thin tail.", "number"),
    Quantity("sink_mass", "Mass on the sink", "Share of the attention on the sink or the special tokens.", "number"),
    Quantity("sink_dilution", "Dilution length of the sink", "Tokens that halve the sink's share.", "number", True),
    Quantity("error_last", "Error at the largest n", "Relative output error of the largest sample.", "number", True),
    Quantity("effective_last", "Effective tokens", "1/Σw² at the largest n.", "number", True),
    Quantity("growth", "Growth exponent of effective tokens"),
    Quantity("top_weight", "Largest weight", "Mean over queries of the largest weight at the largest n.", "number"),
    Quantity("entropy", "Entropy", "Of the attention weights at the largest n, in nats.", "number"),
    Quantity("horizon", "Horizon H", "Two-sided horizon of the head's scores for tokens of this law.", "number"),
    Quantity("horizon_one_sided", "Horizon, one-sided"),
    Quantity("coupling", "Coupling Ψ"),
    Quantity("mean_tilt", "Mean tilt τ₀", "How strongly the average query tilts the tokens.", "number"),
    Quantity("critical_factor", "Critical factor on the scores", CRITICAL, "number", True),
    Quantity("hardmax_law", "Law of the argmax error", "Power of n or of ln n for argmax in place of softmax."),
    Quantity("rate_sharp", "Sharp rate, moments"),
    Quantity("rate_predicted", "Sharp rate, output (rms)"),
    Quantity("kv_head", "Key/value head"),
    Quantity("sliding_window", "Sliding window"),
)


def page_data(run: ProbeRun) -> dict[str, Any]:
    """Everything the widgets of a page read; heads are columns, one list for each quantity."""
    rows = [_row(head) for head in run.records]
    notable = findings.notable(run)
    regimes = findings.counts(run.records)
    places = {head.place: index for index, head in enumerate(run.records)}
    known = [one for one in QUANTITIES if any(row[one.key] is not None for row in rows)]
    return {
        "n": list(run.n), "farthest": min(head.curve.farthest for head in run.records), "window": run.window,
        "predicted": not run.measured, "first": places[notable[0][0].place],
        "heads": {name: [row[name] for row in rows] for name in rows[0]},
        "quantities": [one._asdict() for one in known if one.kind],
        "facts": [one._asdict() for one in known if one.key not in ("rate", "regime")],
        "remedies": {regime.value: regime.remedy for regime in regimes},
        "rate_axes": _rate_axes(run),
        "jumps": [{"head": places[head.place], "text": f"{head.name}: {why}"} for head, why in notable],
        "regimes": [
            {"name": regime.value, "colour": COLOURS[regime], "count": count, "meaning": regime.meaning}
            for regime, count in regimes.items()
        ],
        "budget": _budgets(run),
    }  # fmt: skip


def _row(head: HeadRecord) -> dict[str, Any]:
    """The numbers of one head by name, curves as lists."""
    curve, rate, sink, bare = head.curve, head.curve.rate, head.sink, head.without_sink
    law = head.curve_without_sink.rate
    critical, argmax = head.critical, head.moment_curves.get("hardmax")
    needed = {error: curve.tokens_for(error) for error in ERRORS}
    low, high = (
        (None, None) if curve.measured else curve.interval.tolist()
    )  # the page derives those of a measured curve
    effective = _listed(head.effective_tokens)
    return {
        **{name: getattr(head, name) for name in FIELDS},
        **{f"tokens_{error}": BEYOND if found.beyond else found.n for error, found in needed.items()},
        **{name: rate and getattr(rate, part) for name, part in RATE.items()},
        "law": rate and rate.law if curve.measured else None,
        "rate_interval": rate and f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}",
        "rate_pooled": law and law.slope, "rate_pooled_stderr": law and law.stderr,
        **{f"rate_{kind}": (own := head.moment_curves.get(kind)) and own.rate and own.rate.slope for kind in MOMENTS},
        "critical_factor": critical and to_json(critical.factor),
        "hardmax_error": argmax and argmax.error.tolist(),
        "hardmax_law": argmax and argmax.rate and argmax.rate.law,
        "rate_sharp": head.predicted_rates["rate_sharp"], "rate_predicted": head.predicted_rates["rate_rms_output"],
        "regime": head.regime and head.regime.value, "lower_bound": head.error_is_lower_bound or None,
        "error": curve.error.tolist(), "error_stderr": curve.stderr.tolist(), "error_low": low, "error_high": high,
        "error_last": float(curve.error[-1]), "bare_error": bare and bare.error.tolist(),
        "pilot_error": _listed(head.pilot_error) if curve.measured else None,
        "effective_tokens": effective,
        "growth": head.effective_tokens_growth, "effective_last": effective and effective[-1],
        "sink_share": sink and sink.share.tolist(), "sink_dilution": sink and sink.dilution_length,
    }  # fmt: skip


def _listed(values: Any) -> list[float] | None:
    return None if values is None else values.tolist()


def _budgets(run: ProbeRun) -> dict[str, Any]:
    """Keys that every head needs, for a few errors and contexts; an encoder has no context beyond its window."""
    window, heads = run.window, run.records
    contexts = CONTEXTS if run.causal else (*(size for size in (window // 4, window // 2) if size > 1), window, None)
    found = answers([head.keys_for for head in heads], WANTED, contexts)
    spread = 0.7 / (1 + max(head.head for head in heads))  # heads of one layer side by side
    alone = {}
    if len(heads) == 1:  # the curve of a single head is drawn instead of a comparison of heads
        curve = heads[0].curve
        alone = {"n": list(run.n), "error": curve.error.tolist(), "stderr": curve.stderr.tolist()}

    def share(error: int, place: int, context: int | None) -> float | None:
        needed = [rows[error][place] for rows in found["n"]]
        return None if context is None else share_of_keys(heads, needed, context)

    return {
        "unit": "head", "cache": True, "axis": {"label": "layer", "whole": True}, "answers": found,
        "errors": list(WANTED), "wanted": WANTED.index(findings.TIGHT),
        "contexts": list(contexts), "length": contexts.index(findings.context_of(run)),
        "curves": [
            {
                "label": head.name, "x": head.layer + spread * head.head, "regime": head.regime and head.regime.value,
                **alone,
            }
            for head in heads
        ],
        "share": [
            [share(error, place, context) for place, context in enumerate(contexts)] for error in range(len(WANTED))
        ],
    }  # fmt: skip


def _rate_axes(run: ProbeRun) -> list[dict[str, Any]]:
    """Quantities that rates are drawn against, with the lines and boundaries of theory."""
    far = math.sqrt(2 * math.log(run.n[-1]))
    borders = [
        {"x": far / 2, "label": "√(2 ln n)/2: averaging ends"},
        {"x": far, "label": "√(2 ln n): freezing begins", "row": 1},
    ]
    horizons = [head.horizon for head in run.records if head.horizon and head.curve_without_sink.rate is not None]
    parts = ("name", "dash", "colour", "x", "y")
    lines = [{part: getattr(one, part) for part in parts} for one in (rate_lines(horizons) if horizons else [])]
    leaves = {"x": math.sqrt(0.5), "label": "H = √½: sharp rate leaves ½"}
    gaussian = "The lines are for output errors of centred Gaussian tokens as n grows; real heads are neither."
    spread = (
        f"Boundaries are those of Gaussian scores at n = {run.n[-1]:,}: below half of √(2 ln n) many tokens count, "
        "above it a few, beyond √(2 ln n) only the largest."
    )
    return [
        {
            "key": "horizon", "label": "Horizon", "axis": "horizon H", "note": gaussian, "lines": lines,
            "guides": [leaves],
        },
        {
            "key": "score_std", "label": "Score spread", "axis": "score spread τ", "note": spread, "lines": [],
            "guides": borders,
        },
        {"key": "mean_tilt", "label": "Mean tilt", "axis": "mean tilt τ₀", "note": "", "lines": [], "guides": borders},
    ]  # fmt: skip
