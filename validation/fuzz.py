"""Fuzzing with the strategies of tests/fuzz_cases.py, with more cases than the tests: how many end as documented."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz_cases import CASES, SURFACES, check

TIMES = 20  # as many cases as the tests have


def run(times: int = TIMES, first: int = 1) -> list[dict[str, Any]]:
    """One row per kind of case: number of cases, their outcomes, and the failures."""
    return [surface(name, times * count, first) for name, count in CASES.items()]


def surface(name: str, count: int, first: int) -> dict[str, Any]:
    codes, faults, seconds, begun = Counter[str](), Counter[str](), [0.0], time.perf_counter()

    @seed(first)
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=False, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SURFACES[name])
    def tried(case: tuple[list[str], dict[str, str]]) -> None:
        outcome = check(case)
        codes[str(outcome.code)] += 1
        seconds.append(outcome.seconds)
        for fault in outcome.faults:
            if not faults[fault]:
                print(f"{fault}: {' '.join(outcome.arguments)!r}", flush=True)
            faults[fault] += 1

    tried()
    row = {"cases": codes.total(), "exit codes": dict(codes), "faults": faults.total(), "slowest": max(seconds)}
    print(f"{name}: {row}, {time.perf_counter() - begun:.0f} s", flush=True)
    return {"what": name, **row, "kinds": list(faults), "passed": not faults}
