"""Output on terminals that can show only ASCII."""

from __future__ import annotations

import io
import sys

import pytest

from limitlens.cli.ascii import replace_unencodable


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "0.1 ± 0.02, x² ≤ √2 β₀, k̂ é 模"), ("ascii", "0.1 +/- 0.02, x^2 <= sqrt 2 beta0, k e ?")],
)
def test_what_cannot_be_shown_is_spelled(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    replace_unencodable()
    print("0.1 ± 0.02, x² ≤ √2 β₀, k̂ é 模", end="")
    sys.stdout.flush()
    assert raw.getvalue().decode(encoding) == shown


def test_streams_that_cannot_be_changed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    replace_unencodable()
    print("±", end="")
    assert sys.stdout.getvalue() == "±"  # type: ignore[attr-defined]
