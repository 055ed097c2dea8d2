"""Comparison of two or more runs of one kind with the first of them (`limitlens.compare`).

A difference is tested at 5% after Holm's correction over all comparisons of its quantity, by Welch's t where the
numbers of replicates are known. Quantities without a standard error are shown and never marked. The heads of two models
have no counterparts, so models are compared by means over their heads, with standard errors from the spread over heads.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from limitlens.comparison_result import LEVEL, TOKENS, Comparison, Difference
from limitlens.errors import InputError
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.loading import load
from limitlens.probing.result import ProbeRun
from limitlens.record import to_json
from limitlens.report.text import plural
from limitlens.results import Result
from limitlens.statistics.documents import holm, p_value
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.regimes import Regime

Value: TypeAlias = tuple[Estimate, int | None]  # a number of a run, and the number of replicates behind it, if known
Column: TypeAlias = dict[tuple[str, str], Value]  # the numbers of a run by place (head, error) and quantity

AT = " at n = "  # between a quantity and the n at which it was measured
QUANTITIES = {
    "top_weight": "largest weight", "entropy": "entropy", "horizon": "horizon", "score_std": "score spread",
    "mean_tilt": "mean tilt", "sink_mass": "mass on the sink", "pareto_k": "tail k̂",
}  # fmt: skip


def compare(*runs: Result | str | Path) -> Comparison:
    """Compare two or more runs of one kind with the first run: run folders, or results of `probe`, `predict`, `study`.

    >>> law, head, sizes = ll.Gaussian(0.0, 1.0), ll.Head(0.5), [50, 200, 800]
    >>> runs = [ll.study(law, head, sizes, replicates=12, queries=32, seed=seed) for seed in (0, 1)]
    >>> len(ll.compare(*runs).table) > 0
    True
    """
    if len(runs) < 2:
        raise InputError(f"{plural(len(runs), 'run')} was given; expected at least two to compare, so name another run")
    results: list[Any] = [load(run) if isinstance(run, str | Path) else run for run in runs]
    kinds = list(dict.fromkeys(run.kind for run in results))
    if len(kinds) > 1:
        raise InputError(f"runs of {', '.join(kinds)} were given; expected runs of one kind, so leave out some")
    if kinds[0] not in READERS:
        raise InputError(f"runs of {kinds[0]!r} cannot be compared; expected probes, predictions or studies")
    command, unit, read = READERS[kinds[0]]
    if unit == "head" and len({run.model_sha256 or run.model for run in results}) > 1:
        unit, read = "model average", _model_means
    names = _names(runs)
    differences = tuple(find_differences([read(run) for run in results], names))
    if not differences:
        raise InputError("the runs have nothing in common to compare; expected the same sizes, errors or quantities")
    described = tuple({"name": name, **_described(run)} for name, run in zip(names, results, strict=True))
    regimes = _regimes(results, names, unit == "head") if kinds == ["probe"] else None
    return Comparison(command, unit, described, regimes, differences)


def _names(runs: Sequence[Any]) -> list[str]:
    """Distinct names of the compared runs: the name or path of a folder, or the model and text (kind) of a result."""

    def name(run: Any, whole: bool) -> str:
        if isinstance(run, str | Path):
            return str(run) if whole else Path(run).resolve().name
        return f"{run.model} on {run.corpus}" if run.kind == "probe" else str(run.kind)

    brief, long = ([name(run, whole) for run in runs] for whole in (False, True))
    numbered = [f"{name} ({i})" for i, name in enumerate(long, 1)]
    return next(names for names in (brief, long, numbered) if len(set(names)) == len(names))


def _described(run: Any) -> dict[str, Any]:
    """Parameters of a run (model, text, window, ...) that the table of compared runs shows."""
    keys = ("model", "corpus", "measure", "sampling", "window", "tokens", "score_scale", "device", "seed")
    found = {key: value for key in keys if (value := getattr(run, key, None)) is not None}
    if run.kind == "study":
        found["horizon"] = run.theory["horizon"]
    return found


def _regimes(runs: Sequence[ProbeRun], names: Sequence[str], one_model: bool) -> dict[str, Any] | None:
    """Number of heads in each regime (class of error curve) by run, and of heads whose regime differs from run 1.

    None for predictions, which have no regimes. `one_model` says whether all runs are of the same model.
    """
    first, *_ = by_head = [{head.place: head.regime for head in run.records} for run in runs]
    if not any(regimes[place] for regimes in by_head for place in regimes):
        return None
    found = {}
    for name, regimes in zip(names, by_head, strict=True):
        counts = {regime.value: list(regimes.values()).count(regime) for regime in Regime}
        changed = sum(regimes[place] is not first[place] for place in regimes.keys() & first)
        found[name] = {**counts, "changed": changed if one_model or regimes is first else None}
    return found


def _value(value: Any, stderr: Any = None, replicates: int | None = None) -> Value:
    """Estimate with its number of replicates, from numbers that are None or not finite where they are unknown."""
    return Estimate.of(to_json(value), to_json(stderr)), replicates


def _probe(run: ProbeRun) -> Column:
    """Numbers to compare of every head of a probe: rate, errors, effective tokens, tokens needed and `QUANTITIES`."""
    found: Column = {}
    for head in run.records:
        found |= _curve(head.name, head.curve, run.replicates)
        effective = [None] * len(head.sizes) if head.effective_tokens is None else head.effective_tokens.tolist()
        for n, tokens in zip(head.sizes, effective, strict=True):
            found[head.name, f"effective tokens{AT}{n:,}"] = _value(tokens)
        needed = head.curve.tokens_for(0.05)
        low, high = needed.interval  # the standard error follows from the 95% interval
        stderr = None if low is None or high is None else (high - low) / (2 * 1.96)
        found[head.name, TOKENS] = (UNKNOWN, None) if needed.document() is None else _value(needed.n, stderr)
        for name, label in QUANTITIES.items():
            last = f"{AT}{head.sizes[-1]:,}" if name in ("top_weight", "entropy") else ""
            found[head.name, label + last] = _value(getattr(head, name))
    return found


def _model_means(run: ProbeRun) -> Column:
    """Means over the heads of a model of each quantity of a probe, with standard errors from the spread over heads."""
    heads: dict[str, list[float]] = defaultdict(list)
    for (_, quantity), (estimate, _) in _probe(run).items():
        if estimate.known and quantity != TOKENS:  # n(5%) is known only for heads that converge fast
            heads[quantity].append(estimate.value)
    return {
        ("all heads", name): _value(mean(found), stdev(found) / math.sqrt(len(found)), len(found))
        for name, found in heads.items()
        if len(found) > 1
    }


def _study(run: Any) -> Column:
    """Numbers to compare of a study, or of every study of a sweep: rate and errors of each error curve."""
    studies = [("", run)]
    if run.kind != "study":
        name = "H" if run.kind == "horizons" else "R"
        studies = [(f"{name} = {value:.4g}, ", curve) for value, curve in zip(run.values, run.curves, strict=False)]
    found: Column = {}
    for prefix, study in studies:
        for name, errors in study.errors.items():  # each is its own quantity: errors have no common median
            found |= _curve(f"{prefix}{name}", errors, study.replicates, f" of the {name}")
    return found


def _curve(where: str, curve: ErrorCurve, count: int, of: str = "") -> Column:
    """Rate and errors of an error curve at place `where`; `count` replicates, and `of` ends the quantity's name."""
    rate = curve.rate
    found = {(where, f"rate{of}"): (UNKNOWN, None) if rate is None else _value(rate.slope, rate.stderr, count)}
    for n, error, stderr in zip(curve.sizes, curve.error, curve.stderr, strict=True):
        found[where, f"error{of}{AT}{n:,}"] = _value(error, stderr, count)
    return found


