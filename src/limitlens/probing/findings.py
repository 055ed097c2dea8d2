"""Findings of a probe or a prediction as sentences: what was done, which heads matter, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.probing.record import HeadRecord, kept_share
from limitlens.probing.regimes import Regime
from limitlens.report.text import falling, join, plural, short
from limitlens.statistics.tails import Verdict

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

CONTEXT = 32_768  # tokens of the context for which budgets of a causal model are given; an encoder has its window
TIGHT, LOOSE = 0.05, 0.2  # relative errors that "What to do" names
MISFIT = 4.0  # χ² per degree of freedom from which on no law fits


def context_of(run: ProbeRun) -> int:
    """The context for which budgets are given."""
    return CONTEXT if run.causal else run.window


def rises(head: HeadRecord) -> bool:
    """Whether its error grows with n, as it does where more tokens dilute a sink."""
    rate, error = head.curve.rate, head.curve.error
    return bool(error[-1] > error[0]) if rate is None else rate.slope < 0


def slowest(run: ProbeRun) -> list[HeadRecord]:
    """The heads, those with the largest error at the largest n first and those without one last."""
    return sorted(run.records, key=lambda head: -head.curve.error[-1] if head.curve.defined else np.inf)


def fastest(run: ProbeRun) -> list[HeadRecord]:
    """Heads whose error falls with n, the smallest error at the largest n first."""
    return [head for head in reversed(slowest(run)) if head.curve.defined and not rises(head)]


def counts(heads: Iterable[Any]) -> dict[Regime, int]:
    """Number of heads in each regime that occurs, averaging first."""
    found = Counter(head.regime for head in heads)
    return {regime: found[regime] for regime in Regime if regime in found}


def subtitle(run: ProbeRun) -> str:
    """Size and cost of the run in one line."""
    heads, layers = plural(len(run.records), "head"), plural(len({head.layer for head in run.records}), "layer")
    sizes = f"n from {run.n[0]:,} to {run.n[-1]:,}"
    if run.measured:
        fewer = "" if run.replicates == run.replicates_asked else " (the pool holds no more)"
        tokens = f"{run.tokens:,} pooled tokens in windows of {run.window:,}"
        source = f"{run.replicates} replicates{fewer}"
        cost = f"{run.seconds['model']:.1f} s in the model, {run.seconds['attention']:.1f} s in attention"
    else:
        tokens = f"predicted from a pilot of {run.tokens:,} tokens in windows of {run.window:,}"
        source = "no replicates"
        cost = f"{run.seconds['total']:.1f} s"
    scaled = [] if run.score_scale == 1 else [f"scores times {run.score_scale:g}"]
    note = [run.model_note] if run.model_note else []
    queries = f"{run.queries} queries per head"
    return " · ".join(
        [*note, f"{heads} in {layers}", tokens, sizes, source, queries, *scaled, f"{cost}, on {run.device}"]
    )


def verdict(run: ProbeRun) -> tuple[str, str, str]:
    """What was done, what it found, what to do: one sentence each."""
    heads, layers = len(run.records), plural(len({head.layer for head in run.records}), "layer")
    if run.measured:
        done = (
            f"All {plural(heads, 'attention head')} of {run.model} ({layers}) attended to n tokens of {run.corpus}, n "
            f"from {run.n[0]:,} to {run.n[-1]:,}, and their outputs were compared with attention to all "
            f"{run.tokens:,} tokens."
        )
    else:
        done = (
            f"The errors of {plural(heads, 'attention head')} of {run.model} ({layers}) were predicted, not measured: "
            f"from the exact law of samples of {run.tokens:,} tokens of {run.corpus}, with {run.queries} queries per "
            "head."
        )
    return done, _found(run), _do(run)


def _found(run: ProbeRun) -> str:
    verbs = {
        Regime.AVERAGING: ("averages over many tokens", "average over many tokens"),
        Regime.SELECTIVE: ("selects a few", "select a few"),
        Regime.FROZEN: ("has frozen onto one", "have frozen onto one"),
    }
    parts = []
    if regimes := counts(run.records):
        said = [f"{count:,} {verbs[regime][count > 1]}" for regime, count in regimes.items()]
        parts.append(f"of the heads, {join(said)}")
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
    context, found = context_of(run), counts(run.records)
    tight, loose = (kept_share(run.records, error, context) for error in (TIGHT, LOOSE))
    if run.causal:
        lead, kept = f"In a context of {context:,} tokens, random KV eviction", "entries"
    else:
        lead, kept = f"In its window of {context:,} tokens, attending to random keys", "keys"
    shares = f"at {TIGHT:.0%} error per head keeps {tight:.0%} of the {kept}, at {LOOSE:.0%} it keeps {loose:.0%}"
    parts = [f"{lead} {shares}, if each head gets its own budget"]
    if selective := found.get(Regime.SELECTIVE):
        heads = plural(selective, "selective head")
        parts.append(f"for the {heads} keep the keys with the largest weights instead of random ones")
    if frozen := found.get(Regime.FROZEN):
        parts.append(f"for the {plural(frozen, 'frozen head')} never evict the sink or the largest keys")
    if not run.measured:
        parts.append("run `limitlens probe` to measure what must be certain, or raise --tokens to narrow the intervals")
    return "; ".join(parts) + "."


def notable(run: ProbeRun, most: int = 5) -> list[tuple[HeadRecord, str]]:
    """Heads worth looking at first, each with the reason, no head twice."""
    reasons: tuple[tuple[str, Callable[[HeadRecord], float | None]], ...] = (
        ("largest error left", lambda head: head.curve.error[-1] if head.curve.defined else None),
        ("slowest to converge", lambda head: -head.curve.rate.slope if head.curve.rate else None),
        ("most concentrated", lambda head: head.top_weight),
        ("heaviest tail of weights", lambda head: head.pareto_k),
        ("strongest sink", lambda head: head.sink_mass),
        ("fastest to converge", lambda head: head.curve.rate.slope if head.curve.rate and not rises(head) else None),
    )
    words: dict[tuple[int, int], tuple[HeadRecord, list[str]]] = {}
    for why, score in reasons:
        if known := [(value, head) for head in run.records if (value := score(head)) is not None]:
            _, head = max(known, key=lambda pair: pair[0])
            words.setdefault(head.place, (head, []))[1].append(why)
    return [(head, ", ".join(why)) for head, why in list(words.values())[:most]]


def advice(run: ProbeRun) -> list[str]:
    """Meaning and remedy of each regime, and what to know about sinks and sliding windows, one line each."""
    heads = run.records
    lines = [
        f"{count} of {len(heads)} heads {'is' if count == 1 else 'are'} {regime.value}: {regime.meaning}; "
        f"{regime.remedy}."
        for regime, count in counts(heads).items()
    ]
    if parked := sum(head.sink is not None and head.sink.share_in_window > 0.5 for head in heads):
        gives = f"{plural(parked, 'head')} give{'s' if parked == 1 else ''}"
        lines.append(f"{gives} more than half of the attention mass in a window to the sink: never evict it.")
    if sliding := sorted({head.sliding_window for head in heads if head.sliding_window}):
        sizes = join([f"{size:,}" for size in sliding])
        lines.append(f"Layers with a sliding window attend to at most {sizes} tokens, whatever n their curves reach.")
    plan = "`limitlens plan` (in Python `ll.plan`) gives the KV entries of every head for an error or a total."
    return [*lines, plan]


def trust(run: ProbeRun) -> list[str]:
    """What limits the accuracy of the numbers, one sentence each."""
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
    notes.append(positions)
    return [*notes, "The run was interrupted: its sizes are those reached by then."] if run.interrupted else notes
