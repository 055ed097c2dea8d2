"""A plan in words: what it costs, what the trial gave, which temperatures, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from limitlens.heads.regimes import Regime

if TYPE_CHECKING:
    from limitlens.budgets.plan import Plan

WAYS = {
    "random": "random keys",
    "unweighted": "random keys, the sink not balanced",
    "recent": "first tokens and the nearest",
    "top": "largest weights (oracle)",
}
SETTINGS = {"pool": "pooled tokens", "window": "a real window"}


def headline(plan: Plan) -> list[str]:
    """What was asked, and what the KV cache would shrink to."""
    total = plan.total
    where = "an endless context" if plan.context is None else f"a context of {plan.context:,} tokens"
    lines = [f"{plan.run['model']} on {plan.run['corpus']}: relative output error {plan.error:g} per head in {where}"]
    if total["ratio"] is not None:
        lines.append(
            f"KV entries: {total['entries']:,} of {total['entries_without_plan']:,} "
            f"({total['ratio']:.1%}) over {total['key_value_heads']} key/value heads"
        )
    return lines


def trial_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """For each setting and way of choosing keys: what it is, the median error over heads, and its spread."""
    rows = []
    for setting, ways in plan.trial_summary().items():
        tokens = next(trial.context for trial in plan.trials if trial.setting == setting)
        rows += [
            (
                f"{WAYS[name]}, {SETTINGS[setting]} of {tokens:,}",
                f"{found['median']:.3g}",
                f"{found['low']:.3g} to {found['high']:.3g}",
            )
            for name, found in ways.items()
        ]
    return rows


def temperature_line(plan: Plan) -> str | None:
    """The factors on the scores, where they are known."""
    heated = plan.temperatures
    if heated is None:
        return None
    factors = [head.factor for head in heated.heads if head.factor is not None]
    found = "none could be given"
    if factors:
        low, median, high = np.quantile(factors, (0.1, 0.5, 0.9))
        found = f"{median:.3g} in the median over heads ({low:.3g} to {high:.3g})"
    status = "heuristic, extrapolated" if heated.extrapolated else "heuristic"
    return (
        f"factor on the scores from {heated.first:,} to {heated.context:,} tokens that keeps the effective tokens: "
        f"{found}; log n {heated.log:.3g}, YaRN {heated.yarn:.3g} ({status})"
    )


def advice(plan: Plan) -> list[str]:
    """What to do with the heads of each regime, and what to know before doing it."""
    counts = {regime: sum(head.regime is regime for head in plan.heads) for regime in Regime}
    lines = [
        f"{count} of {len(plan.heads)} heads are {regime.value}: {regime.remedy}"
        for regime, count in counts.items()
        if count
    ]
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def summary(plan: Plan) -> list[str]:
    """Everything above, one line each."""
    trial = [
        f"tried with {what}: error {median} in the median over heads ({spread})"
        for what, median, spread in trial_rows(plan)
    ]
    heated = temperature_line(plan)
    return [*headline(plan), *trial, *([heated] if heated else []), *advice(plan)]
