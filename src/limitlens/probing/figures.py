"""Figures of a probe, and data for the interactive parts of its HTML page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from limitlens.errors import InputError
from limitlens.probing.overview import count_regimes, slowest
from limitlens.probing.record import ERRORS, HeadRecord, share_of_keys
from limitlens.record import to_json
from limitlens.report.view import Colour, Dash, Figure, head_map
from limitlens.statistics.regimes import Regime
from limitlens.statistics.tokens_for import CONTEXTS, answers
from limitlens.statistics.tokens_for import ERRORS as WANTED
from limitlens.theory import rates

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

TIGHT = 0.05  # target error for which a page shows budgets (numbers of keys) when it opens
BEYOND = "beyond"  # shown, with the head's `farthest`, for a number of tokens that exceeds the largest size predicted
# Fields of a `HeadRecord` that a page reads under the same names.
FIELDS = (
    "layer", "head", "kv_head", "horizon", "horizon_one_sided", "coupling", "mean_tilt", "score_std", "top_weight",
    "entropy", "sink_mass", "pareto_k", "sliding_window", "regime_reason",
)  # fmt: skip
CRITICAL = "Above 1 the head averages, below 1 it has concentrated: the largest weight is 1/5 with scores times this."
COLOURS: dict[Regime, Colour] = {Regime.AVERAGING: "blue", Regime.SELECTIVE: "green", Regime.FROZEN: "red"}
# Rates of the output error in theory, for Gaussian tokens: name, function of `theory.rates`, dash of the line.
OUTPUT_LINES: tuple[tuple[str, str, Dash], ...] = (
    ("root mean square: min(½, (√(1+4/H²)−1)/4), heuristic", "rate_rms_output", ""),
    ("of one sample: min(½, 1/(1+2H²)), heuristic", "rate_sharp_output", "dashed"),
)


def map_figure(run: ProbeRun, quantity: str) -> Figure:
    """Map of all heads, layer by head, coloured by `quantity`: "rate", "regime", or a numeric column of `run.heads`."""
    words = [regime.value for regime in Regime] if quantity == "regime" and run.measured else []
    if words:
        found: list[Any] = [head.regime and words.index(head.regime.value) for head in run.records]
    elif quantity == "rate":
        found = [head.curve.rate and head.curve.rate.slope for head in run.records]
    else:
        numbers = run.heads.select_dtypes("number").drop(columns=["layer", "head"]).dropna(axis="columns", how="all")
        if quantity not in numbers:
            known = f"expected one of {', '.join(('regime', *numbers.columns))}"
            help_ = f"give the name of a file as path={quantity!r}" if Path(quantity).suffix else known
            raise InputError(f"no head of this run has a value of {quantity!r}; {help_}")
        found = numbers[quantity].tolist()
    predicted = "" if run.measured else "predicted "
    label = f"{predicted}rate β of the error" if quantity == "rate" else quantity.replace("_", " ")
    return head_map(label, label, [head.place for head in run.records], found, words=words)


class Quantity(NamedTuple):
    """A number that the HTML page shows for each head: its key in the page's data, label and help text."""

    key: str
    label: str
    help: str = ""
    kind: str = ""  # "number" or "regime" if the map of heads can show it, else empty
    log: bool = False  # whether its scale is logarithmic


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
    Quantity("rate_predicted", "Sharp rate, output (rms)"),
    Quantity("kv_head", "Key/value head"),
    Quantity("sliding_window", "Sliding window"),
)


def page_data(run: ProbeRun) -> dict[str, Any]:
    """Data of the interactive parts of the HTML page; "heads" holds one list per quantity, with an entry per head."""
    rows = [_row(head) for head in run.records]
    regimes = count_regimes(run.records)
    known = [one for one in QUANTITIES if any(row[one.key] is not None for row in rows)]
    return {
        "n": list(run.n), "predicted": not run.measured, "first": run.records.index(slowest(run.records)[0]),
        "heads": {name: [row[name] for row in rows] for name in rows[0]},
        "quantities": [one._asdict() for one in known if one.kind],
        "facts": [one._asdict() for one in known if one.key not in ("rate", "regime")],
        "remedies": {regime.value: regime.remedy for regime in regimes},
        "regimes": [
            {"name": regime.value, "colour": COLOURS[regime], "count": count, "meaning": regime.meaning}
            for regime, count in regimes.items()
        ],
        "rate_axes": _rate_axes(run), "budget": _budgets(run),
    }  # fmt: skip


