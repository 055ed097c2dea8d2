"""What a study and its sweeps show: tables, figures and sentences, described once for page, terminal and print.

What things are called, and what is said of every study alike, is in `study_words.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.estimate import Estimate
from limitlens.report import view
from limitlens.report.words import falling, join, plural, read_words, short
from limitlens.statistics.answers import CONTEXTS, ERRORS, answers
from limitlens.theory import rates

if TYPE_CHECKING:
    from limitlens.experiments.study_result import StudyResult
    from limitlens.experiments.sweeps import HorizonSweep, RadiusSweep
    from limitlens.statistics.fit import Rate

WORDS = read_words("experiments/study_words.json")
SHOWN = tuple(WORDS["errors"])  # to people; documents and tables have every error
FITTED = SHOWN[:3]  # errors whose rates a sweep of the horizon follows
GROWING = ("uniform", "mean", "covariance")  # errors whose constants a sweep of the radius follows
PROVED = ("mean", "covariance")  # errors that the proved rate bounds
WANTED = (0.1, 0.05, 0.01)  # relative output errors whose numbers of tokens every study tells
COLOURS: dict[str, view.Colour] = {"mean": "blue", "covariance": "orange", "output": "green", "uniform": "pink"}
TOKENS = view.Axis("number of tokens n", log=True)
MOST_CURVES = len(view.SHADES) * len(view.DASHES)  # as many as can be told apart
SEEN_FLOOR = 0.02  # of the smallest error: a floor below is too far away to draw


def study_view(curve: StudyResult) -> view.View:
    """One study: its error curves and rates, against theory."""
    names = _shown(curve)
    said = _said("study", curve, **{key: short(value) for key, value in curve.theory.items()})
    columns = [view.cells(curve.error(name), curve.stderr(name)) for name in names]
    values = view.Table("errors", ["n", *names], [*zip(curve.sizes, *columns, strict=True)], folded=True)
    wanted = [f"{error:.0%} relative output error: {curve.tokens_for(error)}" for error in WANTED]
    budget, data = _budget([curve], ["this study"], [1.0], "study", view.Text(wanted, listed=True))
    said |= {"found": _found(curve, names), "do": _tokens(curve)}
    sections = [
        _section("errors", errors_figure(curve), values),
        _section("rates", _rates_table(curve, names), view.Text([said["reach"]])),
        _section("settled", slopes_figure(curve)),
    ]
    return _view(said, [*sections, budget], [curve], curve.interrupted, data)


def horizons_view(swept: HorizonSweep) -> view.View:
    """A sweep of the horizon: rates over theory's lines."""
    horizons, curves = swept.horizons, swept.curves
    ends = {"least": short(min(horizons)), "most": short(max(horizons))}
    counts = {f"{word}s": plural(len(horizons), word) for word in ("horizon", "head")}
    said = _said("horizons", curves[0], **ends, **counts)
    columns = ["H", *FITTED, "asymptotic, moments", "asymptotic, output (rms)", "1/(2(1+H²))"]
    rows: list[list[view.Cell]] = []
    for horizon, curve in zip(horizons, curves, strict=True):
        tends = (curve.asymptotic["mean"], curve.asymptotic["output"], curve.theory["rate_drawn"])
        rows.append([horizon, *(_measured(curve.rate(name)) for name in FITTED), *tends])
    if fitted := _fitted(swept, "mean"):
        (near, slow, _), (far, fast, _) = fitted[0], fitted[-1]
        miss = max(abs(rate.slope - curve.asymptotic["mean"]) for _, rate, curve in fitted)
        found = {"near": near, "slow": slow.slope, "far": far, "fast": fast.slope, "miss": miss}
        said["found"] = WORDS["found"]["horizons"].format(**{name: short(value) for name, value in found.items()})
    sections = [
        _section("horizons", rates_figure(swept), view.Table("rates", columns, rows)),
        _section("curves", curves_figure(swept)),
    ]
    budget, data = _budget(curves, [f"H = {short(horizon)}" for horizon in horizons], horizons, "horizon")
    return _view(said, [*sections, budget], curves, swept.interrupted, data)


