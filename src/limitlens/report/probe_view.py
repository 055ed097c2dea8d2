"""The page of a probe: the map of all heads, the panel of one, rates against theory, budgets and temperatures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from limitlens.heads.regimes import Regime
from limitlens.report.parts import View, paragraph, plural, section, short, table
from limitlens.report.prose import Notable, counts, notable, trust, verdict

COLOURS = {"averaging": "blue", "selective": "green", "frozen": "red"}
BEYOND = "beyond"  # in the place of a number that lies beyond ten times the largest size measured

# What the map may be coloured by: key, label, meaning, logarithmic shades.
QUANTITIES = (
    ("rate", "Rate β of the error", "The error falls like n to the −β: 0.5 is plain averaging, less is slower.", False),
    ("tokens_0.05", "Tokens for 5% error", "n(5%): random tokens that bring the output within 5% of its limit.", True),
    ("regime", "Regime", "Averaging over many tokens, selective among a few, or frozen onto one.", False),
    ("score_std", "Score spread", "Standard deviation of a query's scores over the tokens; large means picky.", False),
    ("pareto_k", "Tail of the weights, k̂", "Below 0.3 is safe; above 0.7 standard errors mean little.", False),
    ("sink_mass", "Mass on the sink", "Share of the attention that the sink or the special tokens take.", False),
    ("error_last", "Error at the largest n", "Relative output error left with the largest sample.", True),
    ("effective_last", "Effective tokens", "How many tokens share the mass at the largest n, 1/Σw².", True),
    ("top_weight", "Largest weight", "Mean over queries of the largest attention weight at the largest n.", False),
    ("entropy", "Entropy", "Of the attention weights at the largest n, in nats.", False),
    ("horizon", "Horizon H", "Two-sided horizon: how far the head's scores reach for tokens of this law.", False),
    ("mean_tilt", "Mean tilt τ₀", "How strongly the average query tilts the tokens.", False),
    ("local_dimension", "Local dimension α", "How fast keys thin out towards a query.", False),
)  # fmt: skip

# What the panel tells of a head beside those: key, label, meaning.
FACTS = (
    ("rate_interval", "Rate, 95% interval", ""),
    ("law", "Law that fits better", "Power or logarithm, by information criterion."),
    ("tokens_0.1", "Tokens for 10%", ""),
    ("tokens_0.05", "Tokens for 5%", ""),
    ("tokens_0.01", "Tokens for 1%", ""),
    ("error_last", "Error at the largest n", ""),
    ("effective_last", "Effective tokens there", ""),
    ("growth", "They grow like n to the", ""),
    ("top_weight", "Largest weight", ""),
    ("entropy", "Entropy (nats)", ""),
    ("pareto_k", "Tail of the weights k̂", "Below 0.3 safe, above 0.7 heavy."),
    ("sink_mass", "Mass on the sink", ""),
    ("sink_dilution", "Tokens that halve the sink", ""),
    ("horizon", "Horizon H", ""),
    ("horizon_one_sided", "Horizon, one-sided", ""),
    ("coupling", "Coupling Ψ", ""),
    ("mean_tilt", "Mean tilt τ₀", ""),
    ("score_std", "Score spread", ""),
    ("local_dimension", "Local dimension α", ""),
    ("rate_sharp", "Sharp rate, moments", ""),
    ("rate_sharp_output", "Sharp rate, output", ""),
    ("kv_head", "Key/value head", ""),
    ("sliding_window", "Sliding window", ""),
)

PREDICTORS = {
    "rate_constant": "the constant ½",
    "rate_sharp": "sharp, moments: min(½, 1/(1+H²))",
    "rate_sharp_output": "sharp, output: min(½, 1/(1+2H²))",
    "rate_rms_output": "sharp, root mean square: min(½, (√(1+4/H²)−1)/4)",
    "rate_drawn": "drawn in the literature: 1/(2(1+H²))",
}


def probe_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Everything a probe has to show."""
    heads = result["heads"]
    n = list(heads[0]["n"])
    columns = head_columns(heads)
    picked = notable(result)
    place = {(head["layer"], head["head"]): index for index, head in enumerate(heads)}
    first = place[picked[0].layer, picked[0].head] if picked else 0
    widest = max(columns["head"]) + 1
    dimensions = sorted(value for value in columns.get("local_dimension", []) if value is not None)
    data: dict[str, Any] = {
        "n": n,
        "farthest": 10 * n[-1],
        "window": result.get("window"),
        "first": first,
        "jitter": 0.7 / widest,
        "heads": columns,
        "quantities": [
            {"key": key, "label": label, "help": meaning, "log": log, "kind": "regime" if key == "regime" else "number"}
            for key, label, meaning, log in QUANTITIES
            if _any(columns, key)
        ],
        "facts": [{"key": key, "label": label, "help": help} for key, label, help in FACTS if _any(columns, key)],
        "remedies": {head["regime"]: head["remedy"] for head in heads if head.get("remedy")},
        "rate_axes": rate_axes(columns, n[-1]),
        "middle_dimension": dimensions[len(dimensions) // 2] if dimensions else None,
        "budget": {"unit": "head", "cache": True, "axis": {"label": "layer", "whole": True}},
    }
    layers = len(set(columns["layer"]))
    replicates = result.get("replicates")
    parts = [
        f"{plural(len(heads), 'head')} in {plural(layers, 'layer')}",
        f"{result['tokens']:,} tokens",
        f"n from {n[0]:,} to {n[-1]:,}",
        *([f"{replicates} replicates"] if replicates else []),
        *([f"windows of {result['window']:,}"] if result.get("window") else []),
    ]
    return View(
        title=f"{result['model']} on {result['corpus']}",
        subtitle=" · ".join(parts),
        verdict=verdict(result),
        below=_regime_bar(counts(result)) + _jumps(picked, place),
        sections=[_map_section(), _rates_section(result, columns), _budget_section(), _schedule_section(result)],
        data=data,
        warnings=list(result.get("warnings") or []),
        trust=trust(result),
    )


def head_columns(heads: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Heads as columns, one list per quantity; a quantity that no head has is left out."""
    rows = [_row(head) for head in heads]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    needed = {"layer", "head", "kv_head", "regime", "rate", "rate_constant", "rate_pooled", "rate_pooled_stderr"}
    return {name: values for name, values in columns.items() if name in needed or _any(columns, name)}


def _row(head: Mapping[str, Any]) -> dict[str, Any]:
    """One head, flat: scalars under their own names, curves as lists."""
    rate, sink, bare = head.get("rate") or {}, head.get("sink") or {}, head.get("without_sink") or {}
    pooled = bare.get("rate") or rate
    curve = head["relative_output_error"]
    whole = all(value is not None for value in curve)
    row: dict[str, Any] = {
        name: head.get(name)
        for name in (
            "layer", "head", "regime", "regime_reason", "horizon", "horizon_one_sided", "coupling", "mean_tilt",
            "score_std", "top_weight", "entropy", "sink_mass", "pareto_k", "local_dimension", "rate_sharp",
            "rate_sharp_output", "sliding_window", "effective_tokens", "hardmax_error", "predicted_error",
        )
    }  # fmt: skip
    interval = rate.get("interval")
    row |= {
        "kv_head": head.get("kv_head", head["head"]),
        "rate": rate.get("slope"),
        "rate_stderr": rate.get("stderr"),
        "rate_interval": None if not interval else f"{interval[0]:.3f} to {interval[1]:.3f}",
        "rate_constant": rate.get("constant"),
        "law": rate.get("law"),
        "rate_pooled": pooled.get("slope"),
        "rate_pooled_stderr": pooled.get("stderr"),
        "rate_predicted": head.get("rate_rms_output", head.get("rate_sharp_output")),
        "error": curve,
        "error_stderr": head["relative_output_error_stderr"],
        "error_last": curve[-1],
        "bare_error": bare.get("relative_output_error"),
        "bare_stderr": bare.get("relative_output_error_stderr"),
        "growth": head.get("effective_tokens_growth"),
        "effective_last": (head.get("effective_tokens") or [None])[-1],
        "lower_bound": head.get("error_is_lower_bound") or None,
        "sink_share": sink.get("share"),
        "sink_dilution": sink.get("dilution_length"),
        "sink_keys": 1 if "first token" in sink.get("kind", "") else None,
        "ordered_weights": _ordered(head.get("ordered_weights")),
    }
    for error, found in (head.get("tokens_for") or {}).items():
        row[f"tokens_{error}"] = found["n"] if found else BEYOND if whole else None
    return row


def _ordered(weights: Any) -> dict[str, Any] | None:
    """Ordered weights as ranks and weights, whether they came with their ranks or as a plain list."""
    if not weights:
        return None
    if isinstance(weights, Mapping):
        return {"rank": weights["rank"], "weight": weights["weight"]}
    return {"rank": list(range(1, len(weights) + 1)), "weight": list(weights)}


def rate_axes(columns: Mapping[str, list[Any]], largest: int) -> list[dict[str, Any]]:
    """What rates can be drawn against, with the boundaries that theory sets there."""
    far = math.sqrt(2 * math.log(largest))
    borders = [
        {"x": far / 2, "label": "√(2 ln n)/2: averaging ends"},
        {"x": far, "label": "√(2 ln n): freezing begins", "row": 1},
    ]
    axes: list[dict[str, Any]] = [
        {
            "key": "horizon", "label": "Horizon", "axis": "horizon H", "lines": True,
            "guides": [{"x": 1.0, "label": "H = 1: sharp rate leaves ½"}],
            "note": "The lines hold for centred Gaussian tokens as n grows; real heads are neither. The proved line "
            "uses "
            "the coupling Ψ at its smallest, H².",
        },
        {
            "key": "score_std", "label": "Score spread", "axis": "score spread τ", "guides": borders,
            "note": f"Boundaries are those of Gaussian scores at n = {largest:,}: below half of √(2 ln n) many "
            "tokens count, "
            "above it a few, beyond √(2 ln n) only the largest.",
        },
        {"key": "mean_tilt", "label": "Mean tilt", "axis": "mean tilt τ₀", "guides": borders, "note": ""},
    ]  # fmt: skip
    return [axis for axis in axes if _any(columns, axis["key"])]


def _any(columns: Mapping[str, list[Any]], key: str) -> bool:
    return any(value is not None for value in columns.get(key, []))


def _regime_bar(found: Mapping[str, int]) -> str:
    bar = "".join(f'<i class="c-{COLOURS[name]}" style="flex:{count}"></i>' for name, count in found.items() if count)
    words = "".join(
        f'<li><i class="swatch fill c-{COLOURS[name]}"></i><b>{count} {name}</b>: '
        f"{escape(Regime.of(name).meaning)}</li>"
        for name, count in found.items()
        if count
    )
    return f'<div class="share" aria-hidden="true">{bar}</div><ul class="meanings">{words}</ul>'


def _jumps(picked: Sequence[Notable], place: Mapping[tuple[int, int], int]) -> str:
    buttons = "".join(
        f'<li><button type="button" class="jump" data-head="{place[item.layer, item.head]}">'
        f"layer {item.layer}, head {item.head}: {escape(item.why)}</button></li>"
        for item in picked
    )
    return f'<ul class="jumps"><li>Look first at</li>{buttons}</ul>' if buttons else ""


def _map_section() -> str:
    return section(
        "Every head at a glance",
        "Each cell is a head. Pick what colours them; click a head, or walk with the arrow keys, to see its curve.",
        """<div class="columns"><div>
<div class="control"><label for="quantity">Colour by</label><select id="quantity"></select></div>
<p class="help" id="quantity-help"></p>
<div class="map-box"><div class="map" id="map" role="grid" aria-label="heads by layer; arrow keys move"></div></div>
<div class="map-legend" id="map-legend"></div><div id="map-data"></div>
</div><div id="panel" aria-label="the chosen head" role="region"></div><dl class="facts" id="facts"></dl></div>""",
        name="heads",
    )


def _rates_section(result: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> str:
    if not (_any(columns, "rate_pooled") and (_any(columns, "horizon") or _any(columns, "score_std"))):
        return ""
    skill = ((result.get("summary") or {}).get("rates") or {}).get("predictors") or {}
    rows = [
        (label, skill[name]["mean_absolute_miss"], skill[name].get("rank_correlation"))
        for name, label in PREDICTORS.items()
        if skill.get(name, {}).get("mean_absolute_miss") is not None
    ]
    rows.sort(key=lambda row: float(row[1]))
    shown = ""
    if rows:
        best, constant = rows[0], next((row[1] for row in rows if row[0] == PREDICTORS["rate_constant"]), None)
        told = f"The best of them here is {best[0]}, off by {short(best[1])} on average"
        if constant is not None and best[1] != constant:
            told += f"; the constant ½, which knows nothing, is off by {short(constant)}"
        elif constant is not None:
            told += ": no formula beats it on these heads"
        shown = paragraph(told + ".") + table(
            "how well rates are predicted", ("predicted rate", "mean miss", "rank correlation"), rows
        )
    return section(
        "Does theory predict the rates?",
        "One point a head; what theory says of Gaussian tokens is drawn as lines. Click a point to choose its head.",
        '<div class="control"><label for="rate-axis">Against</label><select id="rate-axis"></select></div>'
        '<figure id="rates"></figure>',
        shown,
        name="rates-section",
    )


def _budget_section() -> str:
    return section(
        "How many tokens does each head need?",
        "Set the error you can live with and the length of your context. Budgets are for tokens drawn at random, "
        "read off "
        "each head's error curve; outside the sizes measured they follow its power law and are marked.",
        '<div id="budgets"></div>',
        name="budget-section",
    )


def _schedule_section(result: Mapping[str, Any]) -> str:
    if not result.get("window") or result["window"] < 2:
        return ""
    return section(
        "Which temperature keeps a head selective?",
        "Factors on the scores for a longer context, relative to the windows of this run. They are heuristics; a "
        "second "
        "probe at another window length lets `limitlens plan --second` measure the factor of each head.",
        '<div id="schedules"></div>',
        name="schedule-section",
    )
