"""Numbers of a run by place and quantity, and the tested differences between runs (used by `comparison`).

A difference is significant at 5% after Holm's correction over all comparisons of its quantity, by Welch's t where the
numbers of replicates are known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from limitlens.estimate import UNKNOWN, Estimate
from limitlens.probing.result import ProbeRun
from limitlens.record import to_json
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.multiple_testing import holm, p_value

LEVEL = 0.05
TOKENS = "tokens for 5%"
AT = " at n = "  # between a quantity and the n at which it was measured
QUANTITIES = {
    "top_weight": "largest weight", "entropy": "entropy", "horizon": "horizon", "score_std": "score spread",
    "mean_tilt": "mean tilt", "sink_mass": "mass on the sink", "pareto_k": "tail k̂",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A number of a run with its standard error, and the number of replicates behind it; None if not known."""

    estimate: Estimate = UNKNOWN
    replicates: int | None = None


Column = dict[tuple[str, str], Value]  # the numbers of a run by place and quantity


@dataclass(frozen=True)
class Difference:
    """One quantity at one place in the first run and in a later one."""

    where: str
    quantity: str
    run: str
    first: Estimate
    value: Estimate
    difference: Estimate
    exceeds: bool | None  # whether the difference is significant; None without a standard error

    @property
    def in_errors(self) -> float | None:
        """The difference in standard errors; None where it is not known."""
        stderr = self.difference.stderr
        return self.difference.value / stderr if self.difference.known and stderr and not math.isnan(stderr) else None


def _probe(run: ProbeRun) -> Column:
    """Numbers of every head of a probe."""
    found: Column = {}
    for head in run.records:
        found |= _curve(head.name, head.curve, run.replicates)
        effective = [None] * len(head.sizes) if head.effective_tokens is None else head.effective_tokens.tolist()
        for n, tokens in zip(head.sizes, effective, strict=True):
            found[head.name, f"effective tokens{AT}{n:,}"] = _value(tokens)
        needed = head.curve.tokens_for(0.05)
        low, high = needed.interval  # the standard error follows from the 95% interval
        stderr = None if low is None or high is None else (high - low) / (2 * 1.96)
        found[head.name, TOKENS] = Value() if needed.document() is None else _value(needed.n, stderr)
        for name, label in QUANTITIES.items():
            last = f"{AT}{head.sizes[-1]:,}" if name in ("top_weight", "entropy") else ""
            found[head.name, label + last] = _value(getattr(head, name))
    return found


def _value(value: Any, stderr: Any = None, replicates: int | None = None) -> Value:
    """A value of numbers that may be None or not finite, which both mean unknown."""
    return Value(Estimate.of(to_json(value), to_json(stderr)), replicates)


def model_means(run: ProbeRun) -> Column:
    """Means over the heads of a model, with the spread over heads as the error."""
    heads: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), value in _probe(run).items():
        if value.estimate.known and quantity != TOKENS:  # n(5%) is known only for heads that converge fast
            heads[quantity].append(value.estimate.value)
    return {
        ("all heads", name): _value(mean(found), stdev(found) / math.sqrt(len(found)), len(found))
        for name, found in heads.items()
        if len(found) > 1
    }


def _study(run: Any) -> Column:
    """Error curves of a study, or of every study of a sweep."""
    studies = [("", run)]
    if run.kind != "study":
        name, grid = ("H", run.horizons) if run.kind == "horizons" else ("R", run.radii)
        studies = [(f"{name} = {value:.4g}, ", curve) for value, curve in zip(grid, run.curves, strict=False)]
    found: Column = {}
    for prefix, study in studies:
        for name in study.names:  # the error has its own quantity: mean, covariance and output have no common median
            found |= _curve(f"{prefix}{name}", study.errors[name], study.replicates, f" of the {name}")
    return found


def _curve(where: str, curve: ErrorCurve, count: int, of: str = "") -> Column:
    """Rate and errors of an error curve."""
    rate = curve.rate
    found = {(where, f"rate{of}"): Value() if rate is None else _value(rate.slope, rate.stderr, count)}
    for n, error, stderr in zip(curve.sizes, curve.error, curve.stderr, strict=True):
        found[where, f"error{of}{AT}{n:,}"] = _value(error, stderr, count)
    return found


def _scaling(run: Any) -> Column:
    """Measured numbers of a scaling limit."""
    count = run.inputs["replicates"]
    return {(name, "measured"): Value(one.measured, count) for name, one in run.quantities.items()}


# By kind of run: the command, the unit that is matched, and the function that reads the numbers.
READERS: dict[str, tuple[str, str, Callable[[Any], Column]]] = {
    "probe": ("probe", "head", _probe),
    "scaling": ("scaling", "number", _scaling),
    **dict.fromkeys(("study", "horizons", "radii"), ("study", "error", _study)),
}


def find_differences(columns: Sequence[Column], names: Sequence[str]) -> list[Difference]:
    """Differences of what every run has, in the order of the first; of sizes n only the largest that all share."""
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    last = {(where, quantity.split(AT)[0]): quantity for where, quantity in shared}
    pairs = [
        (key, name, columns[0][key].estimate, column[key].estimate, *_difference(columns[0][key], column[key]))
        for key in shared
        if last[key[0], key[1].split(AT)[0]] == key[1] and any(column[key].estimate.known for column in columns)
        for name, column in zip(names[1:], columns[1:], strict=True)
    ]
    p_values: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), *_, difference, freedom in pairs:
        if not math.isnan(difference.stderr):
            p_values[quantity].append(p_value(difference.value, difference.stderr, freedom))
    adjusted = {quantity: iter(holm(found)) for quantity, found in p_values.items()}
    rows = []
    for key, name, first, later, difference, _ in pairs:
        exceeds = None if math.isnan(difference.stderr) else next(adjusted[key[1]]) < LEVEL
        rows.append(Difference(*key, name, first, later, difference, exceeds))
    return rows


def _difference(first: Value, later: Value) -> tuple[Estimate, float]:
    """Later minus first with its standard error, and the degrees of freedom of that error (Welch)."""
    a, b = first.estimate, later.estimate
    variance = a.stderr**2 + b.stderr**2
    below = 0.0
    if first.replicates and later.replicates and min(first.replicates, later.replicates) > 1:
        below = a.stderr**4 / (first.replicates - 1) + b.stderr**4 / (later.replicates - 1)
    difference = b.value - a.value
    stderr = math.nan if math.isnan(difference) else math.sqrt(variance)
    return Estimate(difference, stderr), variance**2 / below if below > 0 else math.inf