def radii_view(swept: RadiusSweep) -> view.View:
    """A sweep of the radius: how the constants of the uniform and moment errors grow."""
    radii, first = swept.radii, swept.curves[0]
    said = _said("radii", first, radii=len(radii), least=short(radii[0]), most=short(radii[-1]))
    rows: list[list[view.Cell]] = [[name, *view.cells(*swept.constants(name))] for name in GROWING]
    tables = [view.Table("constants", ["error", *(f"R = {short(radius)}" for radius in radii)], rows)]
    if grown := {name: growth for name in GROWING if (growth := swept.growth(name)) is not None}:
        laws: list[list[view.Cell]] = [
            [name, of.law, f"e^({of.exponential_rate:.2f} R)", f"R^{of.polynomial_degree:.2f}", abs(of.evidence)]
            for name, of in grown.items()
        ]
        tables.append(view.Table("growth", ["error", "growth", "exponential", "power", "evidence"], laws))
        words = join([f"{name} {of.law}ly" for name, of in grown.items()])
        said["found"] = f"With the radius the constants of C/√n grow: {words}."
    sections = [_section("radii", constants_figure(swept), *tables, high=first.sizes[-1])]
    return _view(said, sections, swept.curves, swept.interrupted, {})


def errors_figure(curve: StudyResult) -> view.Figure:
    """Every error against n with its fitted power law and what theory predicts; the numerical floor where near."""
    series = []
    sizes = np.asarray(curve.sizes, dtype=float)
    for name in _shown(curve):
        series.append(view.points(name, sizes, curve.error(name), COLOURS[name], curve.stderr(name)))
        if rate := curve.rate(name):
            used = np.asarray(rate.used, dtype=float)
            label = f"{name}: rate {rate.slope:.3f} ± {rate.stderr:.3f}"
            series.append(view.line(label, used, rate.constant * used**-rate.slope, COLOURS[name]))
        if name in curve.predicted:
            series.append(view.line(f"{name}, predicted", sizes, curve.predicted[name], COLOURS[name], "dotted"))
    if curve.floor.max() > max(SEEN_FLOOR * _least(curve), 0):
        series.append(view.band("numerical floor", sizes, 0.1 * curve.floor, curve.floor, "grey"))
    return view.Figure("Errors", TOKENS, view.Axis("error", log=True), series, height=400)


def slopes_figure(curve: StudyResult) -> view.Figure:
    """Slopes between neighbouring sizes, beside the rates they tend to."""
    n = np.asarray(curve.sizes, dtype=float)
    middle = np.sqrt(n[1:] * n[:-1])
    series = []
    for name in _shown(curve):
        slope, stderr = curve.local_slopes(name)
        series.append(view.points(name, middle, slope, COLOURS[name], stderr, joined=True, positive=False))
    tends = {"moments tend": curve.asymptotic["mean"], "output tends": curve.asymptotic["output"]}
    if abs(curve.asymptotic["mean"] - curve.asymptotic["output"]) < 0.01:
        tends = {"tends": curve.asymptotic["mean"]}
    guides = [view.Guide(f"{word} to {value:.3f}", y=value) for word, value in tends.items()]
    return view.Figure("Local slopes", TOKENS, view.Axis("slope between neighbours"), series, guides, height=340)


