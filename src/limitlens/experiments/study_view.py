"""Views of a study and of its sweeps: tables, figures and sentences for page, terminal and print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.estimate import Estimate
from limitlens.report import view
from limitlens.report.text import falling, join, plural, short
from limitlens.statistics.answers import CONTEXTS, ERRORS, answers
from limitlens.theory import rates

if TYPE_CHECKING:
    from limitlens.experiments.study_result import StudyResult
    from limitlens.experiments.sweeps import HorizonSweep, RadiusSweep
    from limitlens.statistics.fit import Rate

MEANING = {
    "mean": "mean of the outputs",
    "covariance": "covariance of the outputs",
    "output": "output, root mean square over queries",
    "uniform": "output, maximum over a ball of queries",
}
SHOWN = tuple(MEANING)  # in views; documents and tables have every error
FITTED = ("mean", "covariance", "output")  # errors whose rates a sweep of the horizon compares
GROWING = ("uniform", "mean", "covariance")  # errors whose constants a sweep of the radius compares
PROVED = ("mean", "covariance")  # errors that the proved rate bounds
WANTED = (0.1, 0.05, 0.01)  # relative output errors for which every study gives the number of tokens
COLOURS: dict[str, view.Colour] = {"mean": "blue", "covariance": "orange", "output": "green", "uniform": "pink"}
TOKENS = view.Axis("number of tokens n", log=True)
MOST_CURVES = len(view.SHADES) * len(view.DASHES)  # that a reader can tell apart
SEEN_FLOOR = 0.02  # of the smallest error: a lower numerical floor is not drawn


def study_view(curve: StudyResult) -> view.View:
    """Error curves and rates of one study, against theory."""
    names, theory = _shown(curve), {name: short(value) for name, value in curve.theory.items()}
    columns = [view.cells(curve.error(name), curve.stderr(name)) for name in names]
    values = view.Table("errors", ["n", *names], [*zip(curve.sizes, *columns, strict=True)], folded=True)
    wanted = [f"{error:.0%} relative output error: {curve.tokens_for(error)}" for error in WANTED]
    budget, data = _budget([curve], ["this study"], [1.0], "study", view.Text(wanted, listed=True))
    reach = f"Horizon {theory['horizon']}, one-sided {theory['horizon_one_sided']}, coupling {theory['coupling']}."
    sections = [
        view.Section(
            "Error against the number of tokens",
            "Points are measured, with 95% bars; lines are fitted power laws; dotted lines are predictions at finite "
            "n.",
            [errors_figure(curve), values],
        ),
        view.Section(
            "Rates",
            "Fitted rates, and the rates that the errors tend to.",
            [_rates_table(curve, names), view.Text([reach])],
        ),
        view.Section(
            "Has the rate converged?",
            "Slopes between neighbouring sizes. Where they still change, the fitted rate is not yet the asymptotic "
            "one.",
            [slopes_figure(curve)],
        ),
        budget,
    ]
    return view.View(
        f"{curve.measure}, horizon {theory['horizon']}",
        f"{curve.replicates} replicates · {curve.queries} queries · {_span(curve)} · on {curve.device}",
        (
            f"Attention over n tokens of {curve.measure} was compared with its exact infinite-token limit, "
            f"{_span(curve)}, in {curve.replicates} replicates.",
            _fitted_rates(curve, names),
            _tokens_needed(curve),
        ),
        sections,
        data=data,
        warnings=curve.warnings,
        trust=_trust([curve], curve.interrupted),
    )


def horizons_view(swept: HorizonSweep) -> view.View:
    """Rates over the horizon, against theory."""
    horizons, curves = swept.horizons, swept.curves
    first, count = curves[0], len(horizons)
    rows: list[list[view.Cell]] = []
    for horizon, curve in zip(horizons, curves, strict=True):
        asymptotic = (curve.asymptotic["mean"], curve.asymptotic["output"], curve.theory["rate_drawn"])
        rows.append([horizon, *(_slope(curve.rate(name)) for name in FITTED), *asymptotic])
    columns = ["H", *FITTED, "asymptotic, moments", "asymptotic, output (rms)", "1/(2(1+H²))"]
    found = "There are too few sizes to fit a rate."
    if fitted := _fitted(swept, "mean"):
        (near, slow, _), (far, fast, _) = fitted[0], fitted[-1]
        distance = max(abs(rate.slope - curve.asymptotic["mean"]) for _, rate, curve in fitted)
        found = (
            f"The rate of the mean goes from {short(slow.slope)} at H = {short(near)} to {short(fast.slope)} at "
            f"H = {short(far)}, within {short(distance)} of its asymptotic value."
        )
    budget, data = _budget(curves, [f"H = {short(horizon)}" for horizon in horizons], horizons, "horizon")
    sections = [
        view.Section(
            "Rates over the horizon",
            "One point per horizon, with its 95% bar; the sharp lines hold for unbounded tokens.",
            [rates_figure(swept), view.Table("rates", columns, rows)],
        ),
        view.Section("Error curves", "Root mean square output error, with 95% bars.", [curves_figure(swept)]),
        budget,
    ]
    return view.View(
        f"{first.measure}, horizons {short(min(horizons))} to {short(max(horizons))}",
        f"{first.replicates} replicates · {plural(count, 'horizon')} · {_span(first)}",
        (
            f"Attention over n tokens of {first.measure} was compared with its exact limit for {plural(count, 'head')} "
            f"of growing horizon, {_span(first)}.",
            found,
            "Plan with the curve of your head's horizon, not with n⁻⁰·⁵⁰: beyond H = 1 each further digit costs many "
            "more tokens.",
        ),
        sections,
        data=data,
        warnings=swept.warnings,
        trust=_trust(curves, swept.interrupted),
    )


def radii_view(swept: RadiusSweep) -> view.View:
    """Growth of the constants of the uniform and moment errors with the radius."""
    radii, first = swept.radii, swept.curves[0]
    rows: list[list[view.Cell]] = [[name, *view.cells(*swept.constants(name))] for name in GROWING]
    tables = [view.Table("constants", ["error", *(f"R = {short(radius)}" for radius in radii)], rows)]
    found = "There are too few radii to fit the growth of the constants of C/√n."
    if grown := {name: growth for name in GROWING if (growth := swept.growth(name)) is not None}:
        laws: list[list[view.Cell]] = [
            [name, of.law, f"e^({of.exponential_rate:.2f} R)", f"R^{of.polynomial_degree:.2f}", abs(of.evidence)]
            for name, of in grown.items()
        ]
        tables.append(view.Table("growth", ["error", "growth", "exponential", "power", "evidence"], laws))
        found = (
            f"With the radius the constants of C/√n grow: {join([f'{name} {of.law}ly' for name, of in grown.items()])}."
        )
    last = f"n = {first.sizes[-1]:,}"
    lead = f"√n × error at {last} as tokens and queries are scaled to radius R, with 95% bars."
    return view.View(
        f"{first.measure}: radius {short(radii[0])} to {short(radii[-1])}",
        f"{len(radii)} radii · {last} · {first.replicates} replicates",
        (
            f"Tokens of {first.measure} were scaled to balls of {len(radii)} radii, and the maximum error over the "
            "queries of each ball was measured, as well as the errors of the moments.",
            found,
            "Do not read a uniform bound as the error of a typical query: the ball holds queries that no token "
            "resembles.",
        ),
        [view.Section("Growth of the constants", lead, [constants_figure(swept), *tables])],
        warnings=swept.warnings,
        trust=_trust(swept.curves, swept.interrupted),
    )


def errors_figure(curve: StudyResult) -> view.Figure:
    """Every error against n with its fitted power law and its prediction; the numerical floor where it is near."""
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
    if curve.floor.max() > max(SEEN_FLOOR * _smallest_error(curve), 0):
        series.append(view.band("numerical floor", sizes, 0.1 * curve.floor, curve.floor, "grey"))
    return view.Figure("Errors", TOKENS, view.Axis("error", log=True), series, height=400)


def slopes_figure(curve: StudyResult) -> view.Figure:
    """Slopes between neighbouring sizes, and the rates they tend to."""
    n = np.asarray(curve.sizes, dtype=float)
    middle = np.sqrt(n[1:] * n[:-1])
    series = []
    for name in _shown(curve):
        slope, stderr = curve.local_slopes(name)
        series.append(view.points(name, middle, slope, COLOURS[name], stderr, joined=True, positive=False))
    limits = {"moments tend": curve.asymptotic["mean"], "output tends": curve.asymptotic["output"]}
    if abs(curve.asymptotic["mean"] - curve.asymptotic["output"]) < 0.01:
        limits = {"tends": curve.asymptotic["mean"]}
    guides = [view.Guide(f"{label} to {value:.3f}", y=value) for label, value in limits.items()]
    return view.Figure("Local slopes", TOKENS, view.Axis("slope between neighbours"), series, guides, height=340)


def rates_figure(swept: HorizonSweep) -> view.Figure:
    """Fitted rates against the horizon, with the sharp rates and the drawn one."""
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
    values = [rate for part in series for rate in part.y]
    up = view.Axis("rate β: error falls like n to the −β", low=min(0, *values), high=1.05 * max(0.55, *values))
    across = view.Axis("horizon H", log=True)
    guides = [view.Guide("½: plain averaging", y=0.5)]
    return view.Figure("Fitted rates over the horizon", across, up, series, guides, height=380)


def curves_figure(swept: HorizonSweep) -> view.Figure:
    """Output error of every horizon, or of as many as can be told apart."""
    count = len(swept.horizons)
    drawn = np.unique(np.linspace(0, count - 1, min(count, MOST_CURVES)).round().astype(int)).tolist()
    series = []
    for place, k in enumerate(drawn):
        curve = swept.curves[k]
        colour, dash = view.look(place)
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


def _smallest_error(curve: StudyResult) -> float:
    return min(float(curve.error(name).min()) for name in curve.names)


def _span(curve: StudyResult) -> str:
    return f"n from {curve.sizes[0]:,} to {curve.sizes[-1]:,}"


def _trust(curves: Sequence[StudyResult], interrupted: bool) -> list[str]:
    """Numerical floor, interrupts and notes of the studies."""
    last, trust = curves[-1], []
    if last.floor.any():
        floor, smallest = short(float(last.floor.max())), short(_smallest_error(last))
        trust.append(f"Numerical floor: {floor} ({last.kernel}); the smallest measured error is {smallest}.")
    if interrupted:
        lost = "points rest on fewer replicates than requested" if last.interrupted else "the sweep ends early"
        trust.append(f"The run was interrupted: {lost}.")
    return [*trust, *dict.fromkeys(note for curve in curves for note in curve.notes)]


def _slope(rate: Rate | None) -> Estimate | None:
    return None if rate is None else Estimate(rate.slope, rate.stderr)


def _fitted(swept: HorizonSweep, name: str) -> list[tuple[float, Rate, StudyResult]]:
    """Horizon, rate and study wherever the rate of this error could be fitted."""
    studies = zip(swept.horizons, swept.curves, strict=True)
    return [(horizon, rate, curve) for horizon, curve in studies if (rate := curve.rate(name)) is not None]


def _rates_table(curve: StudyResult, names: Sequence[str]) -> view.Table:
    rows: list[list[view.Cell]] = []
    for name in names:
        rate, interval, law = curve.rate(name), "too few sizes", None
        if rate is not None:
            interval = f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}"
            law = f"{rate.law} ({rate.evidence:+.1f})"
        proved = curve.theory["rate_proved"] if name in PROVED else None
        rows.append([name, MEANING[name], _slope(rate), interval, curve.asymptotic[name], proved, law])
    columns = ["error", "of the", "fitted rate", "95% interval", "asymptotic", "proved at least"]
    return view.Table("rates", [*columns, "law (evidence for a power)"], rows)


def _fitted_rates(curve: StudyResult, names: Sequence[str]) -> str:
    """Sentence with the fitted and the asymptotic rates."""
    fitted = {name: rate for name in names if (rate := curve.rate(name)) is not None}
    if not fitted:
        return "There are too few sizes to fit a rate; the table has the errors."
    falls = join([f"the {name} error falls like {falling(rate.slope)}" for name, rate in fitted.items()])
    logs = [name for name, rate in fitted.items() if rate.law == "log"]
    return (
        f"As n grows {falls}; for horizon {short(curve.theory['horizon'])} the exponents tend to "
        f"{short(curve.asymptotic['mean'])} for the moments and {short(curve.asymptotic['output'])} for the output."
        + (f" A logarithm fits better for {join(logs)}." if logs else "")
    )


def _tokens_needed(curve: StudyResult) -> str:
    """Sentence with the number of tokens for each of the `WANTED` errors."""
    needed = {error: curve.tokens_for(error) for error in WANTED}
    if unknown := next((answer.why for answer in needed.values() if answer.why), ""):
        return f"The number of tokens for an error is not known: {unknown}."
    known = [
        f"{answer.n:,} tokens for {error:.0%}{' (extrapolated)' if answer.extrapolated else ''}"
        for error, answer in needed.items()
        if answer.n is not None
    ]
    if known:
        return f"For the relative output error take {join(known)}."
    return (
        f"A relative output error of 10% takes more than {needed[WANTED[0]].farthest:,} tokens, beyond the range of "
        "these sizes: measure larger ones, or lower the horizon of the head."
    )


def _budget(
    curves: Sequence[StudyResult], labels: Sequence[str], places: Sequence[float], unit: str, *blocks: view.Block
) -> tuple[view.Section, dict[str, Any]]:
    """Report section on the tokens needed for an error, with sliders; empty if every infinite-token limit is 0."""
    known = [entry for entry in zip(curves, labels, places, strict=True) if entry[0].relative.defined]
    budget = {
        "cache": False,
        "axis": {"label": "horizon H", "log": True},
        "share": None,
        "unit": unit,
        "errors": list(ERRORS),
        "contexts": list(CONTEXTS),
        "wanted": ERRORS.index(0.05),
        "length": CONTEXTS.index(32768),
        "curves": [
            {
                **{"label": label, "x": place, "group": label, "n": list(curve.sizes)},
                **{"error": curve.relative.error, "stderr": curve.relative.stderr},
            }
            for curve, label, place in known
        ],
        "answers": answers([curve.tokens_for for curve, _, _ in known]),
    }
    section = view.Section(
        "How many tokens for an error?",
        "Set the error you accept and the length of your context: keeping n of C tokens at random has the error "
        "e(n) √(1 − n/C). Outside the measured sizes the curve follows its power law, and the answer is marked.",
        [*blocks, *([view.Widget("budgets")] if known else [])],
        name="budget-section",
    )
    return section, {"n": list(curves[0].sizes), **({"budget": budget} if known else {})}
