"""Coverage of the 95% intervals of a study, over a thousand studies of each kind.

One long study is divided into many: replicates are independent, each with its own seed. The true errors are those of
the long study, corrected for the bias of few queries by measuring the moments of its first replicates with every token
as a query; their standard error is a thirtieth of a single study's. The true rate is the slope of the least-squares
line through the true errors at the study's sizes; the true n(ε) is where the true curve reaches ε, between the second
and the third size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

import limitlens as ll
from limitlens.experiments.study_result import MOMENT, StudyResult
from limitlens.measures.base import Measure
from limitlens.statistics.error_curve import ErrorCurve

SIZES, STUDIES, REPLICATES, EVERY_QUERY = "50:800:5", 1000, 100, 4000
NAMES = ("mean", "covariance", "output")
WANTED = 0.02  # coverage may be this far from 95%: three standard errors of a thousand studies
MANY = 1000  # replicates of a tenth as many studies, in which bias would show
CASES: dict[str, tuple[Measure, float]] = {
    "Gaussian d = 4, H = 0.4": (ll.Gaussian(np.zeros(4), 1.0), 0.4),
    "Gaussian d = 2, H = 0.7": (ll.Gaussian(np.zeros(2), 1.0), 0.7),
    "cube d = 3, H = 1": (ll.Cube(3), 1.0),
    "Gaussian d = 8, H = 0.4": (ll.Gaussian(np.zeros(8), 1.0), 0.4),
}


def bias() -> Iterator[tuple[str, float, float, float]]:
    """Relative bias of corrected errors from 32 queries, against the same replicates with every token as a query."""
    measure, horizon = CASES["Gaussian d = 4, H = 0.4"]
    head = ll.designed_head(measure.covariance, horizon)
    few, every = (ll.study(measure, head, SIZES, replicates=EVERY_QUERY, queries=m) for m in (32, 800))
    for name in ("mean", "covariance"):
        raw, rows, true = few.replicate_errors[name], few.denoised_moments(name), every.replicate_errors[name]
        level = true.mean(0)
        stderr, before = (rows - true).std(0) / level / math.sqrt(EVERY_QUERY), raw.mean(0) / level - 1
        for j, n in enumerate(few.sizes):
            what = f"excess of the {name} from 32 queries at n = {n} ({before[j]:.1%} before correction)"
            yield what, float(rows.mean(0)[j] / level[j] - 1), float(stderr[j]), 0.01


def run() -> Iterator[tuple[str, float, float, float]]:
    """One row per interval: its name, its coverage, the standard error at 95%, and the tolerance."""
    for law, (measure, horizon) in CASES.items():
        head = ll.designed_head(measure.covariance, horizon)
        long = ll.study(measure, head, SIZES, replicates=STUDIES * REPLICATES)
        every = ll.study(measure, head, SIZES, replicates=EVERY_QUERY, queries=long.sizes[-1])
        truth = {name: _truth(long, every, name) for name in NAMES}
        for replicates in (REPLICATES, MANY):
            studies = long.replicates // replicates
            held = np.mean([_holds(_cut(long, k * replicates, replicates), truth) for k in range(studies)], axis=0)
            stderr = math.sqrt(0.95 * 0.05 / studies)
            for name, share in zip((*(f"rate of the {name}" for name in NAMES), "n(ε)"), held, strict=True):
                allowed = WANTED if studies == STUDIES else 3 * stderr
                yield f"{law}, {studies} studies of {replicates} replicates: {name} held", float(share), stderr, allowed


def _truth(long: StudyResult, every: StudyResult, name: str) -> ErrorCurve:
    """The true curve of an error, as an error curve of two identical replicates."""
    power = np.asarray(long.errors[name].error ** MOMENT.get(name, 1))
    if f"fewer.{name}" in long.rows:
        few = _cut(long, 0, every.replicates)
        power = power + every.errors[name].error - few.errors[name].error
    return ErrorCurve.of(long.sizes, np.tile(power, (2, 1)), moment=MOMENT.get(name, 1))


def _holds(curve: StudyResult, truth: dict[str, ErrorCurve]) -> list[bool]:
    """Whether the intervals of the rates and of n(ε) contain the true values."""
    held = [_between(curve.rate(name).interval, -_slope(truth[name])) for name in NAMES]  # type: ignore[union-attr]
    true = truth["output"].scaled(curve.scale["output"])
    error = float(np.sqrt(true.error[1] * true.error[2]))
    return [*held, _between(curve.tokens_for(error).interval, true.tokens_for(error).n)]


def _between(interval: tuple[float | None, float | None], value: float | None) -> bool:
    low, high = interval
    assert value is not None
    return (low is None or low <= value) and (high is None or value <= high)


def _slope(curve: ErrorCurve) -> float:
    return float(np.polyfit(np.log(curve.sizes), np.log(curve.error), 1)[0])


def _cut(curve: StudyResult, first: int, count: int) -> StudyResult:
    """The study restricted to some of its replicates."""
    return replace(curve, rows={name: row[first : first + count] for name, row in curve.rows.items()})
