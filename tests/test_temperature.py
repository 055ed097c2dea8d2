"""Temperatures: on Gaussian scores the factor does what it says, and the schedules beside it are their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from limitlens.budgets.temperature import effective_at, temperatures
from limitlens.errors import InputError

SIZES = (64, 256, 1024, 4096)


def effective(spread: float, n: int, seed: int, rows: int = 400) -> float:
    """Mean 1/Σw² of n Gaussian scores."""
    scores = spread * np.random.default_rng([seed, n]).standard_normal((rows, n))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return float((weights.sum(1) ** 2 / np.square(weights).sum(1)).mean())


def document(window: int, curves: list[list[float]], **changes: Any) -> dict[str, Any]:
    """As much of a probe's document as temperatures need: one head per curve."""
    heads = [
        {"layer": 0, "head": head, "n": list(SIZES), "effective_tokens": curve, "local_dimension": 8.0}
        for head, curve in enumerate(curves)
    ]
    return {"model": "m", "model_sha256": "1", "window": window, "heads": heads} | changes


def gaussian(window: int, spreads: list[float], seed: int) -> dict[str, Any]:
    return document(window, [[effective(spread, n, seed) for n in SIZES] for spread in spreads])


def test_the_factor_keeps_the_effective_tokens_of_gaussian_scores() -> None:
    spreads = [0.5, 1.0, 2.0, 3.0, 4.0]
    found = temperatures(gaussian(256, spreads, 1), gaussian(4096, spreads, 2))
    for spread, head in zip(spreads, found.heads, strict=True):
        assert head.factor is not None
        assert head.effective_tokens is not None
        assert effective(head.factor * spread, 4096, 3) == pytest.approx(head.effective_tokens[0], rel=0.08)
    factors = [head.factor for head in found.heads]
    assert factors == sorted(factors, reverse=True)  # the flatter a head, the more it takes


def test_a_head_whose_scores_spread_more_in_longer_windows_needs_less() -> None:
    short = gaussian(256, [2.0], 1)
    same, wider = (temperatures(short, gaussian(4096, [spread], 2)).heads[0] for spread in (2.0, 3.0))
    assert same.factor is not None
    assert wider.factor is not None
    assert wider.factor == pytest.approx(same.factor * 2 / 3, rel=0.06)


def test_schedules_stand_beside_it() -> None:
    first, last = gaussian(256, [2.0], 1), gaussian(1024, [2.0], 2)
    found = temperatures(first, last, context=4096)
    assert found.log == pytest.approx(np.log(4096) / np.log(256))
    assert found.yarn == pytest.approx((0.1 * np.log(16) + 1) ** 2)
    assert found.heads[0].critical == pytest.approx(16 ** (2 / 8))
    assert found.extrapolated
    assert found.document()["status"] == "heuristic"
    assert temperatures(last, first, context=4096) == found  # the order of the runs does not matter
    assert not temperatures(first, last).extrapolated


def test_the_context_extends_the_power_law_of_the_two_windows() -> None:
    """With N ~ √n through both windows, the factor for 4096 is that of a run that measured N there."""
    short, middle, long = (document(window, [[np.sqrt(n) for n in SIZES]]) for window in (64, 1024, 4096))
    extended, direct = temperatures(short, middle, context=4096), temperatures(short, long)
    assert extended.heads[0].factor == pytest.approx(direct.heads[0].factor)


def test_what_cannot_be_given_is_said() -> None:
    flat = [[float(n) for n in SIZES]]
    head = temperatures(document(256, flat), document(1024, flat)).heads[0]
    assert head.factor is None
    assert "no factor on its scores makes 256 of 1,024 keys share the mass" in head.reason
    outside = temperatures(document(256, flat), document(8192, flat)).heads[0]
    assert outside.effective_tokens is None
    assert "no samples of 8,192 tokens" in outside.reason
    absent = temperatures(document(256, flat), document(1024, [])).heads[0]
    assert absent.reason == "the second run did not measure this head"


@pytest.mark.parametrize(
    ("second", "context", "words"),
    [
        ({"window": 256}, None, "both runs have windows of 256"),
        ({"model": "other"}, None, "expected one model"),
        ({"model_sha256": "2"}, None, "expected one model"),
        ({}, 128, "expected a context from 256 to 10,240"),
        ({}, 20_000, "expected a context from 256 to 10,240"),
    ],
)
def test_bad_input_is_told(second: dict[str, Any], context: int | None, words: str) -> None:
    curve = [[float(n) ** 0.5 for n in SIZES]]
    with pytest.raises(InputError, match=words):
        temperatures(document(256, curve), document(**{"window": 1024, "curves": curve} | second), context)


def test_effective_tokens_are_read_off_between_sizes() -> None:
    head = document(256, [[float(n) ** 0.7 for n in SIZES]])["heads"][0]
    assert effective_at(head, 500) == pytest.approx(500**0.7)
    assert effective_at(head, 63) is None
