"""Runs side by side: what differs, and whether the difference exceeds its error.

Every run is compared with the first. A measured quantity carries a standard error; the difference of two is marked when
it exceeds its own by more than chance explains over all the comparisons of that quantity: with m of them, at the level
5% shared out as 5%/m each (Bonferroni), by Welch's t where the numbers of replicates are known. Quantities without an
error are shown and never marked. The heads of two models have no counterparts, so that models are compared by the means
over their heads, with the spread over heads as the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from scipy import special

from limitlens.errors import InputError
from limitlens.record import read_run

LEVEL = 0.05
WORDS = {
    "horizon": "horizon",
    "score_std": "score spread",
    "mean_tilt": "mean tilt",
    "sink_mass": "mass on the sink",
    "pareto_k": "tail k̂",
}
WORDS_AT_LARGEST = {"top_weight": "largest weight", "entropy": "entropy"}  # measured at the largest n alone
AT = " at n = "  # between a quantity and the n it was measured at


@dataclass(frozen=True)
class Value:
    """A number with its standard error and the replicates behind it, each None where not known."""

    value: float | None
    stderr: float | None = None
    replicates: int | None = None


@dataclass(frozen=True)
class Item:
    """One thing that runs have in common: where it is, what is measured, and the runs' values."""

    where: str
    quantity: str
    values: tuple[Value, ...]


def compare(folders: Sequence[str | Path]) -> dict[str, Any]:
    """The comparison of two or more run folders as a JSON-ready document.

    `runs` describes them; `summary` has one row per quantity (medians over places, how many differences are marked);
    `differences` one row per place, quantity and later run.
    """
    if len(folders) < 2:
        raise InputError(f"{len(folders)} run was given; expected at least two to compare, so name another run folder")
    records = [read_run(folder) for folder in folders]
    return compare_records(records, _names([Path(folder) for folder in folders]))


