"""`compare`: two or more runs of one kind, each with the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limitlens.comparison_result import Comparison
from limitlens.differences import READERS, find_differences, model_means
from limitlens.errors import InputError
from limitlens.loading import load
from limitlens.probing.regimes import Regime
from limitlens.probing.result import ProbeRun
from limitlens.report.text import plural
from limitlens.results import Result


def compare(*runs: Result | str | Path) -> Comparison:
    """Compare two or more runs of one kind with the first: folders, or results of `probe`, `study` or `scaling`.

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
        raise InputError(f"runs of {kinds[0]!r} cannot be compared; expected probes, studies or scaling limits")
    command, unit, read = READERS[kinds[0]]
    models = [run.model_sha256 or run.model for run in results] if kinds == ["probe"] else []
    if len(set(models)) > 1:
        unit, read = "model average", model_means
    names = _names(runs)
    differences = tuple(find_differences([read(run) for run in results], names))
    if not differences:
        raise InputError("the runs have nothing in common to compare; expected the same sizes, errors or quantities")
    described = tuple({"name": name, **_described(run)} for name, run in zip(names, results, strict=True))
    regimes = _regimes(results, names, models) if models else None
    return Comparison(command, unit, described, len(set(models)) == 1, regimes, differences)


def _names(runs: Sequence[Any]) -> list[str]:
    """Names of folders, with their parents where the names alone are not distinct; else what a result is about."""

    def name(run: Any, whole: bool) -> str:
        if isinstance(run, str | Path):
            return str(run) if whole else Path(run).resolve().name
        return f"{run.model} on {run.corpus}" if run.kind == "probe" else str(run.kind)

    brief, long = ([name(run, whole) for run in runs] for whole in (False, True))
    numbered = [f"{name} ({i})" for i, name in enumerate(long, 1)]
    return next(names for names in (brief, long, numbered) if len(set(names)) == len(names))


def _described(run: Any) -> dict[str, Any]:
    """Parameters of a run that its comparison shows."""
    keys = ("model", "corpus", "measure", "sampling", "window", "tokens", "score_scale", "device", "seed")
    found = {key: value for key in keys if (value := getattr(run, key, None)) is not None}
    if run.kind == "study":
        found["horizon"] = run.theory["horizon"]
    elif run.kind == "scaling":
        inputs = run.document()["inputs"]
        found |= {key: inputs[key] for key in ("law", "dim", "n", "beta", "theta") if key in inputs}
    return found


def _regimes(runs: Sequence[ProbeRun], names: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    """Number of heads in each regime by run, and the number of heads whose regime is not that of the first run."""
    found = {}
    by_head = [{head.place: head.regime for head in run.records} for run in runs]
    for name, model, regimes in zip(names, models, by_head, strict=True):
        counts = {regime.value: list(regimes.values()).count(regime) for regime in Regime}
        changed = sum(regimes[place] is not by_head[0][place] for place in regimes if place in by_head[0])
        found[name] = {**counts, "changed": changed if model == models[0] else None}
    return found
