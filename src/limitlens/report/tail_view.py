"""The pages of hardmax and of heavy tails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitlens.report.parts import Figures, View, line, log_axis, points, section, short, table

SHADES = ("blue", "sky", "green", "orange", "pink", "grey", "red")
TOKENS = log_axis("number of tokens n")


def hardmax_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Hardmax, and softmax on the way to it."""
    figures = Figures()
    hard, curves = result["hardmax"], [*result["softmax"], result["hardmax"]]
    series = []
    for i, curve in enumerate(curves):
        colour = "red" if curve is hard else SHADES[i % (len(SHADES) - 1)]
        series.append(points(curve["label"], curve["n"], curve["measured"], colour, curve["stderr"], joined=True))
        for name, entry in curve["predicted"].items():
            label = f"{curve['label']}: {name} ({entry['status']})"
            series.append({**line(label, curve["n"], entry["value"], colour, "dashed"), "unlisted": curve is not hard})
    drawn = figures.place("E|mean output| against n", TOKENS, log_axis("E|mean output|"), series, height=400)
    rows = [
        (curve["label"], rate["slope"], rate["log_exponent"], rate["law"], abs(rate["evidence"]))
        for curve in curves
        if (rate := curve["rate"]) is not None
    ]
    rate, n = hard["rate"], hard["n"]
    law = (
        "follows no law that a fit can name yet"
        if rate is None
        else f"follows a {'logarithm' if rate['law'] == 'log' else 'power law'}"
    )
    inputs = result["inputs"]
    return View(
        title=f"Hardmax on {inputs['measure']} tokens in dimension {inputs['dim']}",
        subtitle=f"n from {n[0]:,} to {n[-1]:,} · {hard['replicates']} replicates",
        verdict=(
            f"Softmax was replaced by argmax on {inputs['measure']} tokens, and the mean output measured for n from "
            f"{n[0]:,} to "
            f"{n[-1]:,}, beside softmax at {len(result['softmax'])} horizons.",
            f"With argmax the error {law}: {short(hard['measured'][0])} at n = {n[0]:,} and still "
            f"{short(hard['measured'][-1])} at "
            f"n = {n[-1]:,}.",
            "A head that has become an argmax does not improve with more tokens in practice: lower its inverse "
            "temperature, or "
            "keep the tokens that win.",
        ),
        sections=[
            section(
                "From softmax to hardmax",
                "Straight lines are power laws; the hardmax bends into a logarithm. Dashed lines are predicted.",
                drawn,
                table(
                    "laws",
                    ("curve", "rate of the power law", "exponent of the logarithm", "fits better", "evidence"),
                    rows,
                ),
            )
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
    )


def heavy_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Attention over heavy-tailed tokens, beyond the end of its limit."""
    figures, tilts = Figures(), result["tilts"]
    tops, outputs = [], []
    for i, row in enumerate(tilts):
        label, colour = f"t = {short(row['tilt'])}", SHADES[i % len(SHADES)]
        found = row["measured"]
        tops.append(points(label, row["n"], found["top_weight"], colour, found["top_weight_stderr"], joined=True))
        outputs.append(points(label, row["n"], found["median_output"], colour, joined=True))
        if row["limit"] is not None:
            outputs.append(line(f"{label}: limit", row["n"], [row["limit"]] * len(row["n"]), colour, "dotted"))
    weights = figures.place("The largest weight", TOKENS, {"label": "largest weight", "min": 0, "max": 1}, tops)
    median = figures.place("The output", TOKENS, log_axis("median output"), outputs)
    rows = [(row["tilt"], row["existence"], row["limit"], row["meaning"]) for row in tilts]
    lost = [row for row in tilts if row["limit"] is None]
    law, n = tilts[0]["law"], tilts[0]["n"]
    return View(
        title=f"Attention over {law} tokens",
        subtitle=f"{len(tilts)} tilts · n from {n[0]:,} to {n[-1]:,} · {tilts[0]['replicates']} replicates",
        verdict=(
            f"One query of each of {len(tilts)} tilts attended to n {law} tokens, n from {n[0]:,} to {n[-1]:,}.",
            f"At {len(lost)} of {len(tilts)} tilts there is no infinite-token limit: the largest weight does not fade."
            if lost
            else "At every tilt shown the infinite-token limit exists.",
            "Where there is no limit no number of tokens makes the output settle: cap the scores or lower the "
            "temperature.",
        ),
        sections=[
            section(
                "What the weights and the output do",
                "With 95% bars; dotted lines are limits.",
                f'<div class="pair">{weights}{median}</div>',
                table("tilts", ("tilt", "verdict", "limit", "meaning"), rows),
            ),
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
    )
