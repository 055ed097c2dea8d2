"""Checks that are too slow for the tests: `make soak` runs them and saves their numbers in validation/results/.

`numbers`: rates and constants of the theory. `coverage`: coverage of the intervals of studies. `probes`: agreement of
probes of a real model with different seeds. `kills`: whether jobs that are killed and resumed end with the same result
as without kills. `fuzz`: outcomes of 10,000 hostile calls. `mutations`: share of errors put into the numeric code that
the tests notice. `python -m validation.soak coverage` runs one check. Each line has a number, its expected value and
its tolerance; the exit code is 1 if a number is outside its tolerance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import limitlens as ll
from limitlens.models import load
from limitlens.theory.token_influence import covariance_error_variance_1d, mean_error_covariance
from validation import coverage, predict
from validation.__main__ import RESULTS

LINE = ll.Gaussian(0.0, 1.0)


def rates(horizon: float, replicates: int, expected: dict[str, float]) -> list[dict[str, object]]:
    """Fitted slopes on n = 1e3..1e5 in one dimension, within 0.03."""
    curve = ll.study(LINE, ll.Head(horizon), "1000:100000:9", replicates=replicates)
    rows: list[dict[str, object]] = []
    for name, value in expected.items():
        rate = curve.rate(name)
        assert rate is not None
        what = f"rate of the {name} at H = {horizon}, {replicates} replicates"
        rows.append(row(what, rate.slope, rate.stderr, value, 0.03))
    return rows


def constants(horizon: float, replicates: int = 8000) -> list[dict[str, object]]:
    """n times the variance of both moments at n = 1e5, within 5%."""
    n = 100_000
    curve = ll.study(LINE, ll.Head(horizon), [n], replicates=replicates, queries=64, seed=1)
    predicted = {
        "mean": mean_error_covariance([[1.0]], [[horizon]])[0, 0],
        "covariance": covariance_error_variance_1d(horizon),
    }
    rows = []
    for name, value in predicted.items():
        squared = n * (curve.replicate_errors[name][:, 0] ** 2 - curve.query_noise[name][:, 0])
        stderr = float(squared.std() / np.sqrt(replicates))
        what = f"n Var of the {name} at H = {horizon}, n = 1e5"
        rows.append(row(what, float(squared.mean()), stderr, value, 0.05 * value))
    return rows


def row(what: str, measured: float, stderr: float, expected: float, tolerance: float) -> dict[str, object]:
    passed = bool(abs(measured - expected) <= tolerance)
    print(f"{what}: {measured:.4f} ± {stderr:.4f}, expected {expected:.4f} ± {tolerance:.4f}", flush=True)
    return {"what": what, "measured": measured, "stderr": stderr, "expected": expected, "passed": passed}


def numbers() -> list[dict[str, object]]:
    """Rates and constants of the theory, saved in soak.json."""
    rows = rates(0.5, 1600, {"mean": 0.5})
    rows += rates(1.5, 1600, {"mean": 0.335, "covariance": 0.267})
    for horizon in (0.3, 0.5, 0.7):
        rows += constants(horizon)
    return rows


def covered() -> list[dict[str, object]]:
    """Bias of errors from few queries and coverage of 95% intervals, saved in coverage.json."""
    found = [row(what, excess, stderr, 0.0, allowed) for what, excess, stderr, allowed in coverage.bias()]
    return found + [row(what, share, stderr, 0.95, allowed) for what, share, stderr, allowed in coverage.run()]


def probes() -> list[dict[str, object]]:
    """Probes with six seeds: share of points beyond two standard errors, and coverage of extrapolated n(ε)."""
    rows = []
    for text in predict.TEXTS:
        found = predict.case(load("minilm"), text, **predict.CASES["minilm"])
        beyond, covered = float(found["points"]["beyond_2"]), float(found["extrapolation"]["n_covered"])
        rows.append(row(f"points beyond 2 standard errors, minilm on {text}", beyond, 0.0, 0.055, 0.025))
        rows.append(row(f"extrapolated n(ε) covered, minilm on {text}", covered, 0.0, 0.95, 0.05))
    return rows


def kills(count: int = 1000) -> list[dict[str, object]]:
    """Number of long jobs, killed at random moments and resumed, whose result differs from a run without kills."""
    script = Path(__file__).parents[1] / "tests" / "kill_cases.py"
    done = subprocess.run([sys.executable, str(script), str(count), "1"], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    told = f"{found['kills']} kills, of which {found['half_written']} while a checkpoint was being written"
    return [row(f"{told}: jobs of {found['ended']} that ended otherwise", len(found["different"]), 0.0, 0.0, 0.0)]


def hostile() -> list[dict[str, object]]:
    """10,000 hostile calls and files (validation/fuzz.py), saved in fuzz.json."""
    from validation import fuzz

    return fuzz.run()


def mutated() -> list[dict[str, object]]:
    """Mutations that the tests notice (validation/mutations.py), in a process that has not imported the sources."""
    if code := subprocess.run([sys.executable, "-m", "validation", "mutations"]).returncode:
        sys.exit(code)
    rows: list[dict[str, object]] = json.loads((RESULTS / "mutations.json").read_text())
    return rows


SECTIONS: dict[str, tuple[str, Callable[[], list[dict[str, object]]]]] = {
    "numbers": ("soak.json", numbers),
    "coverage": ("coverage.json", covered),
    "probes": ("probes.json", probes),
    "kills": ("kills.json", kills),
    "fuzz": ("fuzz.json", hostile),
    "mutations": ("mutations.json", mutated),
}


def main() -> None:
    names, passed = sys.argv[1:] or list(SECTIONS), True
    if unknown := [name for name in names if name not in SECTIONS]:
        sys.exit(f"validation.soak: there is no {unknown[0]!r}; expected some of {', '.join(SECTIONS)}")
    for file, section in (SECTIONS[name] for name in names):
        rows = section()
        (RESULTS / file).write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        passed &= all(bool(found["passed"]) for found in rows)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
