"""Compare the documentation with the committed results of the benchmarks and with the tests: `make docs` runs it.

The files bench/results/cache-*.json were measured by version 0.1 and hold its names; `OLD` maps the names of
the docs to them. The script ends with 1 and names the first row that differs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CELL = r"[+−]?\d\.\d{4} ± \d\.\d{4}"
OLD = {
    "priority": "mixed",
    "streaming": "sinks",
    "knorm": "norm",
    "random_eviction": "unweighted",
    "oracle_topk": "top",
}
ALLOCATIONS = ("uniform", "equal error", "least cost")
POLICIES = 9  # policies of the tables, the oracle included


def table(text: str, heading: str) -> list[tuple[Any, ...]]:
    """Matches of a table whose heading matches `heading`: its groups, then its rows as one string."""
    return re.findall(rf"^\| {heading}.*\n\| ---.*\n((?:\|.*\n)+)", text, re.M)


def expect(found: Any, expected: Any, where: str) -> None:
    """End with 1 where the documentation shows other numbers than the results."""
    if found != expected:
        sys.exit(f"docs: {where} shows {found}, the results say {expected}")


def check_cache_tables() -> None:
    """Every cell of the tables of docs/act.md and of the README's table."""
    text = (ROOT / "docs/act.md").read_text()
    files = {n: json.loads((ROOT / f"bench/results/cache-{n}.json").read_text()) for n in (1024, 4096)}
    trials = {(n, round(100 * trial["share"]), trial["corpus"]): trial for n in files for trial in files[n]["trials"]}
    texts = [trial["corpus"] for trial in files[1024]["trials"][:2]]

    def cell(where: tuple[int, int, str], policy: str, allocation: str, quantity: str, form: str) -> str:
        rows = trials[where]["settings"]
        policy = OLD.get(policy, policy)
        (one,) = (row[quantity] for row in rows if (row["choice"], row["allocation"]) == (policy, allocation))
        return f"{one['measured']:{form}} ± {one['stderr']:.4f}".replace("-", "−")

    tables = table(text, r"(\d+)% of ([\d,]+) tokens ")
    expect([found[:2] for found in tables], [(s, n) for n in ("1,024", "4,096") for s in ("25", "50")], "docs/act.md")
    for share, context, rows in tables:
        expect(len(rows.splitlines()), 1 + POLICIES, f"the number of rows for {share}% of {context}")
        for row in rows.splitlines():
            name = re.search(r"`(\w+)`", row)
            where = [(int(context.replace(",", "")), int(share), corpus) for corpus in texts]
            policy, kinds = (name[1], ALLOCATIONS) if name else ("best", ("plan",))
            expected = [cell(one, policy, kind, "divergence", ".4f") for one in where for kind in kinds]
            expect(re.findall(CELL, row), expected, row)
    (rows,) = table(text, "Fisher-weighted − equal error ")
    for row in rows.splitlines():
        policy = re.findall(r"`(\w+)`", row)[0]
        places = [(n, share, corpus) for n in files for share in (25, 50) for corpus in texts]
        expect(re.findall(CELL, row), [cell(p, policy, "least cost", "against_equal", "+.4f") for p in places], row)
    (rows,) = table(text, "share of the cache for an error of ")
    for row in rows.splitlines():
        policy = (re.findall(r"`(\w+)`", row) or ["best"])[0]
        plans = [files[n]["plans"][f"error {error}"] for n in files for error in ("0.05", "0.1", "0.2")]
        shares = [f"{one['share']:.1%}" for plan in plans for one in plan if one["choice"] == OLD.get(policy, policy)]
        expect(re.findall(r"\d+\.\d%", row), shares, row)
    quoted = re.findall(CELL, (ROOT / "README.md").read_text())
    quarter = [rows for share, _, rows in tables if share == "25"]
    expect([number in quarter[i % 4 // 2] for i, number in enumerate(quoted)], [True] * 20, "the README's table")


def check_test_names() -> None:
    """Every test that docs/theory.md names exists."""
    named = set(re.findall(r"`\w+::(test_\w+)`", (ROOT / "docs/theory.md").read_text()))
    found = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    expect(sorted(named - found), [], "docs/theory.md names tests that do not exist: it")


if __name__ == "__main__":
    check_cache_tables()
    check_test_names()