# By kind of run: its command, the unit by which runs are matched, and the function that reads the run's numbers.
READERS: dict[str, tuple[str, str, Callable[[Any], Column]]] = {
    "probe": ("probe", "head", _probe),
    **dict.fromkeys(("study", "horizons", "radii"), ("study", "error", _study)),
}


def find_differences(columns: Sequence[Column], names: Sequence[str]) -> list[Difference]:
    """Differences of later runs from the first, with tests, for all numbers that every run has.

    `columns` are the numbers of each run. A quantity measured at several n is compared at the largest n of all runs.
    """
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    last = {(where, quantity.split(AT)[0]): quantity for where, quantity in shared}
    compared = [
        (key, name, columns[0][key], column[key])
        for key in shared
        if last[key[0], key[1].split(AT)[0]] == key[1] and any(column[key][0].known for column in columns)
        for name, column in zip(names[1:], columns[1:], strict=True)
    ]
    tested = [_welch(first, later) for _, _, first, later in compared]
    p_values: dict[str, list[float]] = defaultdict(list)
    for (key, *_), (_, p) in zip(compared, tested, strict=True):
        p_values[key[1]] += [] if p is None else [p]
    adjusted = {quantity: iter(holm(found)) for quantity, found in p_values.items()}
    return [
        Difference(*key, name, first[0], later[0], difference, None if p is None else next(adjusted[key[1]]) < LEVEL)
        for (key, name, first, later), (difference, p) in zip(compared, tested, strict=True)
    ]


def _welch(first: Value, later: Value) -> tuple[Estimate, float | None]:
    """Difference later − first with its standard error, and the p-value of Welch's t-test.

    p uses the normal law if the numbers of replicates are unknown, and is None without a standard error.
    """
    (a, replicates_a), (b, replicates_b) = first, later
    variance = a.stderr**2 + b.stderr**2
    if math.isnan(b.value - a.value) or math.isnan(variance):
        return Estimate(b.value - a.value), None
    below = 0.0
    if replicates_a and replicates_b and min(replicates_a, replicates_b) > 1:
        below = a.stderr**4 / (replicates_a - 1) + b.stderr**4 / (replicates_b - 1)
    difference = Estimate(b.value - a.value, math.sqrt(variance))
    return difference, p_value(difference.value, difference.stderr, variance**2 / below if below > 0 else math.inf)
