"""One table of statuses: what the code says, what the table says and what the documentation says are the same."""

import re
from pathlib import Path

import numpy as np
import pytest

from limitlens.measures import Gaussian, GaussianMixture, Sphere
from limitlens.theory import summary
from limitlens.theory.heavy import laplace_law, student_law
from limitlens.theory.statuses import CLAIMS

ROOT = Path(__file__).parents[2]
CASES = [
    (Gaussian(0.0, 1.0), 0.5, 1e6),
    (Gaussian(0.0, 1.0), 3.0, 100),
    (Gaussian(2.0, 1.0), 0.5, 1000),
    (Gaussian(np.zeros(16), 1.0), 0.69 * np.eye(16), 300),
    (GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], 1.0), 0.5, 1000),
    (Sphere(3), np.eye(3), 1000),
]


def statuses(document):
    """Names in the table of statuses, with the status of each number of a summary."""
    for part in ("rates", "uniform"):
        yield from ((name, found["status"]) for name, found in document[part].items())
    yield from (("local_rates", found["status"]) for found in document.get("local_rates", {}).values())
    for part in ("constants", "curve", "hardmax"):
        for name, found in (document.get(part) or {}).items():
            if name != "n":
                yield f"{part}.{name}".replace("relative_", ""), found["status"]
    for query in document["queries"]:
        parts = {name: found for name, found in query.items() if isinstance(found, dict)}
        yield from ((name, found["status"]) for name, found in parts.items() if "status" in found)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_status_of_a_summary_is_one_of_the_table(case):
    law, A, n = CASES[case]
    found = list(statuses(summary(law, A, n).document()))
    assert len(found) > 12
    for name, status in found:
        allowed = {CLAIMS[name].status, CLAIMS[name].otherwise} - {None}
        assert status in {one.value for one in allowed}, name


def test_statuses_of_heavy_tails_are_those_of_the_table():
    for tilt, rate in ((0.4, "proved"), (0.75, "verified")):
        assert laplace_law(tilt, 1.0).predictions[0].status.value == rate
    assert [one.status.value for one in laplace_law(2.0, 1.0).predictions] == ["proved", "verified", "verified"]
    assert [one.status.value for one in student_law(3.0).predictions] == ["proved", "verified", "verified"]


def test_the_documentation_shows_the_table():
    lines = (ROOT / "docs/theory.md").read_text(encoding="utf-8").splitlines()
    head = lines.index("| prediction | formula | status | range of this status | otherwise | test |")
    shown = [line[2:-2].rsplit(" | ", 1) for line in lines[head + 2 : head + 2 + len(CLAIMS)]]
    for (name, claim), (row, test) in zip(CLAIMS.items(), shown, strict=True):
        otherwise = claim.otherwise.value if claim.otherwise else "–"
        cells = (f"`{name}`", claim.formula, claim.status.value, claim.where, otherwise)
        assert row == " | ".join(cell.replace("|", "\\|") for cell in cells)
        assert re.fullmatch(r"`\w+::test_\w+`", test) or (test == "–" and claim.status.value == "heuristic")
    assert lines[head + 2 + len(CLAIMS)] == ""


@pytest.mark.parametrize("page", ["theory.md", "scaling.md"])
def test_every_test_that_a_table_names_exists(page):
    named = set(re.findall(r"`(\w+)::(test_\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert len(named) > 20
    for file, name in named:
        paths = (ROOT / "tests").glob(f"*/test_{file}*.py")
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in paths), (file, name)


def test_nothing_calls_a_drawn_line_a_bound():
    drawn = [claim for claim in CLAIMS.values() if claim.status.value == "drawn"]
    assert len(drawn) == 2
    assert all("no bound" in claim.where for claim in drawn)
    assert "not proved" in drawn[0].status.meaning
