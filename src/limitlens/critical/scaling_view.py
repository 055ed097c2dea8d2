"""What scaling limits show: where a head stands, every expectation predicted beside measured, and whole laws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from limitlens.report.view import Block, Figure, Table, Text, View, line, points
from limitlens.report.words import cell, falling, read_words, short, worded_figure, worded_view
from limitlens.theory import PoissonPoints, participation

if TYPE_CHECKING:
    from limitlens.critical.scaling_limits import ScalingLimits

WORDS = read_words("critical/words.json")["limits"]
_CURVE_POINTS = 25


def scaling_view(result: ScalingLimits) -> View:
    """The three regimes at one n and β, predicted beside measured."""
    inputs, known, found = result.inputs, result.control, result.quantities["participation"].measured
    control = [(label, known[name].predicted, known[name].asymptotic) for name, label in WORDS["control"].items()]
    laws = [(name, test.against, test.ks, test.p) for name, test in result.laws.items()]
    return worded_view(
        WORDS,
        [_along_theta(result), Table("control parameters", WORDS["controls"], control)],
        _tables(result),
        [Table("laws", WORDS["laws"], laws)],
        warnings=result.warnings,
        of=result,
        law=inputs["law"].capitalize(),
        beta=short(inputs["beta"]),
        theta=short(inputs["theta"]),
        fine_beta=short(inputs["beta"], 6),
        fine_theta=short(inputs["theta"], 4),
        fate=WORDS["fate"][result.regime],
        sharing=short(1 / found if found else None),
        farthest=_farthest(result),
        critical_n=short(known["critical_n"].predicted),
        critical_beta=short(known["critical_beta"].predicted),
        growth=falling(-2 / result.local["exponent"]),
    )


def _farthest(result: ScalingLimits) -> str:
    """How far measured and exact expectations are apart at most, in standard errors."""
    apart = [
        (abs(row.measured - row.exact) / row.stderr, WORDS["quantities"][name])
        for name, row in result.quantities.items()
        if row.exact is not None and row.measured is not None and row.stderr
    ]
    most, label = max(apart, default=(0.0, ""))
    return f"; measured and exact values differ by at most {most:.1f} standard errors ({label})" if apart else ""


def _along_theta(result: ScalingLimits) -> Figure:
    theta, shared = result.inputs["theta"], result.quantities["participation"]
    here = math.log(theta)
    fine = np.exp(np.linspace(max(min(here - 2, -7.0), -12.0), max(here + 2, 7.0), _CURVE_POINTS)).tolist()
    limit = [participation(PoissonPoints(value, result.local["a"])) for value in fine]
    series = [
        line("scaling limit", fine, limit, "grey"),
        points("this run", [theta], [shared.measured], "blue", [shared.stderr]),
    ]
    return worded_figure(WORDS["along_theta"], series)


def _tables(result: ScalingLimits) -> list[Block]:
    """Expectations, the formulas of the side that applies, and the critical β of the sphere around the keys."""
    rows = [
        (label, row.predicted, row.exact, row.cell, row.status and row.status.value)
        for name, label in WORDS["quantities"].items()
        if (row := result.quantities.get(name)) is not None
    ]
    blocks: list[Block] = [Table("expectations", WORDS["expectations"], rows)]
    for side, labels in WORDS["sides"].items():
        found = getattr(result, side)
        if found.applies:
            formulas = [
                (label, row.predicted, row.cell, row.status.value)
                for name, label in labels.items()
                if (row := getattr(found, name)) is not None
            ]
            blocks.append(Table(f"formulas of the {side} side", WORDS["formulas"], formulas))
    if (around := result.ambient) is not None:
        known = (around.beta, around.theta.predicted, around.participation.predicted)
        beta, theta, predicted = (short(value, 4) for value in known)
        told = {"beta": beta, "theta": theta, "predicted": predicted, "measured": cell(around.participation.cell)}
        blocks.append(Text([WORDS["ambient"].format(**told)]))
    return blocks
