"""The pages of synthetic studies: one study, a sweep of the horizon, a sweep of the radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from limitlens.curves.crossing import LINE_SIZES
from limitlens.curves.fit import DECIDES, verdict
from limitlens.report.parts import Figures, View, falling, join, line, log_axis, points, section, short, table
from limitlens.theory import rates

NAMES = {"mean": "mean", "covariance": "covariance", "output": "output", "uniform": "uniform"}
COLOURS = {"mean": "blue", "covariance": "orange", "output": "green", "uniform": "pink"}
SHARP = {"mean": "rate_sharp", "covariance": "rate_sharp", "output": "rate_rms_output"}
TOKENS = log_axis("number of tokens n")
MEANING = {
    "mean": "of the mean of the outputs",
    "covariance": "of their covariance",
    "output": "of the output, root mean square over queries",
    "uniform": "largest over a ball of queries",
}


def study_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """One study: its error curves and rates, against theory."""
    figures = Figures()
    theory, names = result["theory"], [name for name in NAMES if name in result["errors"]]
    shown = _curves(figures, result, names)
    slopes = _slopes(figures, result, names)
    rows: list[tuple[Any, ...]] = []
    for name in names:
        rate = result["rates"].get(name)
        if rate is None:
            rows.append((name, "too few sizes", None, None, None, ""))
            continue
        low, high = rate["interval"]
        sharp = theory.get(SHARP.get(name, ""), 0.5)
        rows.append(
            (
                name,
                MEANING[name],
                rate["slope"],
                f"{low:.3f} to {high:.3f}",
                sharp,
                verdict(rate["law"], rate["evidence"]),
            )
        )
    columns = ("error", "what it is", "fitted rate", "95% interval", "sharp rate", "law")
    horizon = theory["horizon"]
    sections = [
        section(
            "Error against the number of tokens",
            "Points are measured, with 95% bars; lines are fitted power laws; dotted lines are what theory predicts at "
            "finite n.",
            shown,
            table("rates", columns, rows),
        ),
        section(
            "Has the rate settled?",
            "Slopes between neighbouring sizes. Where they still move, the fitted rate is not yet the asymptotic one.",
            slopes,
        ),
        _budget_section(),
    ]
    return View(
        title=f"{result['measure']}, horizon {short(horizon)}",
        subtitle=f"{result['replicates'][0]} replicates · {result['queries']} queries · n from {result['n'][0]:,} to "
        f"{result['n'][-1]:,} · on {result.get('device', 'cpu')}",
        verdict=(
            f"Attention over n tokens of {result['measure']} was compared with its exact infinite-token limit, n from "
            f"{result['n'][0]:,} to {result['n'][-1]:,}, {result['replicates'][0]} times over.",
            _found(result, names),
            _tokens(result),
        ),
        sections=sections,
        data={"figures": list(figures), "n": result["n"], "budget": _budget([result], ["this study"], [1.0], "study")},
        warnings=list(result.get("warnings") or []),
        trust=_trust(result),
    )


def horizons_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """A sweep of the horizon: rates over theory's lines."""
    figures = Figures()
    studies, horizons = result["studies"], result["horizons"][: len(result["studies"])]
    fine = [float(h) for h in np.geomspace(min(horizons), max(horizons), 80)]
    lines = [
        line("sharp, moments: min(½, 1/(1+H²)), verified", fine, [rates.rate_sharp(h) for h in fine], "ink"),
        line(
            "sharp, output (rms): min(½, (√(1+4/H²)−1)/4), verified",
            fine,
            [rates.rate_rms_output(h) for h in fine],
            "ink",
            "dashed",
        ),
        line("drawn: 1/(2(1+H²))", fine, [rates.rate_drawn(h) for h in fine], "orange", "dotted"),
    ]
    for name in ("mean", "covariance", "output"):
        found = [(h, s["rates"][name]) for h, s in zip(horizons, studies, strict=True) if s["rates"].get(name)]
        if found:
            x, y, bar = zip(*((h, rate["slope"], rate["stderr"]) for h, rate in found), strict=True)
            lines.append(points(f"{name}, measured", x, y, COLOURS[name], bar))
    drawn = figures.place(
        "Fitted rates over the horizon",
        log_axis("horizon H"),
        {"label": "rate β: error falls like n to the −β", "min": 0},
        lines,
        height=380,
        guides=[{"y": 0.5, "label": "½: plain averaging"}],
    )
    shades = ("blue", "sky", "green", "orange", "red", "pink", "grey")
    curves = figures.place(
        "Output error of every horizon",
        TOKENS,
        log_axis("output error"),
        [
            points(
                f"H = {short(h)}",
                s["n"],
                s["errors"]["output"]["value"],
                shades[i % len(shades)],
                s["errors"]["output"]["stderr"],
                joined=True,
            )
            for i, (h, s) in enumerate(zip(horizons, studies, strict=True))
        ],
        height=340,
    )
    rows = [
        (
            h,
            *((s["rates"].get(name) or {}).get("slope") for name in ("mean", "covariance", "output")),
            *(s["theory"][key] for key in ("rate_sharp", "rate_rms_output", "rate_drawn")),
        )
        for h, s in zip(horizons, studies, strict=True)
    ]
    columns = ("H", "mean", "covariance", "output", "sharp, moments", "sharp, output (rms)", "1/(2(1+H²))")
    misses = [abs(s["rates"]["mean"]["slope"] - s["theory"]["rate_sharp"]) for s in studies if s["rates"].get("mean")]
    told = (
        f"The rate of the mean falls from {short(rows[0][1])} at H = {short(rows[0][0])} to {short(rows[-1][1])} at "
        f"H = {short(rows[-1][0])}, and stays within {short(max(misses))} of the sharp exponent min(½, 1/(1+H²))."
        if misses
        else "There are too few sizes to fit a rate."
    )
    sizes = studies[0]["n"]
    return View(
        title=f"{studies[0]['measure']}, horizons {short(min(horizons))} to {short(max(horizons))}",
        subtitle=f"{len(horizons)} horizons · {studies[0]['replicates'][0]} replicates · n from {sizes[0]:,} to "
        f"{sizes[-1]:,}",
        verdict=(
            f"Attention over n tokens of {studies[0]['measure']} was compared with its exact limit for "
            f"{len(horizons)} heads "
            f"of growing horizon, n from {sizes[0]:,} to {sizes[-1]:,}.",
            told,
            "Plan with the curve of the horizon that your head has (sliders below), not with n⁻⁰·⁵⁰: past H = 1 "
            "every further "
            "digit costs many more tokens.",
        ),
        sections=[
            section(
                "Rates over the horizon",
                "One point per horizon, with its 95% bar.",
                drawn,
                table("rates", columns, rows),
            ),
            section("The curves behind them", "Root mean square output error, with 95% bars.", curves),
            _budget_section(),
        ],
        data={
            "figures": list(figures),
            "n": sizes,
            "budget": _budget(studies, [f"H = {short(h)}" for h in horizons], horizons, "horizon"),
        },
        warnings=list(dict.fromkeys(warning for s in studies for warning in s.get("warnings") or [])),
        trust=_trust(studies[-1]),
    )


