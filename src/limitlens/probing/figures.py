"""Figures of a probe: rates against the horizon, the map of all heads, the curve of one head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError
from limitlens.probing.findings import WORDS
from limitlens.probing.predictors import PREDICTORS, measured_curve
from limitlens.probing.record import COUPLED, HeadRecord
from limitlens.probing.regimes import Regime
from limitlens.report.view import Axis, Colour, Figure, Guide, Series, band, head_map, line, points
from limitlens.theory import rates

if TYPE_CHECKING:
    from limitlens.probing.result import ProbeRun

COLOURS: dict[Regime, Colour] = {Regime.AVERAGING: "blue", Regime.SELECTIVE: "green", Regime.FROZEN: "red"}
FORETOLD = "foretold by the exact law of its tokens"


def rate_lines(horizons: Sequence[float], kind: str = "output") -> list[Series]:
    """Rates that theory says of a kind of error (`heads.predictors`) of Gaussian tokens with these horizons."""
    fine = np.geomspace(min(horizons), max(horizons), 80)
    series = []
    for name, rate, colour, dash in WORDS["rate_lines"]["output" if kind == "output" else "moments"]:
        reach = fine**2 if rate in COUPLED else fine  # the coupling is H² at best
        series.append(line(name, fine, [getattr(rates, rate)(float(h)) for h in reach], colour, dash))
    return series


def rates_figure(run: ProbeRun, kind: str = "output") -> Figure:
    """Fitted rates of a kind of error, without a sink, against the horizon: one point a head, over what theory says."""
    if kind not in PREDICTORS:
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(PREDICTORS)}")
    every = [(head, curve.rate) for head in run.records if head.horizon and (curve := measured_curve(head, kind))]
    found = [(head, rate) for head, rate in every if rate is not None]
    if not found:
        raise InputError("no head of this run has both a rate and a horizon; probe at three sizes or more to fit rates")
    series = rate_lines([head.horizon for head, _ in found], kind)
    for regime, colour in COLOURS.items():
        if own := [(head.horizon, rate.slope, rate.stderr) for head, rate in found if head.regime is regime]:
            x, y, stderr = zip(*own, strict=True)
            series.append(points(regime.value, x, y, colour, stderr, positive=False))
    up = Axis("rate β: error falls like n to the −β", low=min(0.0, *(rate.slope for _, rate in found)))
    averaging = Guide("½: plain averaging", y=0.5)
    of = "" if kind == "output" else f" of the {kind}"
    return Figure(f"Fitted rates{of} against the horizon", Axis("horizon H", log=True), up, series, guides=(averaging,))


def map_figure(run: ProbeRun, quantity: str) -> Figure:
    """All heads, layer by head, coloured by a quantity: "rate", "regime", or any column of `heads` with numbers."""
    words = [regime.value for regime in Regime] if quantity == "regime" else []
    if words:
        found: list[Any] = [words.index(head.regime.value) for head in run.records]
    elif quantity == "rate":
        found = [head.curve.rate and head.curve.rate.slope for head in run.records]
    else:
        numbers = run.heads.select_dtypes("number").drop(columns=["layer", "head"]).dropna(axis="columns", how="all")
        if quantity not in numbers:
            known = f"expected one of {', '.join(('regime', *numbers.columns))}"
            help_ = f"a file is given as path={quantity!r}" if Path(quantity).suffix else known
            raise InputError(f"no head of this run has a number {quantity!r}; {help_}")
        found = numbers[quantity].tolist()
    label = "rate β of the error" if quantity == "rate" else quantity.replace("_", " ")
    return head_map(label, label, [head.place for head in run.records], found, words=words)


def head_figures(head: HeadRecord) -> list[Figure]:
    """The error curve of one head with its 95% band and fitted rate, and its effective tokens."""
    curve, n = head.curve, np.asarray(head.sizes, dtype=float)
    low = np.maximum(curve.error - 1.96 * curve.stderr, 0.05 * curve.error)
    errors = [band("95%", n, low, curve.error + 1.96 * curve.stderr, listed=False), points("measured", n, curve.error)]
    if (rate := curve.rate) is not None:
        errors.append(line(f"rate {rate.slope:.3f} ± {rate.stderr:.3f}", n, rate.constant * n**-rate.slope))
    told = head.foretold
    name, predicted = ("predicted", head.predicted_error) if told is None else (FORETOLD, told)
    errors.append(line(name, n, predicted, "ink", "dotted"))
    shared = [
        points(head.regime.value, n, head.effective_tokens, COLOURS[head.regime]),
        line("every token alike", n, n, "grey", "dashed"),
    ]
    across = Axis("number of tokens n", log=True)
    return [
        Figure(head.name, across, Axis("relative output error", log=True), errors),
        Figure("", across, Axis("effective tokens", log=True), shared),
    ]
