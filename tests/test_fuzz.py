"""No call of the command line and no file that it reads ends in a traceback, a hang or half a result.

500 cases, the same ones each time; `python -m validation.soak fuzz` tries 10,000 others.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz_cases import CASES, SURFACES, check


@pytest.mark.parametrize("surface", CASES)
def test_no_hostile_case_breaks_a_promise(surface: str) -> None:
    @settings(max_examples=CASES[surface], suppress_health_check=list(HealthCheck), database=None)
    @given(SURFACES[surface])
    def tried(case: tuple[list[str], dict[str, str]]) -> None:
        outcome = check(case)
        assert not outcome.faults, (outcome.faults, outcome.arguments, outcome.err)

    tried()
