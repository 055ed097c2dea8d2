"""The page of a plan: how many keys each head keeps, what that gave on unseen text, which temperatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitlens.report.parts import Figures, View, log_axis, plural, section, sentence, short, table

COLOURS = {"averaging": "blue", "selective": "green", "frozen": "red"}


def plan_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Everything a plan has to show."""
    figures, inputs, heads, total = Figures(), result["inputs"], result["heads"], result["total"]
    context = inputs["context"]
    where = "an endless context" if context is None else f"a context of {context:,} tokens"
    known = [head for head in heads if head["keys"]["predicted"] is not None]
    widest = 1 + max(head["head"] for head in heads)
    series = []
    for regime, colour in COLOURS.items():
        own = [head for head in known if head["regime"] == regime]
        if own:
            series.append(
                {
                    "name": regime,
                    "kind": "points",
                    "colour": colour,
                    "x": [head["layer"] + 0.7 * head["head"] / widest for head in own],
                    "y": [head["keys"]["predicted"] for head in own],
                    "labels": [f"layer {h['layer']}, head {h['head']}\n{h['keys']['predicted']:,} keys" for h in own],
                }
            )
    guides = [] if context is None else [{"y": context, "label": "whole context"}]
    drawn = figures.place(
        "Keys each head keeps", {"label": "layer", "whole": True}, log_axis("keys"), series, guides=guides, height=340
    )
    rows = [
        (
            head["layer"],
            head["head"],
            head["regime"],
            head["keys"]["predicted"],
            head["keys"]["interval"][0],
            head["keys"]["interval"][1],
            head["keys"]["ratio"],
            _source(head["keys"]),
        )
        for head in heads
    ]
    columns = ("layer", "head", "regime", "keys", "low", "high", "share of the context", "known from")
    kept = "" if total["ratio"] is None else f" That is {total['ratio']:.0%} of all KV entries ({total['entries']:,})."
    counted = {name: sum(head["regime"] == name for head in heads) for name in COLOURS}
    remedies = {head["regime"]: head["remedy"] for head in heads}
    advice = [f"{plural(counted[name], f'{name} head')}: {remedies[name]}" for name in COLOURS if counted[name]]
    middle = sorted(head["keys"]["predicted"] for head in known)[len(known) // 2] if known else None
    sections = [
        section(
            "Keys each head keeps",
            "One point a head; 95% intervals are in the table.",
            drawn,
            table("plan", columns, rows),
        )
    ]
    if result.get("trial"):
        sections.append(_trial(result["trial"]["summary"], inputs["error"]))
    if result.get("temperature"):
        sections.append(_temperature(result["temperature"]))
    return View(
        title=f"Plan for {inputs['model']}: {inputs['error']:.0%} error",
        subtitle=f"{plural(len(heads), 'head')} · {where} · probed on {inputs['corpus']}",
        verdict=(
            f"From the error curves of {plural(len(heads), 'head')} of {inputs['model']}, this plan reads off how "
            "many random keys "
            f"each must keep for a relative output error of {inputs['error']:.0%} in {where}.",
            (f"Half of the heads make do with {short(middle)} keys." if middle else "No budget is within reach.")
            + kept,
            sentence("; ".join(advice)),
        ),
        sections=sections,
        data={"figures": list(figures)},
        warnings=[],
        trust=list(result.get("notes") or []),
    )


def _source(keys: Mapping[str, Any]) -> str:
    return "beyond" if keys["beyond"] else "extrapolated" if keys["extrapolated"] else "measured"


def _trial(summary: Mapping[str, Any], error: float) -> str:
    rows = [
        (setting, name, found["median"], found["low"], found["high"])
        for setting, ways in summary.items()
        for name, found in ways.items()
    ]
    return section(
        "Does the plan hold on text it has not seen?",
        f"Errors measured on the windows that the probe reserved; {error:.0%} was asked for.",
        table("trial", ("context", "kept keys", "median over heads", "10%", "90%"), rows),
    )


def _temperature(found: Mapping[str, Any]) -> str:
    rows = [
        (head["layer"], head["head"], head["factor"], head["critical"], head["reason"] or "") for head in found["heads"]
    ]
    first, second = found["windows"]
    return section(
        "Temperatures",
        f"Factors on the scores for {found['context']:,} tokens that keep the effective tokens of windows of "
        f"{first:,}, from "
        f"probes at {first:,} and {second:,}; the schedule ln n gives {short(found['log'])}, YaRN "
        f"{short(found['yarn'])}. Heuristic.",
        table("temperatures", ("layer", "head", "factor", "critical", "note"), rows),
    )
