"""What a probe found, in plain sentences: what was measured, which heads matter, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from limitlens.budgets.head_plan import plan_head, shared_plans
from limitlens.heads.advice import HEAVY_TAIL
from limitlens.heads.regimes import Regime
from limitlens.report.parts import falling, join, plural, short

CONTEXT = 32_768  # tokens of the context that the verdict speaks of
TIGHT, LOOSE = 0.05, 0.2  # relative errors that it speaks of
DOES = {"averaging": "averages over many tokens", "selective": "selects a few", "frozen": "has frozen onto one"}
DO = {"averaging": "average over many tokens", "selective": "select a few", "frozen": "have frozen onto one"}


@dataclass(frozen=True)
class Notable:
    """A head worth looking at first, and why."""

    layer: int
    head: int
    why: str


def counts(result: Mapping[str, Any]) -> dict[str, int]:
    """Heads of each regime, averaging first."""
    regimes = [head["regime"] for head in result["heads"]]
    return {regime.value: regimes.count(regime.value) for regime in Regime}


def verdict(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """What was measured, what it found, what to do: one sentence each."""
    heads = result["heads"]
    sizes = heads[0]["n"]
    layers = len({head["layer"] for head in heads})
    measured = (
        f"All {plural(len(heads), 'attention head')} of {result['model']} ({plural(layers, 'layer')}) attended to n "
        "tokens "
        f"of {result['corpus']}, n from {sizes[0]:,} to {sizes[-1]:,}, and were compared with themselves attending "
        "to all "
        f"{result['tokens']:,} tokens."
    )
    return measured, _found(heads, sizes), _advice(heads)


def _found(heads: list[Mapping[str, Any]], sizes: list[int]) -> str:
    found = {name: count for name, count in counts({"heads": heads}).items() if count}
    said = join([f"{count:,} {(DOES if count == 1 else DO)[name]}" for name, count in found.items()])
    errors = [head["relative_output_error"][-1] for head in heads if head["relative_output_error"][-1] is not None]
    rated = [head for head in heads if head.get("rate")]
    parts = [f"Of the heads, {said}"]
    if errors:
        left = median(errors)
        parts.append(f"with {sizes[-1]:,} tokens the middle head is still {left:.0%} away from its limit")
    if rated:
        slopes = [head["rate"]["slope"] for head in rated]
        slowest = min(rated, key=lambda head: float(head["rate"]["slope"]))
        name = f"layer {slowest['layer']}, head {slowest['head']}"
        rising = sum(slope < 0 for slope in slopes)
        if rising:
            end = f"in {plural(rising, 'head')} it still grows (most in {name}), as more tokens dilute their sink"
        else:
            end = f"in the slowest head ({name}) like {falling(slowest['rate']['slope'])}"
        parts.append(
            f"its error falls like {falling(median(slopes))}, where plain averaging would give n⁻⁰·⁵⁰, and {end}"
        )
    return "; ".join(parts) + "."


def _advice(heads: list[Mapping[str, Any]]) -> str:
    found = counts({"heads": heads})
    shares = {error: kept_share(heads, error) for error in (TIGHT, LOOSE)}
    said = (
        f"In a context of {CONTEXT:,} tokens, random KV eviction at {TIGHT:.0%} error per head keeps "
        f"{shares[TIGHT]:.0%} of "
        f"the entries, at {LOOSE:.0%} it keeps {shares[LOOSE]:.0%}"
    )
    parts = [said + ", if each head gets its own budget (below)"]
    if few := found["selective"]:
        parts.append(
            f"for the {plural(few, 'selective head')} keep the keys with the largest weights instead of random ones"
        )
    if frozen := found["frozen"]:
        parts.append(f"for the {plural(frozen, 'frozen head')} never drop the sink or the largest keys")
    return "; ".join(parts) + "."


def kept_share(heads: list[Mapping[str, Any]], error: float, context: int = CONTEXT) -> float:
    """KV entries kept over those there are, when every key/value head keeps what its neediest query head asks for."""
    shared = shared_plans(plan_head({"kv_head": head["head"], **head}, error, context) for head in heads)
    return sum(item.keys or 0 for item in shared) / sum(item.context or context for item in shared)


def notable(result: Mapping[str, Any], most: int = 5) -> list[Notable]:
    """Heads worth looking at first, each for one reason, no head twice."""
    heads = result["heads"]

    def largest(score: Any, why: str) -> tuple[Any, str]:
        known = [(score(head), head) for head in heads if score(head) is not None]
        return (max(known, key=lambda pair: pair[0])[1] if known else None), why

    reasons = (
        largest(lambda h: h["relative_output_error"][-1], "largest error left"),
        largest(lambda h: -h["rate"]["slope"] if h.get("rate") else None, "slowest to converge"),
        largest(lambda h: h.get("top_weight"), "most concentrated"),
        largest(lambda h: h.get("pareto_k"), "heaviest tail of weights"),
        largest(lambda h: h.get("sink_mass"), "strongest sink"),
        largest(lambda h: h["rate"]["slope"] if h.get("rate") else None, "fastest to converge"),
    )
    words: dict[tuple[int, int], list[str]] = {}
    for head, why in reasons:
        if head is not None:
            words.setdefault((head["layer"], head["head"]), []).append(why)
    return [Notable(layer, head, ", ".join(why)) for (layer, head), why in list(words.items())[:most]]


def trust(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    heads = result["heads"]
    said = []
    floor = result.get("floor")
    if isinstance(floor, Mapping):
        floor = floor.get("relative", floor.get("value"))
    if isinstance(floor, (int, float)):
        least = min(value for head in heads for value in head["relative_output_error"] if value is not None)
        said.append(
            f"Numerical floor: {short(floor)} in relative error, {short(least / floor)} times below the smallest "
            "measured."
        )
    heavy = [head for head in heads if (head.get("pareto_k") or 0) > HEAVY_TAIL]
    if heavy:
        said.append(
            f"{plural(len(heavy), 'head')} of {len(heads)} have k̂ above {HEAVY_TAIL}: a few tokens carry their "
            "weights, "
            "so standard errors understate what rare tokens can do."
        )
    bound = sum(bool(head.get("error_is_lower_bound")) for head in heads)
    if bound:
        said.append(
            f"The errors of {plural(bound, 'frozen head')} are lower bounds: the pool itself has not converged there."
        )
    misfit = sum((head.get("rate") or {}).get("misfit", 0) > 4 for head in heads)
    if misfit:
        said.append(
            f"{plural(misfit, 'head')} follow neither a power nor a logarithm on these sizes; read their curve, not "
            "their rate."
        )
    unlike = [layer for layer in result.get("layers") or [] if (layer.get("tails") or {}).get("sub_gaussian") is False]
    if unlike:
        said.append(
            f"In {len(unlike)} of {len(result['layers'])} layers the tokens are not sub-Gaussian in the sense of the "
            "theorems: "
            "predicted rates are guides there, not promises."
        )
    if result.get("window"):
        said.append(
            f"Tokens come from windows of {result['window']:,} tokens: n pooled tokens are not a context of n, whose "
            "positions "
            "only longer windows show."
        )
    if result.get("interrupted"):
        said.append("The run was interrupted: its sizes are those reached by then.")
    return said
