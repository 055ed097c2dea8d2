"""n(ε), the number of tokens for an error ε, from error curves with known answers, unlimited and finite contexts."""

from __future__ import annotations

import numpy as np
import pytest

from head_cases import SIZES, curve_of
from limitlens.errors import Array
from limitlens.statistics.error_curve import ErrorCurve

N = np.asarray(SIZES, dtype=float)


def power(constant: float, rate: float) -> Array:
    return np.asarray(constant * N**-rate)


def exact(constant: float, error: float, context: float) -> int:
    """The budget of e = c/√n."""
    return int(np.ceil(round(1 / (error**2 / constant**2 + 1 / context), 6)))


@pytest.mark.parametrize("context", [512, 4000, 32_768, np.inf])
@pytest.mark.parametrize("wanted", [0.1, 0.05, 0.01])
def test_a_budget_solves_the_error_in_its_context(wanted: float, context: float) -> None:
    """With e = c/√n the answer is n = 1/(ε²/c² + 1/C)."""
    curve = curve_of(power(2, 0.5))
    budget = curve.tokens_for(wanted, context)
    needed = 1 / (wanted**2 / 4 + 1 / context)
    assert needed <= 40_960  # ten times the largest size
    assert budget.n == np.ceil(round(needed, 6)) == exact(2, wanted, context)
    assert budget.extrapolated == (needed > 4096)
    assert not budget.beyond
    assert curve.predict(needed)[0] * np.sqrt(1 - needed / context) == pytest.approx(wanted, rel=1e-9)


def test_budgets_beyond_the_prediction_are_the_whole_context_or_none() -> None:
    slow = curve_of(power(1, 0.1))
    endless = slow.tokens_for(0.05)
    assert (endless.n, endless.interval, endless.beyond) == (None, (None, None), True)
    bounded = slow.tokens_for(0.05, 1_000_000)
    assert (bounded.n, bounded.beyond) == (1_000_000, True)
    within = slow.tokens_for(0.05, 20_000)
    assert within.n is not None
    assert not within.beyond
    assert 19_000 < within.n < 20_000


def test_few_keys_are_extrapolated_downwards() -> None:
    budget = curve_of(power(2, 0.5)).tokens_for(0.5)
    assert (budget.n, budget.extrapolated) == (16, True)
    assert curve_of(power(2, 0.5)).tokens_for(5.0).n == 1


def test_a_curve_that_rises_again_is_not_trusted() -> None:
    bumpy = np.array([0.3, 0.04, 0.2, 0.1, 0.06, 0.03, 0.02])
    tokens = curve_of(bumpy).tokens_for(0.05).n
    assert tokens is not None
    assert 1024 < tokens < 2048  # not the early dip below 0.05
    rising = np.array([0.3, 0.3, 0.3, 0.3, 0.2, 0.25, 0.3])
    assert curve_of(rising).tokens_for(0.05).beyond


def test_the_interval_covers_the_truth() -> None:
    """20 replicates whose errors scatter by 3%: the 95% interval holds the true n in about 19 of 20 of them."""
    truth = power(2, 0.5)
    generator = np.random.default_rng(0)
    for wanted, n in ((0.1, 400), (0.02, 10_000)):  # inside the sizes, and extrapolated
        hits = 0
        for seed in range(200):
            noisy = truth**2 * (1 + 0.06 * np.sqrt(20) * generator.standard_normal((20, 7)))
            low, high = curve_of(noisy, seed=seed).tokens_for(wanted).interval
            hits += low is not None and low <= n and (high is None or n <= high)
        assert 0.9 <= hits / 200 <= 0.99


@pytest.mark.parametrize(("spread", "tolerance"), [(0.5, 0.08), (2.0, 0.1), (3.0, 0.15)])
def test_random_keys_of_a_finite_context_have_the_planned_error(spread: float, tolerance: float) -> None:
    """Softmax attention over Gaussian tokens: a curve against endless tokens gives the budget in a context of 1,500."""
    generator = np.random.default_rng(1)
    query = generator.standard_normal((32, 4))
    query *= spread / np.linalg.norm(query, axis=1, keepdims=True)  # scores of that standard deviation
    limit = query

    def attend(keys: Array) -> Array:
        weights = np.exp(query @ keys.T)
        return np.asarray((weights @ keys) / weights.sum(1, keepdims=True))

    def error(output: Array, truth: Array) -> float:
        return float(np.sqrt(np.square(output - truth).sum() / np.square(truth).sum()))

    def tokens(n: int) -> Array:
        return generator.standard_normal((n, 4))

    sizes = (100, 200, 400, 800, 1600)
    squares = [[error(attend(tokens(n)), limit) ** 2 for n in sizes] for _ in range(100)]
    curve = ErrorCurve.of(sizes, np.array(squares))
    wanted = float(curve.error[2])
    budget = curve.tokens_for(wanted, 1500).n
    assert budget is not None
    assert 200 < budget < 400  # fewer than the 400 of an endless context
    found = []
    for _ in range(100):
        context = tokens(1500)
        found.append(error(attend(context[:budget]), attend(context)) ** 2)
    assert np.sqrt(np.mean(found)) == pytest.approx(wanted, rel=tolerance)