def _row(head: HeadRecord) -> dict[str, Any]:
    """Numbers of one head for the page, by name; an error curve is a list with one number per size."""
    curve, rate, sink, bare = head.curve, head.curve.rate, head.sink, head.without_sink
    rate_without_sink, argmax = head.curve_without_sink.rate, head.moment_curves.get("hardmax")
    needed = {error: curve.tokens_for(error) for error in ERRORS}
    # low and high only for predicted curves: the page computes intervals of measured ones from their standard errors
    low, high = (None, None) if curve.measured else curve.interval
    effective = head.effective_tokens
    slopes = head.slopes
    found = {
        **{name: getattr(head, name) for name in FIELDS},
        **{f"tokens_{error}": BEYOND if found.beyond else found.n for error, found in needed.items()},
        "farthest": curve.farthest, "rate": slopes["curve"], "rate_constant": rate and rate.constant,
        "law": rate and rate.law if curve.measured else None,
        "rate_interval": rate and f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}",
        "rate_pooled": rate_without_sink and rate_without_sink.slope,
        "rate_pooled_stderr": rate_without_sink and rate_without_sink.stderr,
        "rate_mean": slopes.get("mean"), "rate_covariance": slopes.get("covariance"),
        "rate_predicted": head.predicted_rates["rate_rms_output"],
        "critical_factor": head.critical and head.critical.factor,
        "hardmax_error": argmax and argmax.error,
        "hardmax_law": argmax and argmax.rate and argmax.rate.law,
        "regime": head.regime and head.regime.value, "lower_bound": head.error_is_lower_bound or None,
        "error": curve.error, "error_stderr": curve.stderr, "error_low": low, "error_high": high,
        "error_last": curve.error[-1], "bare_error": bare and bare.error,
        "pilot_error": head.pilot_error if curve.measured else None, "effective_tokens": effective,
        "growth": head.effective_tokens_growth, "effective_last": None if effective is None else effective[-1],
        "sink_share": sink and sink.share, "sink_dilution": sink and sink.dilution_length,
    }  # fmt: skip
    return to_json(found)  # type: ignore[no-any-return]


def _budgets(run: ProbeRun) -> dict[str, Any]:
    """Number of random keys that each head needs, by target error and context length (for encoders up to a window)."""
    window, heads = run.window, run.records
    contexts = CONTEXTS if run.causal else (*(size for size in (window // 4, window // 2) if size > 1), window, None)
    found = answers([head.keys_for for head in heads], WANTED, contexts)
    spread = 0.7 / (1 + max(head.head for head in heads))  # heads of one layer are drawn next to each other
    curves = [
        {"label": head.name, "x": head.layer + spread * head.head, "regime": head.regime and head.regime.value}
        for head in heads
    ]
    if len(heads) == 1:  # the page draws the curve of a single head instead of a comparison of heads
        curve = heads[0].curve
        curves[0] |= {"n": list(run.n), "error": curve.error.tolist(), "stderr": curve.stderr.tolist()}
    shares = [
        [
            context and share_of_keys(heads, [rows[error][place] for rows in found["n"]], context)
            for place, context in enumerate(contexts)
        ]
        for error in range(len(WANTED))
    ]
    return {
        "unit": "head", "cache": True, "axis": {"label": "layer", "whole": True}, "answers": found,
        "errors": list(WANTED), "wanted": WANTED.index(TIGHT), "contexts": list(contexts),
        "length": contexts.index(run.budget_context), "curves": curves, "share": shares,
    }  # fmt: skip


def _rate_axes(run: ProbeRun) -> list[dict[str, Any]]:
    """x axes of the page's plot of measured rates: horizon, score spread, mean tilt, with the lines of theory."""
    far = math.sqrt(2 * math.log(run.n[-1]))
    borders = [
        {"x": far / 2, "label": "√(2 ln n)/2: averaging ends"},
        {"x": far, "label": "√(2 ln n): freezing begins", "row": 1},
    ]
    horizons = [head.horizon for head in run.records if head.horizon and head.curve_without_sink.rate is not None]
    fine = np.geomspace(min(horizons), max(horizons), 80).tolist() if horizons else []
    lines = [
        {"name": name, "dash": dash, "colour": "ink", "x": fine, "y": [getattr(rates, rate)(x) for x in fine]}
        for name, rate, dash in OUTPUT_LINES * bool(horizons)
    ]
    gaussian = "The lines are for output errors of centred Gaussian tokens as n grows; real heads are neither."
    spread = (
        f"Boundaries are those of Gaussian scores at n = {run.n[-1]:,}: below half of √(2 ln n) many tokens count, "
        "above it a few, beyond √(2 ln n) only the largest."
    )
    sharp = [{"x": math.sqrt(0.5), "label": "H = √½: sharp rate leaves ½"}]
    axes = [
        ("horizon", "Horizon", "horizon H", gaussian, lines, sharp),
        ("score_std", "Score spread", "score spread τ", spread, [], borders),
        ("mean_tilt", "Mean tilt", "mean tilt τ₀", "", [], borders),
    ]
    return [dict(zip(("key", "label", "axis", "note", "lines", "guides"), axis, strict=True)) for axis in axes]
