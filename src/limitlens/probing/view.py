"""View of a probe or a prediction: tokens needed for a target error, every head, and predicted rates last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from limitlens.estimate import Estimate
from limitlens.probing import findings
from limitlens.probing.figures import map_figure
from limitlens.probing.overview import rate_skills, summary
from limitlens.probing.page_data import BEYOND, page_data
from limitlens.probing.record import MOMENTS, HeadRecord, share_of_keys
from limitlens.report.text import short
from limitlens.report.view import Cell, Section, Table, Text, View, Widget

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

SHOWN = 5  # of the slowest heads, and of the fastest
TARGETS = (0.2, 0.1, 0.05, 0.01)  # relative errors of the table of tokens needed
DETAILS = ("seed", "device", "kernel", "model_revision", "model_sha256", "corpus_sha256")
PREDICTOR_NAMES = {
    "rate_constant": "the constant 1/2",
    "rate_best_constant": "baseline: best single constant",
    "rate_sharp": "sharp: min(½, 1/(1+H²))",
    "rate_rms": "sharp, rms: min(½, (√(1+8/H²)−1)/4)",
    "rate_sharp_output": "sharp, of one sample: min(½, 1/(1+2H²))",
    "rate_rms_output": "sharp, rms: min(½, (√(1+4/H²)−1)/4)",
    "rate_drawn": "drawn in the literature: 1/(2(1+H²))",
    "rate_drawn_coupling": "drawn in the literature: 1/(2(1+Ψ))",
    "rate_proved": "proved, were Ψ that of a variance proxy: 1/(2(1+32Ψ))",
    "rate_pilot": "from the run's own tokens: the exact finite-n law",
}


def probe_view(run: ProbeRun) -> View:
    """Everything a probe or a prediction has to show."""
    heads = (
        "Each cell is a head. Choose the quantity that colours the cells; click a head or use the arrow keys to see "
        "its curve."
    )
    budgets = (
        "Choose a target error and the length of the context. Budgets are for tokens drawn at random, from each head's "
        "error curve; outside its sizes they follow the prediction from the head's own tokens, and are marked."
    )
    title = f"{run.model} on {run.corpus}"
    return View(
        title=title if run.measured else f"{title}, predicted",
        subtitle=findings.subtitle(run),
        verdict=findings.verdict(run),
        above=(Widget("regimes"), Widget("jumps")) if run.measured else (Widget("jumps"),),
        sections=[
            Section("Tokens needed for a target error", "", (_needs(run),)),
            Section("Every head", heads, (Widget("map"),), "heads", only="page"),
            Section("Every head", "", (map_figure(run, "rate"),), only="notebook"),
            Section(
                "How many tokens does each head need?", budgets, (Widget("budgets"),), "budget-section", only="page"
            ),
            _extremes(run),
            Section("Advice", "", (Text(findings.advice(run), listed=True),), only="terminal"),
            *_rates(run),
        ],
        data=lambda: page_data(run),
        warnings=run.warnings,
        trust=findings.trust(run),
        details={name.replace("_", " "): value for name in DETAILS if (value := getattr(run, name)) is not None},
    )


def _needs(run: ProbeRun) -> Table:
    """For each target error: heads within it, random keys that half and 90% of the heads need, KV entries kept."""
    context, heads = findings.context_of(run), run.records
    rows: list[list[Cell]] = []
    for error in TARGETS:
        within = sum(bool(head.curve.error[-1] <= error) for head in heads)
        keys = [head.keys_for(error, context).n for head in heads]
        needed = sorted(head.context(context) if n is None else n for head, n in zip(heads, keys, strict=True))
        half, most = (round(needed[math.ceil(share * len(heads)) - 1]) for share in (0.5, 0.9))
        share = share_of_keys(heads, keys, context)
        rows.append([f"{error:.0%}", f"{within} of {len(heads)}", half, most, f"{share:.0%}"])
    columns = (
        "target error", f"heads within it at n = {run.n[-1]:,}", "random keys for half of the heads",
        "for 90% of the heads", f"kept of {context:,} KV entries" if run.causal else f"kept of {context:,} keys",
    )  # fmt: skip
    return Table("Tokens needed for a target error", columns, rows)


def _extremes(run: ProbeRun) -> Section:
    """The slowest and the fastest heads, for a terminal: a page shows all of them."""
    slowest, fastest = findings.slowest(run)[:SHOWN], findings.fastest(run)[:SHOWN]
    tables = (
        _head_table(run, f"The {SHOWN} slowest heads: the largest errors left", slowest),
        _head_table(run, f"The {SHOWN} fastest heads: the smallest errors left", fastest),
    )
    legend = Text(("* extrapolated; beyond: more tokens than this run can predict",))
    return Section("", "", (*tables, legend), only="terminal")


def _head_table(run: ProbeRun, title: str, heads: Sequence[HeadRecord]) -> Table:
    """One row per head; columns that a prediction does not have are left out."""
    rows = [_cells(head) for head in heads]
    last = f"error at n = {run.n[-1]:,}"
    columns = {"head": "head", "rate": "rate", "interval": "95% interval", "error": last, "low to high": "95% interval"}
    kept = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else list(columns)
    return Table(title, [columns.get(name, name) for name in kept], [[row[name] for name in kept] for row in rows])


def _cells(head: HeadRecord) -> dict[str, Cell]:
    def tokens(error: float) -> str:
        found = head.curve.tokens_for(error)
        return BEYOND if found.beyond else "–" if found.n is None else f"{found.n:,}{'*' * found.extrapolated}"

    curve, rate, effective = head.curve, head.curve.rate, head.effective_tokens
    error = Estimate(round(float(curve.error[-1]), 3), round(float(curve.stderr[-1]), 3))
    low, high = curve.interval[:, -1].tolist()
    return {
        "head": f"{head.layer}.{head.head}",
        "rate": None if rate is None else round(rate.slope, 2),
        "interval": None if rate is None else f"{rate.interval[0]:.2f} to {rate.interval[1]:.2f}",
        "error": error if curve.measured else error.value,
        "low to high": None if curve.measured or math.isnan(low) else f"{low:.3g} to {high:.3g}",
        "tokens for 10%": tokens(0.1),
        "for 5%": tokens(0.05),
        "for 1%": None if curve.measured else tokens(0.01),
        "effective tokens": None if effective is None else float(f"{effective[-1]:.3g}"),
        "top weight": head.top_weight and float(f"{head.top_weight:.2g}"),
        "sink": head.sink_mass and round(head.sink_mass, 2),
        "Pareto k": head.pareto_k and round(head.pareto_k, 2),
        "horizon": head.horizon and round(head.horizon, 2),
        "regime": head.regime and head.regime.value,
    }


def _rates(run: ProbeRun) -> list[Section]:
    """Accuracy of the predicted rates against constant baselines; nothing where no rate was measured."""
    skill, about = rate_skills(run.records), summary(run.records)
    if not skill["heads"] or about["rate"] is None:
        return []
    rate, predictors = about["rate"], skill["predictors"]
    ranked = [name for name in _ranked(predictors) if name != "rate_best_constant"]  # it is fitted to the answer
    best, miss = PREDICTOR_NAMES[ranked[0]], short(predictors[ranked[0]]["mean_absolute_miss"])
    constant = short(predictors["rate_constant"]["mean_absolute_miss"])
    lines = [f"Rates range from {rate['smallest']:.2f} to {rate['largest']:.2f}, median {rate['median']:.2f}."]
    if ranked[0] == "rate_constant":
        lines.append(
            f"The best predictor here is {best}, off by {miss} on average: no formula is better on these heads."
        )
    else:
        lines.append(
            f"The best predictor here is {best}, off by {miss} on average; the constant 1/2 is off by {constant}."
        )
    if (correlation := skill["rank_correlation_score_std"]) is not None:
        lines.append(f"The rank correlation of rates with the score spread is {correlation:.2f}.")
    if (mean := about["rate_mean"]) and (covariance := about["rate_covariance"]):
        lines.append(
            f"The mean of the outputs over the queries converges with rates from {mean['smallest']:.2f} to "
            f"{mean['largest']:.2f}, median {mean['median']:.2f}; their covariance with rates from "
            f"{covariance['smallest']:.2f} to {covariance['largest']:.2f}, median {covariance['median']:.2f}. Formulas "
            "for moments are compared with these rates only."
        )
    if argmax := [one.rate for head in run.records if (one := head.moment_curves.get("hardmax")) and one.rate]:
        laws, exponent = [rate.law for rate in argmax], median(rate.log_exponent for rate in argmax)
        lines.append(
            f"With argmax in place of softmax, the errors of {laws.count('log')} of {len(argmax)} heads follow a power "
            f"of ln n, {laws.count('power')} a power of n, {laws.count('undecided')} are undecided; the median "
            f"logarithmic law is (ln n)^−{exponent:.2f}."
        )
    kinds = {"output": predictors} | {kind: skill["moments"][kind]["predictors"] for kind in MOMENTS}
    tables = [_accuracy(kind, own) for kind, own in kinds.items() if own]
    lead = (
        "One point per head; theory's rates for Gaussian tokens are drawn as lines. Click a point to choose its head."
    )
    return [Section("Does theory predict the rates?", lead, (Widget("rates"), Text(lines), *tables), "rates-section")]


def _accuracy(kind: str, predictors: Mapping[str, Mapping[str, Any]]) -> Table:
    """Predictors of the rate of a kind of error, the most accurate first."""
    columns = ("predicted rate", "status here", "mean absolute error", "rank correlation", "heads at least as fast")
    rows = [
        (
            PREDICTOR_NAMES[name], own["status"], own["mean_absolute_miss"], own["rank_correlation"],
            f"{own['at_least_as_fast']:.0%}",
        )
        for name, own in ((name, predictors[name]) for name in _ranked(predictors))
    ]  # fmt: skip
    return Table(f"accuracy of predicted rates of the {kind} error", columns, rows)


def _ranked(predictors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Predictors by their mean absolute error, the smallest first."""
    return sorted(predictors, key=lambda name: float(predictors[name]["mean_absolute_miss"]))
