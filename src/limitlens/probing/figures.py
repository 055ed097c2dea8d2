"""Figures of a probe: rates against the horizon, the map of all heads, the curve of one head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError
from limitlens.probing.overview import PREDICTORS, curve_of_kind
from limitlens.probing.record import COUPLED
from limitlens.probing.regimes import Regime
from limitlens.report.view import Axis, Colour, Dash, Figure, Guide, Series, head_map, line, points
from limitlens.theory import rates

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

COLOURS: dict[Regime, Colour] = {Regime.AVERAGING: "blue", Regime.SELECTIVE: "green", Regime.FROZEN: "red"}
# Rates of theory for Gaussian tokens: name, function of `theory.rates`, colour and dash of its line.
OUTPUT_LINES: tuple[tuple[str, str, Colour, Dash], ...] = (
    ("root mean square: min(½, (√(1+4/H²)−1)/4), heuristic", "rate_rms_output", "ink", ""),
    ("of one sample: min(½, 1/(1+2H²)), heuristic", "rate_sharp_output", "ink", "dashed"),
)
MOMENT_LINES: tuple[tuple[str, str, Colour, Dash], ...] = (
    ("sharp: min(½, 1/(1+H²)), heuristic", "rate_sharp", "ink", ""),
    ("root mean square: min(½, (√(1+8/H²)−1)/4), heuristic", "rate_rms", "ink", "dashed"),
    ("drawn: 1/(2(1+H²))", "rate_drawn", "orange", "dotted"),
    ("proved at best: 1/(2(1+32H²))", "rate_proved", "grey", ""),
)


def rate_lines(horizons: Sequence[float], kind: str = "output") -> list[Series]:
    """Theory's rates of a kind of error (`probing.overview`) for Gaussian tokens, over a range of horizons."""
    fine = np.geomspace(min(horizons), max(horizons), 80)
    series = []
    for name, rate, colour, dash in OUTPUT_LINES if kind == "output" else MOMENT_LINES:
        argument = fine**2 if rate in COUPLED else fine  # the coupling is at least H²
        series.append(line(name, fine, [getattr(rates, rate)(float(value)) for value in argument], colour, dash))
    return series


def rates_figure(run: ProbeRun, kind: str = "output") -> Figure:
    """Fitted rates of a kind of error, without a sink, against the horizon: one point per head, with theory's lines."""
    if kind not in PREDICTORS:
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(PREDICTORS)}")
    every = [(head, curve.rate) for head in run.records if head.horizon and (curve := curve_of_kind(head, kind))]
    found = [(head, head.horizon, rate) for head, rate in every if rate is not None and head.horizon]
    if not found:
        raise InputError("no head of this run has both a rate and a horizon; probe at three sizes or more to fit rates")
    series = rate_lines([horizon for _, horizon, _ in found], kind)
    for regime, colour in COLOURS.items():
        if own := [(horizon, rate.slope, rate.stderr) for head, horizon, rate in found if head.regime is regime]:
            x, y, stderr = zip(*own, strict=True)
            series.append(points(regime.value, x, y, colour, stderr, positive=False))
    up = Axis("rate β: error falls like n to the −β", low=min(0.0, *(rate.slope for *_, rate in found)))
    averaging = Guide("½: plain averaging", y=0.5)
    of = "" if kind == "output" else f" of the {kind}"
    return Figure(f"Fitted rates{of} against the horizon", Axis("horizon H", log=True), up, series, guides=(averaging,))


def map_figure(run: ProbeRun, quantity: str) -> Figure:
    """All heads, layer by head, coloured by a quantity: "rate", "regime", or any column of `heads` with numbers."""
    words = [regime.value for regime in Regime] if quantity == "regime" and run.measured else []
    if words:
        found: list[Any] = [head.regime and words.index(head.regime.value) for head in run.records]
    elif quantity == "rate":
        found = [head.curve.rate and head.curve.rate.slope for head in run.records]
    else:
        numbers = run.heads.select_dtypes("number").drop(columns=["layer", "head"]).dropna(axis="columns", how="all")
        if quantity not in numbers:
            known = f"expected one of {', '.join(('regime', *numbers.columns))}"
            help_ = f"give the name of a file as path={quantity!r}" if Path(quantity).suffix else known
            raise InputError(f"no head of this run has a value of {quantity!r}; {help_}")
        found = numbers[quantity].tolist()
    predicted = "" if run.measured else "predicted "
    label = f"{predicted}rate β of the error" if quantity == "rate" else quantity.replace("_", " ")
    return head_map(label, label, [head.place for head in run.records], found, words=words)