def radii_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """A sweep of the radius: how the constants of the uniform and moment errors grow."""
    figures = Figures()
    radii, studies = result["radii"], result["studies"]
    drawn = figures.place(
        "Constants against the radius",
        {"label": "radius R of tokens and queries"},
        log_axis("√n × error"),
        [
            points(name, radii, entry["value"], COLOURS[name], entry["stderr"], joined=True)
            for name, entry in result["constants"].items()
        ],
        height=360,
    )
    rows = [
        (
            name,
            growth["law"],
            f"e^({growth['exponential_rate']:.2f} R)",
            f"R^{growth['polynomial_degree']:.2f}",
            abs(growth["evidence"]),
        )
        for name, growth in result["growth"].items()
    ]
    grows = join([f"{name} {growth['law']}ly" for name, growth in result["growth"].items()])
    return View(
        title=f"{studies[0]['measure']}: radius {short(radii[0])} to {short(radii[-1])}",
        subtitle=f"{len(radii)} radii · n = {result['n']:,} · {studies[0]['replicates'][0]} replicates",
        verdict=(
            f"Tokens of {studies[0]['measure']} were spread over balls of {len(radii)} radii, and the error over all "
            "queries "
            "of the ball was measured beside the errors of the moments.",
            f"With the radius the constants of C/√n grow: {grows}.",
            "Do not read a uniform bound as the error of a typical query: the ball holds queries that no token "
            "resembles.",
        ),
        sections=[
            section(
                "How fast the constants grow",
                "√n × error at the largest n, with 95% bars.",
                drawn,
                table("growth", ("error", "fits better", "exponential", "power", "evidence"), rows),
            )
        ],
        data={"figures": list(figures)},
        warnings=list(dict.fromkeys(warning for s in studies for warning in s.get("warnings") or [])),
        trust=_trust(studies[-1]),
    )


def _curves(figures: Figures, result: Mapping[str, Any], names: Sequence[str]) -> str:
    series = []
    for name in names:
        entry, rate = result["errors"][name], result["rates"].get(name)
        series.append(points(name, result["n"], entry["value"], COLOURS[name], entry["stderr"]))
        if rate is not None:
            fitted = [rate["constant"] * size ** -rate["slope"] for size in rate["used"]]
            series.append(
                {**line(f"{name}: {falling(rate['slope'])}", rate["used"], fitted, COLOURS[name]), "unlisted": True}
            )
        if name in result.get("predicted", {}):
            series.append(line(f"{name}, predicted", result["n"], result["predicted"][name], COLOURS[name], "dotted"))
    return figures.place("Errors", TOKENS, log_axis("error"), series, height=400)