def rates_figure(swept: HorizonSweep) -> view.Figure:
    """Fitted rates against the horizon, over the drawn and sharp lines."""
    fine = np.geomspace(min(swept.horizons), max(swept.horizons), 80).tolist()
    sharp, squared, drawn = ([*map(law, fine)] for law in (rates.rate_sharp, rates.rate_rms_output, rates.rate_drawn))
    series = [
        view.line("sharp, moments: min(½, 1/(1+H²)), verified in d = 1", fine, sharp, "ink"),
        view.line("sharp, output (rms): min(½, (√(1+4/H²)−1)/4), verified in d = 1", fine, squared, "ink", "dashed"),
        view.line("drawn: 1/(2(1+H²))", fine, drawn, "grey", "dotted"),
    ]
    for name in FITTED:
        fitted = [(horizon, rate.slope, rate.stderr) for horizon, rate, _ in _fitted(swept, name)]
        if fitted:
            x, y, stderr = zip(*fitted, strict=True)
            series.append(view.points(f"{name}, measured", x, y, COLOURS[name], stderr, positive=False))
    seen = [rate for drawn in series for rate in drawn.y]
    up = view.Axis("rate β: error falls like n to the −β", low=min(0, *seen), high=1.05 * max(0.55, *seen))
    across = view.Axis("horizon H", log=True)
    guides = [view.Guide("½: plain averaging", y=0.5)]
    return view.Figure("Fitted rates over the horizon", across, up, series, guides, height=380)


def curves_figure(swept: HorizonSweep) -> view.Figure:
    """The output error of every horizon, each with a colour and dash of its own."""
    count = len(swept.horizons)
    drawn = np.unique(np.linspace(0, count - 1, min(count, MOST_CURVES)).round().astype(int)).tolist()
    series = []
    for place, k in enumerate(drawn):
        curve, (colour, dash) = swept.curves[k], view.look(place)
        value, stderr = curve.error("output"), curve.stderr("output")
        name = f"H = {short(swept.horizons[k])}"
        series.append(view.points(name, curve.sizes, value, colour, stderr, joined=True, dash=dash))
    note = f"{len(drawn)} of {count} horizons are drawn." if len(drawn) < count else ""
    up = view.Axis("output error", log=True)
    return view.Figure("Output error of every horizon", TOKENS, up, series, height=340, note=note)


def constants_figure(swept: RadiusSweep) -> view.Figure:
    """Constants of the uniform and moment errors against the radius of the tokens."""
    series = []
    for name in GROWING:
        value, stderr = swept.constants(name)
        growth = swept.growth(name)
        label = name if growth is None else f"{name}: {growth.law} growth"
        series.append(view.points(label, swept.radii, value, COLOURS[name], stderr, joined=True))
    across, up = view.Axis("radius R of tokens and queries"), view.Axis("√n × error", log=True)
    return view.Figure("Constants against the radius", across, up, series, height=360)


def _shown(curve: StudyResult) -> list[str]:
    return [name for name in SHOWN if name in curve.names]


def _least(curve: StudyResult) -> float:
    return min(float(curve.error(name).min()) for name in curve.names)


def _said(kind: str, curve: StudyResult, **known: Any) -> dict[str, str]:
    """Title, subtitle and sentences of a view."""
    known |= {name: getattr(curve, name) for name in ("measure", "replicates", "queries", "device")}
    return {part: text.format(low=curve.sizes[0], high=curve.sizes[-1], **known) for part, text in WORDS[kind].items()}


def _view(
    said: dict[str, str],
    sections: Sequence[view.Section],
    curves: Sequence[StudyResult],
    interrupted: bool,
    data: dict[str, Any],
) -> view.View:
    last, trust = curves[-1], []
    if last.floor.any():
        floor, least = short(float(last.floor.max())), short(_least(last))
        trust.append(f"Numerical floor: {floor} ({last.kernel}); the smallest error measured is {least}.")
    if interrupted:
        trust.append(WORDS["interrupted"]["study" if last.interrupted else "sweep"])
    trust += dict.fromkeys(note for curve in curves for note in curve.notes)
    warnings = [*dict.fromkeys(warning for curve in curves for warning in curve.warnings)]
    verdict = (said["read"], said["found"], said["do"])
    return view.View(said["title"], said["subtitle"], verdict, sections, data=data, warnings=warnings, trust=trust)


