"""What a probe shows: the map of all heads, the panel of one, rates against theory, budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from limitlens.estimate import Estimate
from limitlens.probing import findings
from limitlens.probing.figures import COLOURS, map_figure, rate_lines
from limitlens.probing.findings import WORDS
from limitlens.probing.overview import summary
from limitlens.probing.predictors import rate_skills
from limitlens.probing.record import ERRORS, MOMENTS, HeadRecord, share_kept
from limitlens.record import to_json
from limitlens.report.view import Block, Cell, Section, Table, Text, View, Widget
from limitlens.report.words import short
from limitlens.statistics.answers import CONTEXTS, answers
from limitlens.statistics.answers import ERRORS as WANTED

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

SHOWN = 5  # of the slowest heads, and of the fastest
BEYOND = "beyond"  # in the place of a number that lies beyond ten times the largest size measured
SKILL = ("status", "mean_absolute_miss", "rank_correlation")  # of a predictor of rates
RATE = {"rate": "slope", "rate_stderr": "stderr", "rate_constant": "constant", "law": "law"}  # of a head, of its `Rate`


def probe_view(run: ProbeRun) -> View:
    """Everything a probe has to show."""
    told = ("seed", "device", "kernel", "model_revision", "model_sha256", "corpus_sha256")
    return View(
        title=f"{run.model} on {run.corpus}",
        subtitle=findings.measured(run),
        verdict=findings.verdict(run),
        above=(Widget("regimes"), Widget("jumps")),
        sections=[
            _section("heads", Widget("map"), only="page"),
            Section("Every head at a glance", "", (map_figure(run, "rate"),), only="notebook"),
            _extremes(run),
            *_rates(run),
            _section("budget-section", Widget("budgets"), only="page"),
            Section("What the heads are", "", (Text(findings.advice(run), listed=True),), only="terminal"),
        ],
        data=lambda: page_data(run),
        warnings=run.warnings,
        trust=findings.trust(run),
        details={name.replace("_", " "): value for name in told if (value := getattr(run, name)) is not None},
    )


def _section(name: str, *blocks: Block, only: Literal["", "page"] = "") -> Section:
    title, lead = WORDS["sections"][name]
    return Section(title, lead, blocks, name, only)


def page_data(run: ProbeRun) -> dict[str, Any]:
    """What the widgets of a page read; heads are columns, one list for each quantity."""
    rows, picked, found = [_row(head) for head in run.records], findings.notable(run), findings.counts(run.records)
    places = {head.place: index for index, head in enumerate(run.records)}
    known = [told for told in WORDS["quantities"] if any(row[told["key"]] is not None for row in rows)]
    return {
        "n": list(run.n), "farthest": min(head.curve.farthest for head in run.records), "window": run.window,
        "ranks": list(run.records[0].ranks), "first": places[picked[0].head.place],
        "heads": {name: [row[name] for row in rows] for name in rows[0]},
        "quantities": [told for told in known if told["kind"]],
        "facts": [told for told in known if told["key"] not in ("rate", "regime")],
        "remedies": {regime.value: regime.remedy for regime in found},
        "rate_axes": _rate_axes(run),
        "jumps": [{"head": places[item.head.place], "text": f"{item.head.name}: {item.why}"} for item in picked],
        "regimes": [
            {"name": regime.value, "colour": COLOURS[regime], "count": count, "meaning": regime.meaning}
            for regime, count in found.items()
        ],
        "budget": _budgets(run),
    }  # fmt: skip


def _row(head: HeadRecord) -> dict[str, Any]:
    """What a page is told of a head: numbers under their own names, curves as lists."""
    rate, law, sink, bare = head.curve.rate, head.law.rate, head.sink, head.pooled
    told, critical, argmax = head.foretold, head.critical, head.others.get("hardmax")
    names = (
        "layer", "head", "kv_head", "horizon", "horizon_one_sided", "coupling", "mean_tilt", "score_std", "top_weight",
        "entropy", "sink_mass", "pareto_k", "local_dimension", "sliding_window", "regime_reason",
    )  # fmt: skip
    needed = {error: head.curve.tokens_for(error) for error in ERRORS}
    return {
        **{name: getattr(head, name) for name in names},
        **{name: getattr(head, name).tolist() for name in ("predicted_error", "effective_tokens")},
        **{f"tokens_{error}": BEYOND if found.beyond else found.n for error, found in needed.items()},
        **{name: rate and getattr(rate, part) for name, part in RATE.items()},
        "rate_interval": rate and f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}",
        "rate_pooled": law and law.slope, "rate_pooled_stderr": law and law.stderr,
        **{f"rate_{kind}": (own := head.others.get(kind)) and own.rate and own.rate.slope for kind in MOMENTS},
        "critical_factor": critical and to_json(critical.factor),
        "hardmax_error": argmax and argmax.error.tolist(),
        "hardmax_law": argmax and argmax.rate and argmax.rate.law,
        "rate_sharp": head.predicted_rates["rate_sharp"], "rate_predicted": head.predicted_rates["rate_rms_output"],
        "regime": head.regime.value, "lower_bound": head.error_is_lower_bound or None,
        "error": head.curve.error.tolist(), "error_stderr": head.curve.stderr.tolist(),
        "error_last": float(head.curve.error[-1]), "bare_error": bare and bare.error.tolist(),
        "pilot_error": None if told is None else told.tolist(),
        "growth": head.effective_tokens_growth, "effective_last": float(head.effective_tokens[-1]),
        "sink_share": sink and sink.share.tolist(), "sink_dilution": sink and sink.dilution_length,
        "ordered_weights": head.ordered_weights.tolist(),
    }  # fmt: skip


def _budgets(run: ProbeRun) -> dict[str, Any]:
    """Keys that every head needs, for a few errors and contexts; an encoder has no context beyond its window."""
    window, heads = run.window, run.records
    contexts = CONTEXTS if run.causal else (*(size for size in (window // 4, window // 2) if size > 1), window, None)
    found = answers([head.keys_for for head in heads], WANTED, contexts)
    spread = 0.7 / (1 + max(head.head for head in heads))  # heads of one layer side by side
    alone = {}
    if len(heads) == 1:  # nothing to set side by side: its curve is drawn instead
        curve = heads[0].curve
        alone = {"n": list(run.n), "error": curve.error.tolist(), "stderr": curve.stderr.tolist()}

    def share(error: int, place: int, context: int | None) -> float | None:
        needed = [rows[error][place] for rows in found["n"]]
        return None if context is None else share_kept(heads, needed, context)

    return {
        "unit": "head", "cache": True, "axis": {"label": "layer", "whole": True}, "answers": found,
        "errors": list(WANTED), "wanted": WANTED.index(findings.TIGHT),
        "contexts": list(contexts), "length": contexts.index(findings.CONTEXT if run.causal else window),
        "curves": [
            {"label": head.name, "x": head.layer + spread * head.head, "regime": head.regime.value, **alone}
            for head in heads
        ],
        "share": [
            [share(error, place, context) for place, context in enumerate(contexts)] for error in range(len(WANTED))
        ],
    }  # fmt: skip


def _rate_axes(run: ProbeRun) -> list[dict[str, Any]]:
    """What rates can be drawn against, with the lines and boundaries that theory sets there."""
    far = math.sqrt(2 * math.log(run.n[-1]))
    borders = [
        {"x": far / 2, "label": "√(2 ln n)/2: averaging ends"},
        {"x": far, "label": "√(2 ln n): freezing begins", "row": 1},
    ]
    horizons = [head.horizon for head in run.records if head.horizon and head.law.rate is not None]
    parts = ("name", "dash", "colour", "x", "y")
    lines = [{part: getattr(one, part) for part in parts} for one in (rate_lines(horizons) if horizons else [])]
    leaves = {"x": math.sqrt(0.5), "label": "H = √½: sharp rate leaves ½"}
    drawn: dict[str, Any] = {"horizon": {"lines": lines, "guides": [leaves]}}
    return [
        {"lines": [], "guides": borders, **axis, "note": axis["note"].format(n=run.n[-1]), **drawn.get(axis["key"], {})}
        for axis in WORDS["rate_axes"]
    ]


def _extremes(run: ProbeRun) -> Section:
    """The slowest heads and the fastest, for a terminal: a page has all of them."""
    columns = [column.format(n=run.n[-1]) for column in WORDS["columns"]]
    found = {"slowest": findings.slowest(run), "fastest": findings.fastest(run)}
    titles = {name: WORDS[name].format(shown=SHOWN) for name in found}
    tables = [Table(titles[name], columns, [_cells(head) for head in heads[:SHOWN]]) for name, heads in found.items()]
    legend = Text(("* extrapolated; beyond: farther than the tokens of this run can tell",))
    return Section("", "", (*tables, legend), only="terminal")


def _cells(head: HeadRecord) -> list[Cell]:
    def tokens(error: float) -> str:
        found = head.curve.tokens_for(error)
        return BEYOND if found.beyond else "–" if found.n is None else f"{found.n:,}{'*' * found.extrapolated}"

    rate = head.curve.rate
    return [
        f"{head.layer}.{head.head}", None if rate is None else round(rate.slope, 2),
        None if rate is None else f"{rate.interval[0]:.2f} to {rate.interval[1]:.2f}",
        Estimate(round(float(head.curve.error[-1]), 3), round(float(head.curve.stderr[-1]), 3)),
        tokens(0.1), tokens(0.05), float(f"{head.effective_tokens[-1]:.3g}"), float(f"{head.top_weight:.2g}"),
        head.sink_mass and round(head.sink_mass, 2), head.pareto_k and round(head.pareto_k, 2),
        round(head.horizon, 2), head.regime.value,
    ]  # fmt: skip


def _rates(run: ProbeRun) -> list[Section]:
    """How well the predicted rates do, the constants beside them."""
    skill, about = rate_skills(run.records), summary(run.records)
    if not skill["heads"] or about["rate"] is None:
        return []
    words, labels, found = WORDS["rates"], WORDS["predictors"], skill["predictors"]
    knowing = [name for name in _ranked(found) if name != "rate_best_constant"]  # that one was told the answer
    told = {"best": labels[knowing[0]], "miss": short(found[knowing[0]]["mean_absolute_miss"])}
    told |= {"constant": short(found["rate_constant"]["mean_absolute_miss"])}
    best = "constant best" if knowing[0] == "rate_constant" else "best"
    said = [words["spread"].format(**about["rate"]), words[best].format(**told)]
    if (correlation := skill["rank_correlation_score_std"]) is not None:
        said.append(words["order"].format(correlation=correlation))
    if about["rate_mean"] and about["rate_covariance"]:
        said.append(words["moments"].format(mean=about["rate_mean"], covariance=about["rate_covariance"]))
    kinds = {"output": found} | {kind: skill["moments"][kind]["predictors"] for kind in MOMENTS}
    tables = []
    for kind, own in kinds.items():
        rows = [
            (labels[name], *(own[name][part] for part in SKILL), f"{own[name]['at_least_as_fast']:.0%}")
            for name in _ranked(own)
        ]
        tables += [Table(words["table"].format(kind=kind), words["columns"], rows)] if own else []
    argmax = [rate for head in run.records if "hardmax" in head.others and (rate := head.others["hardmax"].rate)]
    if argmax:
        laws, exponent = [rate.law for rate in argmax], median(rate.log_exponent for rate in argmax)
        counts = {name: laws.count(name) for name in ("power", "log", "undecided")}
        said.append(words["argmax"].format(heads=len(argmax), exponent=exponent, **counts))
    return [_section("rates-section", Widget("rates"), Text(said), *tables)]


def _ranked(predictors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Predictors by their miss, the best first."""
    return sorted(predictors, key=lambda name: float(predictors[name]["mean_absolute_miss"]))
