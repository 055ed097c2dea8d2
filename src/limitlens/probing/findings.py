"""What a probe found, in plain sentences (`words.json`): what was measured, which heads matter, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.probing.record import HeadRecord, kept_share
from limitlens.probing.regimes import Regime
from limitlens.report.words import falling, join, plural, read_words, short
from limitlens.statistics.tails import Verdict

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

CONTEXT = 32_768  # tokens of the context that the verdict on a causal model speaks of; an encoder has its window
TIGHT, LOOSE = 0.05, 0.2  # relative errors that it speaks of
MISFIT = 4.0  # χ² per degree of freedom from which on no law fits
WORDS = read_words("probing/words.json")


@dataclass(frozen=True)
class Notable:
    """A head worth looking at first, and why."""

    head: HeadRecord
    why: str


def rises(head: HeadRecord) -> bool:
    """Whether its error grows with n, as it does where more tokens dilute a sink."""
    rate, error = head.curve.rate, head.curve.error
    return bool(error[-1] > error[0]) if rate is None else rate.slope < 0


def slowest(run: ProbeRun) -> list[HeadRecord]:
    """The heads, those with the largest error at the largest n first and those without one last."""
    return sorted(run.records, key=lambda head: -head.curve.error[-1] if head.curve.defined else np.inf)


def fastest(run: ProbeRun) -> list[HeadRecord]:
    """Those whose error falls with n, the smallest error at the largest n first."""
    return [head for head in reversed(slowest(run)) if head.curve.defined and not rises(head)]


def counts(heads: Iterable[Any]) -> dict[Regime, int]:
    """Heads of each regime that there are any of, averaging first."""
    found = Counter(head.regime for head in heads)
    return {regime: found[regime] for regime in Regime if regime in found}


def measured(run: ProbeRun) -> str:
    """What was measured, and how much of it, in a row."""
    fewer = "" if run.replicates == run.replicates_asked else " (the pool holds no more)"
    scaled = "" if run.score_scale == 1 else f" · scores times {run.score_scale:g}"
    said = _say("measured", fewer=fewer, scaled=scaled, **_known(run))
    return f"{run.model_note} · {said}" if run.model_note else said


def verdict(run: ProbeRun) -> tuple[str, str, str]:
    """What was measured, what it found, what to do: one sentence each."""
    return _say("read", **_known(run)), _found(run), _do(run)


def _known(run: ProbeRun) -> dict[str, Any]:
    """What the sentences on the whole run may name."""
    heads, layers = len(run.records), plural(len({head.layer for head in run.records}), "layer")
    counted = {"heads": plural(heads, "head"), "attention_heads": plural(heads, "attention head"), "layers": layers}
    return {**vars(run), **counted, "low": run.n[0], "high": run.n[-1]}


def _found(run: ProbeRun) -> str:
    parts = [f"Of the heads, {join([_say(regime.value, count) for regime, count in counts(run.records).items()])}"]
    if errors := [head.curve.error[-1] for head in run.records if np.isfinite(head.curve.error[-1])]:
        parts.append(f"with {run.n[-1]:,} tokens the middle head is still {median(errors):.0%} away from its limit")
    if rated := [(head.curve.rate.slope, head) for head in run.records if head.curve.rate is not None]:
        slope, slowest = min(rated, key=lambda pair: pair[0])
        end = f"in the slowest head ({slowest.name}) like {falling(slope)}"
        if rising := plural(sum(rate < 0 for rate, _ in rated), "head") if slope < 0 else "":
            end = f"in {rising} it still grows (most in {slowest.name}), as more tokens dilute their sink"
        middle = falling(median(rate for rate, _ in rated))
        parts.append(f"its error falls like {middle}, where plain averaging would give n⁻⁰·⁵⁰, and {end}")
    return "; ".join(parts) + "."


def _do(run: ProbeRun) -> str:
    context, found = CONTEXT if run.causal else run.window, counts(run.records)
    tight, loose = (kept_share(run.records, error, context) for error in (TIGHT, LOOSE))
    said = f"at {TIGHT:.0%} error per head keeps {tight:.0%} of the {{}}, at {LOOSE:.0%} it keeps {loose:.0%}"
    if run.causal:
        lead = f"In a context of {context:,} tokens, random KV eviction {said.format('entries')}"
    else:
        lead = f"In its window of {context:,} tokens, attending to random keys {said.format('keys')}"
    parts = [f"{lead}, if each head gets its own budget"]
    parts += [_say(f"do {regime.value}", count) for regime, count in found.items() if regime is not Regime.AVERAGING]
    return "; ".join(parts) + "."


def _say(what: str, count: int = 0, **known: Any) -> str:
    """What is said of so many heads."""
    one = count == 1
    grammar = {"s": "" if one else "s", "verb": "s" if one else "", "have": "has" if one else "have"}
    return str(WORDS["said"][what].format(count=count, **grammar, **known))


def notable(run: ProbeRun, most: int = 5) -> list[Notable]:
    """Heads worth looking at first, each for one reason, no head twice."""
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
    return [Notable(head, ", ".join(why)) for head, why in list(words.values())[:most]]


def advice(run: ProbeRun) -> list[str]:
    """What each kind of head is and wants, one line each."""
    heads = run.records
    lines = [
        f"{count} of {len(heads)} heads {'is' if count == 1 else 'are'} {regime.value}: {regime.meaning}; "
        f"{regime.remedy}."
        for regime, count in counts(heads).items()
    ]
    if parked := sum(head.sink is not None and head.sink.share_in_window > 0.5 for head in heads):
        lines.append(_say("parked", parked))
    if sliding := sorted({head.sliding_window for head in heads if head.sliding_window}):
        lines.append(_say("sliding", sizes=join([f"{size:,}" for size in sliding])))
    return [*lines, _say("plan")]


def trust(run: ProbeRun) -> list[str]:
    """What a reader must know before believing the numbers."""
    heads, said = run.records, []
    if known := [value for head in heads for value in head.curve.error if np.isfinite(value)]:
        times = f", {short(min(known) / run.floor)} times below the smallest measured" if run.floor else ""
        said.append(f"Numerical floor: {short(run.floor)} in relative error ({run.kernel}){times}.")
    found = {
        "bound": sum(head.error_is_lower_bound for head in heads),
        "misfit": sum(head.curve.rate is not None and head.curve.rate.misfit > MISFIT for head in heads),
    }
    said += [_say(what, count, all=len(heads)) for what, count in found.items() if count]
    like = (Verdict.SUB_GAUSSIAN, Verdict.CANNOT_TELL)
    if unlike := [str(layer.layer) for layer in run.layer_records if layer.verdict not in like]:
        every = len(unlike) == len(run.layer_records)
        where = "every layer" if every else f"{'layer' if len(unlike) == 1 else 'layers'} {join(unlike)}"
        said.append(_say("unlike", where=where))
    if run.score_scale != 1:
        said.append(_say("factor", factor=run.score_scale))
    said.append(_say("positions", window=run.window))
    return [*said, _say("interrupted")] if run.interrupted else said