def compare_records(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The comparison of the contents of run.json files."""
    results = [record["result"] for record in records]
    commands = [str(record.get("command")) for record in records]
    if len(set(commands)) > 1:
        raise InputError(
            f"runs of {', '.join(dict.fromkeys(commands))} were given; expected runs of one command, so leave out some"
        )
    reader = _reader(results)
    if len({"studies" in result for result in results}) > 1:
        raise InputError("a single study and a sweep were given; expected runs of one kind, so leave out some")
    if reader is None:
        raise InputError(f"runs of {commands[0]!r} cannot be compared; expected probes, studies or scaling limits")
    try:
        columns = [reader(result) for result in results]
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"a run lacks what a comparison needs ({type(error).__name__}: {error}); "
            "expected whole runs of this version, so run them again"
        ) from None
    items = _matched(columns)
    if not items:
        raise InputError("the runs have nothing in common to compare; expected the same sizes, errors or quantities")
    differences = _differences(items, names)
    return {
        "command": commands[0],
        "level": LEVEL,
        "runs": [{"name": name, **_described(result)} for name, result in zip(names, results, strict=True)],
        "unit": UNITS[reader],
        "matched": len({item.where for item in items}),
        "regimes": _regimes(results, names) if reader in (_probe, _models) else None,
        "same_model": reader is _probe,
        "summary": _summary(items, differences, names),
        "differences": differences,
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with their parents where names alone are not distinct."""
    short = [path.resolve().name for path in paths]
    if len(set(short)) == len(short):
        return short
    long = [str(path) for path in paths]
    return long if len(set(long)) == len(long) else [f"{name} ({i})" for i, name in enumerate(long, 1)]


def _described(result: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("model", "corpus", "measure", "window", "tokens", "device", "seed")
    found = {key: result[key] for key in keys if result.get(key) is not None}
    inputs = result.get("inputs")
    if isinstance(inputs, Mapping):
        found |= {key: inputs[key] for key in ("law", "dim", "n", "beta", "theta") if key in inputs}
    if isinstance(result.get("theory"), Mapping):
        found["horizon"] = result["theory"]["horizon"]
    return found


Column = dict[tuple[str, str], Value]


def _reader(results: Sequence[Mapping[str, Any]]) -> Any:
    result = results[0]
    if "heads" in result and "model" in result:
        return _probe if len({_model(result) for result in results}) == 1 else _models
    if "errors" in result:
        return _study
    if "studies" in result:
        return _sweep
    if "quantities" in result:
        return _scaling
    return None


def _regimes(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Heads of each regime per run, and how many heads of a later run are of another regime than in the first."""
    of = [{(head["layer"], head["head"]): head.get("regime") for head in result["heads"]} for result in results]
    found = {}
    for name, result, regimes in zip(names, results, of, strict=True):
        same = _model(results[0]) == _model(result)
        counts = {word: list(regimes.values()).count(word) for word in ("averaging", "selective", "frozen")}
        changed = sum(regimes[key] != of[0][key] for key in regimes if key in of[0]) if same else None
        found[name] = {**counts, "changed": changed}
    return found


def _probe(result: Mapping[str, Any]) -> Column:
    found: Column = {}
    count = result.get("replicates")
    for head in result["heads"]:
        where = f"layer {head['layer']}, head {head['head']}"
        rate = head.get("rate") or {}
        found[where, "rate"] = Value(rate.get("slope"), rate.get("stderr"), count)
        errors, stderr = head["relative_output_error"], head["relative_output_error_stderr"]
        for n, error, spread in zip(head["n"], errors, stderr, strict=True):
            found[where, f"error{AT}{n:,}"] = Value(error, spread, count)
        for n, effective in zip(head["n"], head.get("effective_tokens") or [], strict=False):
            found[where, f"effective tokens{AT}{n:,}"] = Value(effective)
        for name, word in WORDS_AT_LARGEST.items():
            found[where, f"{word}{AT}{head['n'][-1]:,}"] = Value(head.get(name))
        found[where, "tokens for 5%"] = _tokens(head)
        for name, word in WORDS.items():
            found[where, word] = Value(head.get(name))
    return found


def _model(result: Mapping[str, Any]) -> Any:
    """What tells a model from another."""
    return result.get("model_sha256") or result.get("model")


def _models(result: Mapping[str, Any]) -> Column:
    """A model whose heads have no counterpart in another: means over its heads, their spread as the error."""
    heads: dict[str, list[float]] = {}
    for (_, quantity), value in _probe(result).items():
        if value.value is not None:
            heads.setdefault(quantity, []).append(value.value)
    heads.pop("tokens for 5%", None)  # known only for the quick heads, so that its mean says nothing
    return {
        ("all heads", name): Value(mean(found), stdev(found) / math.sqrt(len(found)), len(found))
        for name, found in heads.items()
        if len(found) > 1
    }


def _tokens(head: Mapping[str, Any]) -> Value:
    """n(5%), its standard error read off its 95% interval."""
    known = (head.get("tokens_for") or {}).get("0.05")
    if not known:
        return Value(None)
    low, high = known["interval"]
    return Value(known["n"], None if low is None or high is None else (high - low) / (2 * 1.96))


def _study(result: Mapping[str, Any], prefix: str = "") -> Column:
    found: Column = {}
    count = result["replicates"][0]
    for name, entry in result["errors"].items():
        rate = result["rates"].get(name) or {}
        where = f"{prefix}{name}"
        found[where, "rate"] = Value(rate.get("slope"), rate.get("stderr"), count)
        for n, value, stderr in zip(result["n"], entry["value"], entry["stderr"], strict=True):
            found[where, f"error{AT}{n:,}"] = Value(value, stderr, count)
    return found


def _sweep(result: Mapping[str, Any]) -> Column:
    name, grid = ("H", result["horizons"]) if "horizons" in result else ("R", result["radii"])
    found: Column = {}
    for value, study in zip(grid, result["studies"], strict=False):
        found |= _study(study, f"{name} = {value:.4g}, ")
    return found


def _scaling(result: Mapping[str, Any]) -> Column:
    count = result["inputs"].get("replicates")
    return {
        (name, "measured"): Value(row.get("measured"), row.get("stderr"), count)
        for name, row in result["quantities"].items()
    }


UNITS = {_probe: "head", _models: "model average", _study: "error", _sweep: "error", _scaling: "number"}


def _matched(columns: Sequence[Column]) -> list[Item]:
    """What every run has, in the order of the first; of what depends on n only the largest n they share."""
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    last = {(where, quantity.split(AT)[0]): quantity for where, quantity in shared}
    kept = [(where, quantity) for where, quantity in shared if last[where, quantity.split(AT)[0]] == quantity]
    items = [Item(*key, tuple(column[key] for column in columns)) for key in kept]
    return [item for item in items if any(value.value is not None for value in item.values)]


def _differences(items: Sequence[Item], names: Sequence[str]) -> list[dict[str, Any]]:
    tested: dict[str, int] = {}
    for item in items:
        first = item.values[0]
        tested[item.quantity] = tested.get(item.quantity, 0) + sum(
            _error(first, value) is not None for value in item.values[1:]
        )
    rows = []
    for item in items:
        first = item.values[0]
        for name, value in zip(names[1:], item.values[1:], strict=True):
            known = first.value is not None and value.value is not None
            difference = value.value - first.value if known else None  # type: ignore[operator]
            error = _error(first, value)
            row: dict[str, Any] = {
                "where": item.where,
                "quantity": item.quantity,
                "run": name,
                "first": first.value,
                "first_stderr": first.stderr,
                "value": value.value,
                "stderr": value.stderr,
                "difference": difference,
                "difference_stderr": None if error is None else error[0],
                "exceeds": None,
            }
            if error is not None and difference is not None:
                spread, freedom = error
                row["exceeds"] = bool(abs(difference) > _quantile(LEVEL / tested[item.quantity], freedom) * spread)
            rows.append(row)
    return rows


def _error(a: Value, b: Value) -> tuple[float, float] | None:
    """Standard error of a difference and its degrees of freedom (Welch); None where an error is not known."""
    if a.value is None or b.value is None or a.stderr is None or b.stderr is None:
        return None
    squares = (a.stderr**2, b.stderr**2)
    total = sum(squares)
    if total == 0:
        return 0.0, math.inf
    counts = (a.replicates, b.replicates)
    if any(count is None or count < 2 for count in counts):
        return math.sqrt(total), math.inf
    shares = sum(square**2 / (count - 1) for square, count in zip(squares, counts, strict=True) if count is not None)
    return math.sqrt(total), total**2 / shares if shares > 0 else math.inf


def _quantile(level: float, freedom: float) -> float:
    """Two-sided quantile of Student's t, of the normal law for infinitely many degrees of freedom."""
    upper = 1 - level / 2
    return float(special.ndtri(upper) if math.isinf(freedom) else special.stdtrit(freedom, upper))


def _summary(
    items: Sequence[Item], differences: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    quantities = list(dict.fromkeys(item.quantity for item in items))
    rows = []
    for quantity in quantities:
        own = [item for item in items if item.quantity == quantity]
        row: dict[str, Any] = {"quantity": quantity, "places": len(own), "medians": {}, "marked": {}, "tested": {}}
        for i, name in enumerate(names):
            known = [value for item in own if (value := item.values[i].value) is not None]
            row["medians"][name] = median(known) if known else None
        for name in names[1:]:
            verdicts = [d["exceeds"] for d in differences if d["quantity"] == quantity and d["run"] == name]
            row["tested"][name] = sum(verdict is not None for verdict in verdicts)
            row["marked"][name] = sum(verdict is True for verdict in verdicts)
        rows.append(row)
    return rows
