"""Content of the HTML page and the terminal output of a probe or a prediction: sentences, tables and figures."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from limitlens.estimate import Estimate
from limitlens.probing.figures import BEYOND, TIGHT, map_figure, page_data
from limitlens.probing.overview import count_regimes, rate_skills, slowest, summary
from limitlens.probing.record import HeadRecord, kept_share, share_of_keys
from limitlens.report.text import falling, join, plural, short
from limitlens.report.view import Cell, Section, Table, Text, View, Widget
from limitlens.statistics.contexts import context_sections
from limitlens.statistics.regimes import Regime
from limitlens.statistics.tails import Verdict

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

LOOSE = 0.2  # second target error, besides `TIGHT`, in the sentence on what to do
MISFIT = 4.0  # χ² per degree of freedom above which the fitted law is said not to describe a curve
SHOWN = 5  # number of heads in the table of the slowest heads
TARGETS = (0.2, 0.1, 0.05, 0.01)  # target errors in the table of tokens needed
SKILL = ("status", "mean_absolute_miss", "rank_correlation", "at_least_as_fast")  # of a predictor of rates
DETAILS = ("seed", "device", "kernel", "model_revision", "model_sha256", "corpus_sha256")
PREDICTOR_NAMES = {
    "rate_constant": "the constant 1/2",
    "rate_best_constant": "baseline: best single constant",
    "rate_sharp_output": "sharp, of one sample: min(½, 1/(1+2H²))",
    "rate_rms_output": "sharp, rms: min(½, (√(1+4/H²)−1)/4)",
    "rate_pilot": "from the run's own tokens: the exact finite-n law",
}


def probe_view(run: ProbeRun) -> View:
    """Content of the page and the terminal output of a run: title, verdict, tables, figures, warnings, accuracy."""
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
        subtitle=subtitle(run),
        verdict=verdict(run),
        above=(Widget("regimes"),) if run.measured else (),
        sections=[
            Section("Tokens needed for a target error", "", (_needs(run),)),
            Section("Every head", heads, (Widget("map"),), "heads", only="page"),
            Section("Every head", "", (map_figure(run, "rate"),), only="notebook"),
            Section(
                "How many tokens does each head need?", budgets, (Widget("budgets"),), "budget-section", only="page"
            ),
            *context_sections({head.name: head.contexts for head in run.records if head.contexts is not None}),
            _slowest(run),
            *_rates(run),
        ],
        data=lambda: page_data(run),
        warnings=run.warnings,
        trust=trust(run),
        details={name.replace("_", " "): value for name in DETAILS if (value := getattr(run, name)) is not None},
    )


def _needs(run: ProbeRun) -> Table:
    """Table by target error: heads that reach it, random keys that half and 90% of the heads need, KV entries kept."""
    context, heads = run.budget_context, run.records
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


def _slowest(run: ProbeRun) -> Section:
    """Table of the heads with the largest errors, for a terminal, without columns that are empty for all heads."""
    rows = [_cells(head) for head in slowest(run.records)[:SHOWN]]
    kept = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    headings = {"interval": "95% interval", "error": f"error at n = {run.n[-1]:,}", "low to high": "95% interval"}
    columns, cells = [headings.get(name, name) for name in kept], [[row[name] for name in kept] for row in rows]
    table = Table(f"The {SHOWN} slowest heads: the largest errors left", columns, cells)
    legend = Text((f"* extrapolated; {BEYOND} N: more than N tokens, as far as this run can predict that head",))
    return Section("", "", (table, legend), only="terminal")


def _cells(head: HeadRecord) -> dict[str, Cell]:
    def tokens(error: float) -> str:
        found = head.curve.tokens_for(error)
        if found.beyond:
            return f"{BEYOND} {found.farthest:,}"
        return "–" if found.n is None else f"{found.n:,}{'*' * found.extrapolated}"

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
        "regime": head.regime and head.regime.value,
        "for 5%": tokens(0.05),
        "for 1%": None if curve.measured else tokens(0.01),
        "effective tokens": None if effective is None else float(f"{effective[-1]:.3g}"),
        "top weight": head.top_weight and float(f"{head.top_weight:.2g}"),
        "sink": head.sink_mass and round(head.sink_mass, 2),
        "Pareto k": head.pareto_k and round(head.pareto_k, 2),
        "horizon": head.horizon and round(head.horizon, 2),
    }


def _rates(run: ProbeRun) -> list[Section]:
    """Section on the accuracy of predicted rates against constant baselines; no section if no rate was measured."""
    skill, about = rate_skills(run.records), summary(run.records)
    predictors = skill["predictors"]
    if not predictors or about["rate"] is None:
        return []
    rate = about["rate"]
    ranked = sorted(predictors, key=lambda name: float(predictors[name]["mean_absolute_miss"]))
    best = next(name for name in ranked if name != "rate_best_constant")  # which is fitted to measured rates
    miss, constant = (short(predictors[name]["mean_absolute_miss"]) for name in (best, "rate_constant"))
    baseline = "no formula is better" if best == "rate_constant" else f"the constant 1/2 is off by {constant}"
    lines = [
        f"Rates range from {rate['smallest']:.2f} to {rate['largest']:.2f}, median {rate['median']:.2f}.",
        f"The best predictor here is {PREDICTOR_NAMES[best]}, off by {miss} on average; {baseline}.",
    ]
    if (correlation := skill["rank_correlation_score_std"]) is not None:
        lines.append(f"The rank correlation of rates with the score spread is {correlation:.2f}.")
    columns = ("predicted rate", "status here", "mean absolute error", "rank correlation", "heads at least as fast")
    rows = []
    for name in ranked:
        status, miss, rank, fast = (predictors[name][key] for key in SKILL)
        rows.append((PREDICTOR_NAMES[name], status, miss, rank, f"{fast:.0%}"))
    table = Table("accuracy of predicted rates of the output error", columns, rows)
    lead = (
        "One point per head; theory's rates for Gaussian tokens are drawn as lines. Click a point to choose its head."
    )
    return [Section("Does theory predict the rates?", lead, (Widget("rates"), Text(lines), table), "rates-section")]


def subtitle(run: ProbeRun) -> str:
    """Subtitle of the page: heads, tokens, sizes, replicates, queries and seconds of the run in one line."""
    heads, layers = plural(len(run.records), "head"), plural(len({head.layer for head in run.records}), "layer")
    tokens = f"{run.tokens:,} pooled tokens in windows of {run.window:,}"
    source, seconds = "no replicates", f"{run.seconds['total']:.1f} s"
    if run.measured:
        fewer = "" if run.replicates == run.replicates_asked else " (the pool holds no more)"
        source = f"{run.replicates} replicates{fewer}"
        seconds = f"{run.seconds['model']:.1f} s in the model, {run.seconds['attention']:.1f} s in attention"
    parts = [
        run.model_note, f"{heads} in {layers}", tokens if run.measured else f"predicted from a pilot of {tokens}",
        f"n from {run.n[0]:,} to {run.n[-1]:,}", source, f"{run.queries} queries per head",
        None if run.score_scale == 1 else f"scores times {run.score_scale:g}", f"{seconds}, on {run.device}",
    ]  # fmt: skip
    return " · ".join(part for part in parts if part)


def verdict(run: ProbeRun) -> tuple[str, str, str]:
    """Three sentences at the top of the page: what the run did, what it found, and what to do."""
    heads = plural(len(run.records), "attention head")
    if run.measured:
        done = (
            f"All {heads} of {run.model} attended to n tokens of {run.corpus}, n from {run.n[0]:,} to {run.n[-1]:,}, "
            f"and their outputs were compared with attention to all {run.tokens:,} tokens."
        )
    else:
        done = (
            f"The errors of {heads} of {run.model} were predicted, not measured: from the exact law of samples of "
            f"{run.tokens:,} tokens of {run.corpus}, with {run.queries} queries per head."
        )
    return done, _found(run), _do(run)


def _found(run: ProbeRun) -> str:
    """Sentence on the findings of a run: heads by regime, median error at the largest n, and rates of the error."""
    verbs = {Regime.AVERAGING: "average over many tokens", Regime.SELECTIVE: "select a few"}
    verbs[Regime.FROZEN] = "have frozen onto one"
    parts = []
    if regimes := count_regimes(run.records):
        parts.append(f"of the heads, {join([f'{count:,} {verbs[regime]}' for regime, count in regimes.items()])}")
    if errors := [head.curve.error[-1] for head in run.records if np.isfinite(head.curve.error[-1])]:
        parts.append(f"with {run.n[-1]:,} tokens the median head is still {median(errors):.0%} away from its limit")
    if rated := [(head.curve.rate.slope, head) for head in run.records if head.curve.rate is not None]:
        slope, slowest = min(rated, key=lambda pair: pair[0])
        end = f"in the slowest head ({slowest.name}) like {falling(slope)}"
        if rising := plural(sum(rate < 0 for rate, _ in rated), "head") if slope < 0 else "":
            end = f"in {rising} it still grows (most in {slowest.name}), because more tokens dilute their sink"
        middle = falling(median(rate for rate, _ in rated))
        parts.append(f"its error falls like {middle}, where plain averaging would give n⁻⁰·⁵⁰, and {end}")
    if not parts:
        return "No head has an output that differs from zero: there are no relative errors."
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _do(run: ProbeRun) -> str:
    """Sentence on what to do: share of keys to keep for a target error, and advice for selective and frozen heads."""
    context, found = run.budget_context, count_regimes(run.records)
    tight, loose = (kept_share(run.records, error, context) for error in (TIGHT, LOOSE))
    if run.causal:
        lead, kept = f"In a context of {context:,} tokens, random KV eviction", "entries"
    else:
        lead, kept = f"In its window of {context:,} tokens, attending to random keys", "keys"
    shares = f"at {TIGHT:.0%} error per head keeps {tight:.0%} of the {kept}, at {LOOSE:.0%} it keeps {loose:.0%}"
    parts = [f"{lead} {shares}, if each head gets its own budget"]
    if few := found.get(Regime.SELECTIVE):
        parts.append(f"for the {plural(few, 'selective head')} keep the keys with the largest weights, not random ones")
    if frozen := found.get(Regime.FROZEN):
        parts.append(f"for the {plural(frozen, 'frozen head')} never evict the sink or the largest keys")
    if not run.measured:
        parts.append("run `limitlens probe` to measure what must be certain, or raise --tokens to narrow the intervals")
    return "; ".join(parts) + "."


def trust(run: ProbeRun) -> list[str]:
    """Sentences on what limits the accuracy of the run's numbers, such as rounding errors, few tokens and poor fits."""
    positions = (
        f"Tokens come from windows of {run.window:,} tokens: n pooled tokens are not a context of n tokens, whose "
        "later positions only longer windows contain."
    )
    if not run.measured:
        return [
            "Nothing was measured. The intervals cover the choice of queries and windows of the pilot: in tests they "
            "held 90 to 98% of the errors that probes of minilm measured, and 74 to 88% of those of smollm2 "
            "(docs/predict.md).",
            "A pilot that contains no heavy token cannot predict its effect: errors beyond "
            f"n = {run.tokens:,} are extrapolated and may be too small.",
            positions,
        ]
    heads, notes = run.records, []
    if known := [value for head in heads for value in head.curve.error if np.isfinite(value)]:
        times = f", {short(min(known) / run.floor)} times below the smallest error measured" if run.floor else ""
        notes.append(f"Numerical floor: {short(run.floor)} in relative error ({run.kernel}){times}.")
    if bound := sum(head.error_is_lower_bound for head in heads):
        notes.append(
            f"{bound:,} of {len(heads):,} heads: the reference sample is too small, so their errors are mostly lower "
            "bounds. Raise --tokens."
        )
    if misfit := sum(head.curve.rate is not None and head.curve.rate.misfit > MISFIT for head in heads):
        follows = f"{plural(misfit, 'head')} follow{'s' if misfit == 1 else ''}"
        notes.append(f"{follows} neither a power of n nor of ln n at these sizes; use the curve, not the rate.")
    like = (Verdict.SUB_GAUSSIAN, Verdict.CANNOT_TELL)
    if unlike := [str(layer.layer) for layer in run.layer_records if layer.verdict not in like]:
        every = len(unlike) == len(run.layer_records)
        where = "every layer" if every else f"{'layer' if len(unlike) == 1 else 'layers'} {join(unlike)}"
        notes.append(
            f"The tokens of {where} are heavier than Gaussian in the sense of the theorems: proved rates hold there "
            "only with a larger variance proxy, if at all, and predicted ones are approximate."
        )
    if run.score_scale != 1:
        notes.append(
            f"Every score was multiplied by {run.score_scale:g} for the measurement; the model's own forward was left "
            "as it is, so queries, keys and values are those of the model itself."
        )
    if sliding := sorted({head.sliding_window for head in heads if head.sliding_window}):
        sizes = join([f"{size:,}" for size in sliding])
        notes.append(f"Layers with a sliding window attend to at most {sizes} tokens, whatever n their curves reach.")
    notes.append(positions)
    return [*notes, "The run was interrupted: its sizes are those reached by then."] if run.interrupted else notes