def _slopes(figures: Figures, result: Mapping[str, Any], names: Sequence[str]) -> str:
    n = np.asarray(result["n"], dtype=float)
    middle = [float(v) for v in np.sqrt(n[1:] * n[:-1])]
    series = [
        points(name, middle, entry["value"], COLOURS[name], entry["stderr"], joined=True)
        for name in names
        if (entry := (result.get("local_slopes") or {}).get(name)) is not None
    ]
    for entry in series:  # a slope may be negative, and then its bar reaches below zero
        if "high" in entry:
            entry["low"] = [None if v is None else 2 * v - h for v, h in zip(entry["y"], entry["high"], strict=True)]
    theory = result["theory"]
    guides = [
        {"y": theory["rate_sharp"], "label": f"sharp, moments: {theory['rate_sharp']:.3f}"},
        {"y": theory["rate_rms_output"], "label": f"sharp, output: {theory['rate_rms_output']:.3f}"},
    ]
    if abs(guides[0]["y"] - guides[1]["y"]) < 0.01:
        guides = [{"y": theory["rate_sharp"], "label": f"sharp: {theory['rate_sharp']:.3f}"}]
    return figures.place(
        "Local slopes", TOKENS, {"label": "slope between neighbours"}, series, guides=guides, height=340
    )


def _found(result: Mapping[str, Any], names: Sequence[str]) -> str:
    theory = result["theory"]
    fitted = [
        f"the {name} error falls like {falling(rate['slope'])}"
        for name in names
        if (rate := result["rates"].get(name)) is not None
    ]
    if not fitted:
        return "There are too few sizes to fit a rate; the curves below say what is known."
    logs = [name for name in names if (result["rates"].get(name) or {"evidence": 0})["evidence"] <= -DECIDES]
    tail = f" A logarithm fits better for {join(logs)}." if logs else ""
    return (
        f"As n grows {join(fitted)}; for horizon {short(theory['horizon'])} the sharp exponents are "
        f"{short(theory['rate_sharp'])} for the moments and {short(theory['rate_rms_output'])} for the output.{tail}"
    )


def _tokens(result: Mapping[str, Any]) -> str:
    found = {float(key): value for key, value in (result.get("tokens_for") or {}).items()}
    known = [(error, value) for error, value in sorted(found.items()) if value is not None]
    if not known and (result.get("scale") or {}).get("output") == 0:
        return "The limit is 0 for every query, so there is no relative error and no number of tokens for it."
    if not known and len(result["n"]) < LINE_SIZES:
        return f"Measure {LINE_SIZES} sizes or more: with these, the number of tokens for an error cannot be told."
    if not known:
        return (
            f"A relative output error of 10% takes more than {10 * result['n'][-1]:,} tokens, further than these "
            "sizes can tell: "
            "measure larger ones, or lower the horizon of the head."
        )
    said = [
        f"{value['n']:,} tokens for {error:.0%}{' (extrapolated)' if value['extrapolated'] else ''}"
        for error, value in known[::-1]
    ]
    return f"For the relative output error take {join(said)}; the slider below gives any other error."


def _budget(
    studies: Sequence[Mapping[str, Any]], labels: Sequence[str], places: Sequence[float], unit: str
) -> dict[str, Any]:
    """Curves of relative output errors for the sliders."""
    curves = []
    for study, label, place in zip(studies, labels, places, strict=True):
        scale = study["scale"]["output"] or None
        entry = study["errors"]["output"]
        if scale is not None:
            curves.append(
                {
                    "label": label,
                    "x": place,
                    "group": label,
                    "n": study["n"],
                    "error": [value / scale for value in entry["value"]],
                    "stderr": [value / scale for value in entry["stderr"]],
                }
            )
    return {"unit": unit, "cache": False, "axis": log_axis("horizon H"), "curves": curves}


def _budget_section() -> str:
    return section(
        "How many tokens for an error?",
        "Set the error you can live with and the length of your context: keeping n of C tokens at random has the error "
        "e(n) √(1 − n/C). Outside the sizes measured the curve follows its power law, and the answer is marked.",
        '<div id="budgets"></div>',
        name="budget-section",
    )


def _trust(result: Mapping[str, Any]) -> list[str]:
    floor = [value for value in result.get("floor") or [] if value]
    said = []
    if floor:
        least = min(value for entry in result["errors"].values() for value in entry["value"])
        said.append(f"Numerical floor: {short(max(floor))}; the smallest error measured is {short(least)}.")
    if result.get("interrupted"):
        said.append("The run was interrupted: fewer replicates than asked for stand behind its points.")
    return said
