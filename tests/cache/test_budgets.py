"""Budgets of random keys: error curves of a probe, in the contexts of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from head_cases import SIZES, head_record, probe_run
from limitlens.cache.budgets import policy_total, probe_errors
from limitlens.cache.cut import CutCurves, keys_below
from limitlens.errors import Array
from limitlens.probing.record import Sink
from limitlens.statistics.error_curve import ErrorCurve

N = np.asarray(SIZES, dtype=float)
CONTEXT = 2048


def power(constant: float, rate: float) -> Array:
    return np.asarray(constant * N**-rate)


def exact(constant: float, error: float, context: float) -> int:
    """The budget of e = c/√n."""
    return int(np.ceil(round(1 / (error**2 / constant**2 + 1 / context), 6)))


def errors_of(*heads: Any, layers: tuple[int, ...] = (0,)) -> Array:
    """Errors (layers, heads, sizes) of heads at every number of keys up to the context."""
    sizes = tuple(range(CONTEXT + 1))
    shape = len(layers), len(heads) // len(layers)
    curves = CutCurves(("random",), sizes, np.zeros(()), np.zeros(()), 1, layers)
    return probe_errors(probe_run(list(heads)), curves, np.full(shape, 7.0))


def test_errors_of_random_keys_are_those_of_the_curve_in_a_finite_context() -> None:
    """Of C keys, n have the error e(n) √(1 − n/C), so that budgets are those of n(ε)."""
    heads = [head_record(layer, head, errors=power(1 + head, 0.5)) for layer in (0, 2) for head in (0, 1)]
    errors = errors_of(*heads, layers=(0, 2))
    assert errors.shape == (2, 2, CONTEXT + 1)
    assert (errors[..., 0] == 7).all()
    assert (errors[..., -1] == 0).all()
    assert errors[1, 1, 512] == pytest.approx(2 / 512**0.5 * (1 - 512 / CONTEXT) ** 0.5)
    for wanted in (0.1, 0.05):
        budgets = keys_below(errors, range(CONTEXT + 1), wanted)
        assert budgets.tolist() == [[exact(1, wanted, CONTEXT), exact(2, wanted, CONTEXT)]] * 2
        assert heads[1].keys_for(wanted, CONTEXT).n == exact(2, wanted, CONTEXT)


def test_a_sliding_window_is_the_context_of_its_layer() -> None:
    errors = errors_of(head_record(0, 0, errors=power(2, 0.5), sliding_window=500))
    assert keys_below(errors, range(CONTEXT + 1), 0.1).tolist() == [[exact(2, 0.1, 500)]]
    assert (errors[..., 500:] == 0).all()


def test_a_head_without_a_curve_keeps_everything() -> None:
    errors = errors_of(head_record(0, 0, errors=np.full(7, np.nan)), head_record(0, 1, errors=power(2, 0.5)))
    assert keys_below(errors, range(CONTEXT + 1), 0.1).tolist() == [[CONTEXT, exact(2, 0.1, CONTEXT)]]


def test_a_sink_is_one_more_key_and_damps_the_error() -> None:
    share = 1000 / (1000 + N)
    rest, beside = power(2, 0.5), power(2, 0.5) * (1 - share)
    sink = Sink("first token", share, 0.5, 1000.0)
    head = head_record(0, 0, errors=beside, without_sink=rest, sink=sink)

    def rest_in(context: float) -> ErrorCurve:
        return head.curve_without_sink.scaled(1 / head.sink_factor(context))

    for context in SIZES:  # at n = C the curve beside the sink itself
        curve = rest_in(context)
        assert np.interp(context, SIZES, curve.error) == pytest.approx(np.interp(context, SIZES, beside))
        np.testing.assert_allclose(curve.stderr, 0.01 * curve.error)
    np.testing.assert_allclose(rest_in(np.inf).error, rest)
    # Here the factor beyond the sizes is exact: the rest's share at 9,000 tokens.
    np.testing.assert_allclose(rest_in(9000).error, rest * 0.9)
    assert head.keys_for(0.1, 9001).n == exact(2 * 0.9, 0.1, 9000) + 1
    assert head.keys_for(0.01, 129).n == exact(2 * 128 / 1128, 0.01, 128) + 1  # the sink is no key of the rest
    learned = head_record(0, 0, errors=beside, without_sink=rest, sink=Sink("learned sink", share, 0.5, 1000.0))
    assert learned.keys_for(0.1, 9000).n == exact(2 * 0.9, 0.1, 9000)
    errors = errors_of(head)
    rest_at = 0.1 * 2 * head.sink_factor(CONTEXT - 1) * (1 - 100 / (CONTEXT - 1)) ** 0.5
    assert errors[0, 0, 101] == pytest.approx(rest_at)
    assert errors[0, 0, 1] == 7  # the sink alone


def test_the_total_of_a_policy_is_over_query_heads_with_a_jackknife_over_windows() -> None:
    squares = np.random.default_rng(3).uniform(0.5, 1.5, (5, 1, 1, 4, 1)) * np.array([0.16, 0.04, 0.0])
    check = CutCurves(("random",), (0, 10, 20), squares, np.ones((5, 1, 4)), 2, (0,))
    found = policy_total(check, "random", np.zeros((1, 2), int), np.array([[10, 0]]), 0.5)
    by_window = squares[:, 0, 0, np.arange(4), [1, 1, 0, 0]]  # two query heads read each key/value head
    errors = np.sqrt(by_window.mean(0))
    assert (found.share, found.within, found.oracle) == (0.25, 1.0, False)
    assert (found.error.value, found.error_high) == pytest.approx(np.quantile(errors, (0.5, 0.9)))
    left = [np.median(np.sqrt(np.delete(by_window, window, 0).mean(0))) for window in range(5)]
    assert found.error.stderr == pytest.approx(np.sqrt(4 * np.var(left)))