def _section(name: str, *blocks: view.Block, **known: Any) -> view.Section:
    title, lead = WORDS["sections"][name]
    return view.Section(title, lead.format(**known), blocks)


def _measured(rate: Rate | None) -> Estimate | None:
    return None if rate is None else Estimate(rate.slope, rate.stderr)


def _fitted(swept: HorizonSweep, name: str) -> list[tuple[float, Rate, StudyResult]]:
    """Horizons at which the rate of an error could be fitted."""
    swept_over = zip(swept.horizons, swept.curves, strict=True)
    return [(horizon, rate, curve) for horizon, curve in swept_over if (rate := curve.rate(name)) is not None]


def _rates_table(curve: StudyResult, names: Sequence[str]) -> view.Table:
    rows: list[list[view.Cell]] = []
    for name in names:
        rate, interval, law = curve.rate(name), "too few sizes", None
        if rate is not None:
            interval = f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}"
            law = f"{rate.law} ({rate.evidence:+.1f})"
        proved = curve.theory["rate_proved"] if name in PROVED else None
        rows.append([name, WORDS["errors"][name], _measured(rate), interval, curve.asymptotic[name], proved, law])
    return view.Table("rates", WORDS["rates"], rows)


def _found(curve: StudyResult, names: Sequence[str]) -> str:
    fitted = {name: rate for name in names if (rate := curve.rate(name)) is not None}
    if not fitted:
        return str(WORDS["found"]["none"])
    falls = join([f"the {name} error falls like {falling(rate.slope)}" for name, rate in fitted.items()])
    logs = [name for name, rate in fitted.items() if rate.law == "log"]
    tail = f" A logarithm fits better for {join(logs)}." if logs else ""
    moments, output = (short(curve.asymptotic[name]) for name in ("mean", "output"))
    horizon = short(curve.theory["horizon"])
    return str(WORDS["found"]["rates"]).format(falls=falls, horizon=horizon, moments=moments, output=output) + tail


def _tokens(curve: StudyResult) -> str:
    """What to do: how many tokens to take."""
    found = {error: curve.tokens_for(error) for error in WANTED}
    if unknown := next((answer.why for answer in found.values() if answer.why), ""):
        return f"How many tokens an error takes is not known: {unknown}."
    known = [
        f"{answer.n:,} tokens for {error:.0%}{' (extrapolated)' if answer.extrapolated else ''}"
        for error, answer in found.items()
        if answer.n is not None
    ]
    if known:
        return f"For the relative output error take {join(known)}."
    return str(WORDS["found"]["beyond"]).format(farthest=found[WANTED[0]].farthest)


def _budget(
    curves: Sequence[StudyResult], labels: Sequence[str], places: Sequence[float], unit: str, *blocks: view.Block
) -> tuple[view.Section, dict[str, Any]]:
    """The section of the sliders, and for them the numbers of tokens errors take; none where every limit is 0."""
    known = [entry for entry in zip(curves, labels, places, strict=True) if entry[0].relative.defined]
    drawn = []
    for curve, label, place in known:
        values = {"error": curve.relative.error, "stderr": curve.relative.stderr}
        drawn.append({"label": label, "x": place, "group": label, "n": list(curve.sizes), **values})
    budget = {
        **WORDS["budget"],
        "unit": unit,
        "errors": list(ERRORS),
        "contexts": list(CONTEXTS),
        "wanted": ERRORS.index(0.05),
        "length": CONTEXTS.index(32768),
        "curves": drawn,
        "answers": answers([curve.tokens_for for curve, _, _ in known]),
    }
    sliders = [view.Widget("budgets")] if known else []
    section = replace(_section("budget", *blocks, *sliders), name="budget-section")
    return section, {"n": list(curves[0].sizes), **({"budget": budget} if known else {})}
