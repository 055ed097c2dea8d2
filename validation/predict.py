"""Accuracy of a probe's standard errors, predicted rates and extrapolations, against other probes with other seeds.

Six seeds are run for each model and text, and each run is compared with the mean of the other five: the share of
points more than 2 standard errors away; the distance between the rate predicted from its own tokens and the mean
fitted rate, with formulas of the horizon and constants as baselines; and, with its largest sizes removed, the error of
its extrapolation and the coverage of its 95% intervals of errors and of n(ε). The same for `ll.predict`, from a pilot
alone.

`python -m validation predict` runs both models; `python -m validation.predict minilm stdlib-docs [device]` one case.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

import limitlens as ll
from limitlens.models import LoadedModel, load
from limitlens.record import to_json
from limitlens.statistics.error_curve import ErrorCurve

SEEDS = 6
# Cut off at `cut`, the error at the largest size is extrapolated: 8 times as far for the encoder, 4 for the decoder.
CASES: dict[str, dict[str, Any]] = {
    "minilm": {"tokens": 118_000, "sizes": "64:4096:7", "cut": 512},
    "smollm2": {"tokens": 26_000, "sizes": "64:1024:5", "cut": 256},  # a minute and a half a probe on two cores
}
ON_GPU = {  # the built-in documentation holds 113,000 tokens of smollm2
    "stdlib-docs": {"tokens": 60_000, "sizes": "64:2048:6", "cut": 512},
    "stdlib-code": {"tokens": 240_000, "sizes": "64:2048:6", "cut": 512},
}
TEXTS = ("stdlib-docs", "stdlib-code")


def run() -> dict[str, Any]:
    """Compare the seeds of every model on every text."""
    found = {}
    for name in CASES:
        loaded = load(name)
        found[name] = {text: case(loaded, text, **CASES[name]) for text in TEXTS}
    return to_json({"cases": CASES, "seeds": SEEDS, "found": found})  # type: ignore[no-any-return]


def case(
    loaded: LoadedModel, text: str, *, tokens: int, sizes: str, cut: int, window: int | None = None, seeds: int = SEEDS
) -> dict[str, Any]:
    """Compare the seeds of one model on one text."""
    runs, told, seconds = [], [], []
    for seed in range(seeds):
        begun = time.perf_counter()
        runs.append(ll.probe(loaded, text, tokens, sizes=sizes, window=window, seed=seed))
        between = time.perf_counter()
        told.append(ll.predict(loaded, text, sizes=sizes, window=window, seed=seed))
        seconds.append((between - begun, time.perf_counter() - between))
    print(f"{loaded.name} on {text}: seconds of a probe and of a pilot alone {np.median(seconds, axis=0)}", flush=True)
    curves = [[head.curve_without_sink for head in one.records] for one in runs]
    found = {
        "seconds": np.median(seconds, axis=0),
        "points": points(curves),
        "regimes": regimes(runs),
        "rates": rates(runs),
        "extrapolation": extrapolation(curves, cut),
        "pilot_alone": pilot_alone(told, curves, cut),
    }
    for name, numbers in found.items():
        print(f"  {name}: {to_json(numbers)}", flush=True)
    return found


def others(numbers: Any) -> Any:
    """For each run the mean over all other runs, (runs, ...) to (runs, ...)."""
    array = np.asarray(numbers, dtype=float)
    return (array.sum(0) - array) / (len(array) - 1)


def logs(curves: list[list[ErrorCurve]]) -> tuple[Any, Any]:
    """Logarithms of the errors and their standard errors, each (runs, heads, sizes)."""
    error = np.array([[curve.error for curve in one] for one in curves])
    return np.log(error), np.array([[curve.stderr for curve in one] for one in curves]) / error


def points(curves: list[list[ErrorCurve]]) -> dict[str, Any]:
    """Distance of points from the mean of the other runs, in standard errors of the difference."""
    log, stderr = logs(curves)
    score = (log - others(log)) / np.sqrt(stderr**2 + others(stderr**2) / (len(log) - 1))
    far = np.abs(score) > 2
    return {"beyond_2": far.mean(), "by_size": far.mean((0, 1)), "deviation": np.sqrt(np.square(score).mean())}


def regimes(runs: list[ll.ProbeRun]) -> dict[str, float]:
    """Share of heads with different regimes in two runs, for heads whose regime is certain in both and for the rest."""
    sure, doubt = [], []
    for i, one in enumerate(runs):
        for other in runs[:i]:
            for a, b in zip(one.records, other.records, strict=True):
                certain = min(a.regime_agreement or 0, b.regime_agreement or 0) >= 0.9
                (sure if certain else doubt).append(a.regime is not b.regime)
    return {
        "sure": float(np.mean(sure)),
        "doubted": float(np.mean(doubt)) if doubt else 0.0,
        "share": len(sure) / (len(sure) + len(doubt)),
    }


def rates(runs: list[ll.ProbeRun]) -> dict[str, Any]:
    """Mean absolute error and rank correlation of each predictor against the rates fitted in the other runs."""
    from scipy.stats import spearmanr

    fitted = np.array([[head.curve_without_sink.rate.slope for head in one.records] for one in runs])  # type: ignore[union-attr]
    truth = others(fitted)
    found = {"measured_itself": {"miss": np.abs(fitted - truth).mean()}}
    found["best_constant"] = {"miss": np.abs(truth - np.median(truth)).mean()}
    for name in runs[0].records[0].predicted_rates:
        told = np.array([[head.predicted_rates[name] for head in one.records] for one in runs], dtype=float)
        pairs = zip(told, truth, strict=True)
        rank = None if name == "rate_constant" else float(np.mean([spearmanr(*pair).statistic for pair in pairs]))
        found[name] = {"miss": np.nanmean(np.abs(told - truth)), "rank_correlation": rank}
    return found


def extrapolation(curves: list[list[ErrorCurve]], cut: int) -> dict[str, Any]:
    """Accuracy of errors extrapolated to the largest size, and of n(ε) for an ε that the other runs reach."""
    log, _ = logs(curves)
    sizes = curves[0][0].sizes
    last = sizes.index(cut) + 1
    rows = {"pilot": [], "slope_half": [], "power_law": [], "level": []}  # type: dict[str, list[float]]
    covers, needed, widths = [], [], []
    truth = others(log)
    for one, target in zip(curves, truth, strict=True):
        for curve, true in zip(one, target, strict=True):
            short = replace(
                curve, sizes=sizes[:last], error_moments=curve.error_moments[..., :last],
                finite_population_correction=curve.finite_population_correction[..., :last],
                outputs=curve.outputs[:, :last], floor=curve.floor[:last], text=curve.text[:, :last],
            )  # fmt: skip
            error, low, high = short.predict(sizes[-1])
            here, far = np.log(short.error[-1]), np.log(sizes[-1] / cut)
            rows["pilot"].append(np.log(error) - true[-1])
            rows["level"].append(here - true[last - 1])
            rows["slope_half"].append(here - far / 2 - true[-1])
            rows["power_law"].append(np.log(replace(short, prediction=None).predict(sizes[-1])[0]) - true[-1])
            covers.append(np.log(low) <= true[-1] <= np.log(high))
            widths.append(np.log(high / low))
            wanted = (true[-1] + true[last - 1]) / 2
            n = np.exp(np.interp(-wanted, -true[last - 1 :], np.log(sizes[last - 1 :])))
            answer = short.tokens_for(float(np.exp(wanted)))
            if answer.n is not None and answer.extrapolated:
                ends = [end or np.inf for end in answer.interval]
                needed.append(ends[0] <= n <= ends[1])
    found: dict[str, Any] = {name: misses(miss) for name, miss in rows.items()}
    return found | {
        "covered": np.mean(covers),
        "width": np.median(widths),
        "n_covered": np.mean(needed),
        "n_of": len(needed),
    }


def misses(values: list[float]) -> dict[str, float]:
    """Median and 90th percentile of the absolute error, and the median of the signed error."""
    size = np.abs(values)
    return {
        "median": float(np.nanmedian(size)),
        "p90": float(np.nanquantile(size, 0.9)),
        "bias": float(np.nanmedian(values)),
    }


def pilot_alone(predicted: list[ll.ProbeRun], curves: list[list[ErrorCurve]], cut: int) -> dict[str, Any]:
    """Errors predicted from a pilot alone against the mean of the other seeds' probes."""
    log, _ = logs(curves)
    truth, sizes = others(log), curves[0][0].sizes
    ahead = [[head.curve_without_sink for head in one.records] for one in predicted]
    error = np.log([[curve.error for curve in one] for one in ahead])
    low, high = np.moveaxis(np.log([[curve.interval for curve in one] for one in ahead]), 2, 0)
    fitted = np.array([[curve.rate.slope for curve in one] for one in curves])  # type: ignore[union-attr]
    slopes = np.array([[curve.rate.slope for curve in one] for one in ahead])  # type: ignore[union-attr]
    inside = (low <= truth) & (truth <= high)
    found: dict[str, Any] = {"rate_miss": np.abs(slopes - others(fitted)).mean(), "covered": inside.mean((0, 1))}
    return found | {str(n): misses((error - truth)[..., sizes.index(n)].ravel()) for n in (cut, sizes[-1])}


if __name__ == "__main__":
    model, text, *device = sys.argv[1:]
    cases = CASES | {"smollm2": ON_GPU[text]} if device == ["cuda"] else CASES
    case(load(model, device=device[0] if device else "cpu"), text, **cases[model if model in cases else "minilm"])
