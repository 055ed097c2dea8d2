"""Error curves: closed forms for power laws, cases without a fit or a crossing, and coverage of intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.statistics.bootstrap import TwoWayBootstrap
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.statistics.fit import fit_rate
from limitlens.statistics.tokens_for import CONTEXTS, ERRORS, MARKS, TokensFor, answers
from limitlens.theory.exact_bootstrap import PilotErrors

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


def power_law(constant=3.0, slope=0.5, moment=2, replicates=6, **known):
    """Replicates that all lie on e = c n^{−β}: everything read off them is exact."""
    errors = constant * np.asarray(SIZES, float) ** -slope
    return ErrorCurve.of(SIZES, np.tile(errors**moment, (replicates, 1)), moment=moment, **known)


def nested(rng, replicates, dim):
    """Squared errors |mean of the first n tokens|²/d of nested Gaussian samples: their expectation is 1/n."""
    steps = np.sqrt(np.diff(SIZES, prepend=0))
    walk = np.cumsum(rng.normal(size=(replicates, len(SIZES), dim)) * steps[:, None], axis=1)
    return (walk**2).mean(-1) / np.square(SIZES)


@pytest.mark.parametrize("moment", [1, 2])
@pytest.mark.parametrize("slope", [0.5, 0.2])
def test_a_power_law_is_read_off_exactly(moment, slope):
    curve = power_law(slope=slope, moment=moment)
    assert curve.error == pytest.approx(3 * np.asarray(SIZES, float) ** -slope)
    assert curve.stderr == pytest.approx(np.zeros(len(SIZES)))
    assert curve.rate.slope == pytest.approx(slope)
    assert curve.rate.constant == pytest.approx(3)
    assert curve.local_slopes[0] == pytest.approx(np.full(len(SIZES) - 1, slope))
    for n in (100, 1000, 4000):
        found = curve.tokens_for(3 * n**-slope)
        assert (found.n, found.interval, found.mark) == (n, (n, n), "measured")
        assert curve.predict(n)[0] == pytest.approx(3 * n**-slope)
    for n in (20, 30_000):  # outside the sizes, on the same power law
        found = curve.tokens_for(3 * n**-slope)
        assert (found.n, found.mark) == (n, "extrapolated")
        assert curve.predict(n)[0] == pytest.approx(3 * n**-slope)


@pytest.mark.parametrize("context", [100, 512, 3000, 32_768, 10**6])
@pytest.mark.parametrize("error", [0.5, 0.3, 0.1, 0.05])
def test_a_finite_context_needs_fewer_tokens_by_the_closed_form(error, context):
    """c/√n √(1 − n/C) = ε is solved by n = 1/(ε²/c² + 1/C)."""
    found = power_law().tokens_for(error, context)
    exact = 1 / (error**2 / 9 + 1 / context)
    assert found.n == math.ceil(round(exact, 6))
    assert found.interval == (found.n, found.n)
    assert found.extrapolated == (not SIZES[0] <= exact <= SIZES[-1])
    assert power_law().predict(exact)[0] * np.sqrt(1 - exact / context) == pytest.approx(error)


def test_answers_past_ten_times_the_largest_size_are_beyond():
    curve = power_law()
    endless = curve.tokens_for(3 / math.sqrt(41_000))
    assert (endless.n, endless.interval, endless.mark) == (None, (None, None), "beyond")
    assert str(endless) == "more than 40,960 tokens"
    assert endless.document() is None
    assert curve.tokens_for(3 / math.sqrt(40_000)).mark == "extrapolated"
    whole = curve.tokens_for(1e-4, 10**6)
    assert (whole.n, whole.mark) == (10**6, "beyond")
    assert str(whole) == "1,000,000 tokens (95%: 1,000,000 to 1,000,000, the whole context)"
    assert whole.document() is None


def test_sizes_near_the_floor_are_neither_fitted_nor_crossed():
    """Errors that stop falling at their floor say nothing of the limit, and nothing of n(ε)."""
    clean = 3 * np.asarray(SIZES, float) ** -0.5
    stuck = np.where(np.asarray(SIZES) > 512, clean[3], clean)
    floor = stuck / np.where(np.asarray(SIZES) > 512, 9, 11)  # the last three lie within ten times of it
    curve = ErrorCurve.of(SIZES, np.tile(stuck**2, (6, 1)), floor=floor)
    assert curve.usable.tolist() == [True] * 4 + [False] * 3
    assert curve.rate.used == SIZES[:4]
    assert curve.rate.slope == pytest.approx(0.5)
    found = curve.tokens_for(3 / math.sqrt(2000))
    assert (found.n, found.mark) == (2000, "extrapolated")
    buried = ErrorCurve.of(SIZES, np.tile(stuck**2, (6, 1)), floor=np.where(np.arange(7) < 2, 0.0, 1.0))
    assert buried.rate is None
    assert buried.tokens_for(0.1).why == "3 sizes with errors above the numerical floor are needed"


def test_a_zero_limit_and_few_sizes_give_a_reason():
    zero = power_law().scaled(0.0)
    assert not zero.defined
    assert zero.rate is None
    assert str(zero.tokens_for(0.1)) == "not known: the limit is 0, so there is no relative error"
    few = ErrorCurve.of((10, 20), np.ones((4, 2)))
    assert few.rate is None
    assert str(few.tokens_for(0.1)) == "not known: 3 sizes or more are needed"
    assert few.tokens_for(0.1).mark == "not known"
    assert few.tokens_for(0.1).document() is None


def test_scales_and_finite_pools_are_taken_out():
    half = power_law().scaled(2.0)
    assert half.tokens_for(0.1).n == power_law().tokens_for(0.2).n == 225
    correction = np.sqrt(1 - np.asarray(SIZES) / 5000)
    moments = power_law().error_moments[0] * correction**2
    seen = ErrorCurve.of(SIZES, moments, finite_population_correction=correction)
    assert seen.error == pytest.approx(power_law().error)
    by_replicate = ErrorCurve.of(SIZES, moments, finite_population_correction=np.tile(correction, (6, 1)))
    for curve in (seen, by_replicate):  # the errors measured against the pool alone would give a rate of 0.66
        assert (curve.rate.slope, curve.rate.constant) == pytest.approx((0.5, 3))
        assert curve.local_slopes[0] == pytest.approx(np.full(len(SIZES) - 1, 0.5))


def test_past_a_rising_end_a_curve_stays_level():
    """Beyond the sizes a rising curve continues at the geometric mean of its last three errors: it does not grow."""
    errors = np.array([0.4, 0.3, 0.25, 0.2, 0.20, 0.21, 0.23])
    curve = ErrorCurve.of(SIZES, np.tile(errors**2, (6, 1)))
    level = np.exp(np.log(errors[-3:]).mean())
    assert curve.predict(4096)[0] == pytest.approx(0.23)
    for n in (5000, 20_000, 40_960):
        assert curve.predict(n) == pytest.approx([level] * 3)


def test_what_a_curve_and_an_answer_print():
    assert str(TokensFor(900, (850, 1000), extrapolated=False)) == "900 tokens (95%: 850 to 1,000)"
    assert str(TokensFor(9000, (8000, None))) == "9,000 tokens (95%: 8,000 to more, extrapolated)"
    assert TokensFor(9000, (8000, None)).document() == {"n": 9000, "interval": [8000, None], "extrapolated": True}
    kept = TokensFor(900, (850, None)).plus(4)
    assert (kept.n, kept.interval) == (904, (854, None))
    assert repr(power_law()).startswith("<ErrorCurve: 0.375 at n = 64 to 0.0469 at n = 4,096, rate 0.500")
    for error in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="positive"):
            power_law().tokens_for(error)
    with pytest.raises(InputError, match="at least 1"):
        power_law().tokens_for(0.1, 0)


def test_answers_of_a_page_are_those_of_the_curve():
    curves = [power_law(), power_law().scaled(0.0)]
    found = answers([curve.tokens_for for curve in curves], ERRORS, CONTEXTS)
    for i, curve in enumerate(curves):
        for j, error in enumerate(ERRORS):
            for k, context in enumerate(CONTEXTS):
                one = curve.tokens_for(error, math.inf if context is None else context)
                assert (found["n"][i][j][k], found["low"][i][j][k]) == (one.n, one.interval[0])
                assert (found["high"][i][j][k], MARKS[found["mark"][i][j][k]]) == (one.interval[1], one.mark)
    assert {mark for row in found["mark"][0] for mark in row} == {0, 1, 2}
    assert {mark for row in found["mark"][1] for mark in row} == {3}


def test_the_rate_is_that_of_the_rows():
    rows = nested(np.random.default_rng(3), 30, 4)
    curve = ErrorCurve.of(SIZES, rows, seed=5)
    alone = TwoWayBootstrap(rows[None], np.ones((1, len(SIZES))), 2, 5, np.zeros((0, len(SIZES))))
    assert curve.rate == fit_rate(np.asarray(SIZES), alone)


@pytest.mark.parametrize("dim", [1, 4])
def test_intervals_of_the_number_of_tokens_cover_at_their_stated_rate(dim):
    """20 replicates of nested samples: an answer between two sizes, and one at 2.4 times the largest."""
    rng, rounds = np.random.default_rng(1), 800
    inside = outside = 0
    for _ in range(rounds):
        curve = ErrorCurve.of(SIZES, nested(rng, 20, dim))
        inside += _covers(curve.tokens_for(700**-0.5), 700)
        outside += _covers(curve.tokens_for(10_000**-0.5), 10_000)
    assert 0.93 <= inside / rounds <= 0.975, inside / rounds
    assert 0.93 <= outside / rounds <= 0.975, outside / rounds


def _covers(found, n):
    low, high = (math.inf if end is None else end for end in found.interval)
    return low <= n <= high


def test_an_interval_is_the_error_and_two_standard_errors():
    curve = ErrorCurve.of(SIZES, nested(np.random.default_rng(6), 50, 4))
    half = 1.96 * curve.stderr
    assert curve.interval == pytest.approx(np.stack((curve.error - half, curve.error + half)))


def test_a_predicted_power_law_is_read_off_exactly():
    sizes = np.asarray(SIZES, float)
    logs = np.log(3 * sizes**-0.3) + np.array([[0.0], [-0.1], [0.1]])
    rate = PredictedErrors(sizes, logs).rate(SIZES)
    assert (rate.slope, rate.constant) == pytest.approx((0.3, 3))


def test_predictions_from_four_windows_scatter_as_their_mean_does():
    """Resamples of r windows have (r − 1)/r of the variance of their mean: with four a quarter is missing."""
    errors, ones = 1 + 0.02 * np.random.default_rng(7).standard_normal((4, 3)), np.ones((4, 3))
    halves = np.ones((2, 6, 4, 3))
    (found,) = PredictedErrors.of(
        np.array([8, 16, 32]), PilotErrors(errors, ones, ones, halves, halves), np.arange(4), 99, 0
    )
    expected = 0.5 * errors.std(0, ddof=1) / 2  # e is the root of a mean over four windows
    assert found.logs[1:].std(0) == pytest.approx(expected, rel=0.1)
