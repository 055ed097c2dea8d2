"""Fitted rates: they recover the slope, and their intervals have the stated coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from limitlens.errors import Array
from limitlens.statistics import fit
from limitlens.statistics.bootstrap import TwoWayBootstrap
from limitlens.statistics.error_curve import ErrorCurve

SIZES = np.geomspace(1000, 30000, 8)


def scattered(rows: Array, moment: int = 1) -> TwoWayBootstrap:
    """Rows (replicates, sizes) of one cluster of queries."""
    return TwoWayBootstrap(rows[None], np.ones((1, rows.shape[1])), moment, 0, np.zeros((0, rows.shape[1])))


def fit_rate(rows: Array, moment: int = 1, usable: Array | None = None) -> fit.Rate | None:
    return fit.fit_rate(SIZES, scattered(rows, moment), usable)


def local_slopes(rows: Array) -> tuple[Array, Array]:
    return ErrorCurve.of(SIZES, rows, moment=1).local_slopes


def nested_errors(rng, replicates, slope=0.5):
    """|mean of the first n| of one random walk per replicate, bent to decay like n^−slope: columns are correlated."""
    steps = np.diff(SIZES, prepend=0)
    walk = np.cumsum(rng.normal(size=(replicates, len(SIZES))) * np.sqrt(steps), axis=1)
    return np.abs(walk) / np.sqrt(SIZES) * SIZES**-slope


@pytest.mark.parametrize("replicates", [12, 60])
def test_intervals_cover_the_true_slope_at_their_stated_rate(replicates):
    rng = np.random.default_rng(0)
    rounds, hits, deviations = 400, 0, []
    for _ in range(rounds):
        rate = fit_rate(nested_errors(rng, replicates, slope=0.35))
        hits += rate.interval[0] <= 0.35 <= rate.interval[1]
        deviations.append((rate.slope - 0.35) / rate.stderr)
    low, high = stats.binomtest(hits, rounds).proportion_ci(0.999)
    assert low <= 0.95 <= high, hits / rounds
    assert 0.8 < np.std(deviations) < 1.3


def test_intervals_know_of_rare_replicates_that_carry_the_mean():
    """Lognormal squared errors: 0.914 of the intervals hold the slope with replicates − 1 degrees of freedom."""
    rng, rounds, hits = np.random.default_rng(1), 1000, 0
    for _ in range(rounds):
        steps = rng.normal(size=(60, len(SIZES)))
        walk = np.cumsum(steps, axis=1) / np.sqrt(1 + np.arange(len(SIZES)))
        rate = fit_rate(np.exp(1.2 * walk) * SIZES**-0.7, moment=2)
        hits += rate.interval[0] <= 0.35 <= rate.interval[1]
    assert 0.93 <= hits / rounds <= 0.97, hits / rounds


def test_standard_errors_know_that_nested_sizes_are_correlated():
    """Replicates that each decay at a rate of their own: shuffling sizes between them hides a part of the scatter.

    With w the weights of the line at x = ln n − ln n₁, 1 − √Σw²x² of it: 28%.
    """
    rng = np.random.default_rng(1)

    def curves():
        return 0.1 * (SIZES / SIZES[0]) ** -(0.5 + 0.1 * rng.normal(size=(40, 1)))

    fits = [fit_rate(curves()) for _ in range(100)]
    scatter = np.std([fit.slope for fit in fits])
    assert np.mean([fit.stderr for fit in fits]) == pytest.approx(scatter, rel=0.2)
    shuffled = [fit_rate(np.stack([rng.permutation(c) for c in curves().T], 1)).stderr for _ in range(20)]
    x = np.log(SIZES / SIZES[0])
    expected = np.sqrt(np.sum((x * (x - x.mean())) ** 2)) / np.sum((x - x.mean()) ** 2)
    assert expected == pytest.approx(0.715, abs=0.001)
    assert np.mean(shuffled) == pytest.approx(expected * scatter, rel=0.1)


def test_exact_power_and_logarithmic_laws_are_distinguished():
    rng = np.random.default_rng(2)
    noise = np.exp(rng.normal(scale=0.05, size=(50, len(SIZES))))
    power = fit_rate(3 * SIZES**-0.4 * noise)
    assert power.law == "power"
    assert power.evidence > 10
    assert power.slope == pytest.approx(0.4, abs=0.01)
    assert power.constant == pytest.approx(3, rel=0.1)
    vague = fit_rate(2 / np.sqrt(np.log(SIZES)) * noise)
    assert vague.evidence < 0
    assert vague.law == "undecided"  # the evidence leans to the logarithm, and does not decide
    log = fit_rate(2 / np.sqrt(np.log(SIZES)) * noise**0.2)
    assert log.law == "log"
    assert log.evidence < -10
    assert log.log_exponent == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("noise", [0.1, 0.4])
@pytest.mark.parametrize(
    "law",
    [
        lambda n: np.sqrt((1 + 200 / n) / n),
        lambda n: (1 + 10 / np.sqrt(n)) / np.sqrt(n),
        lambda n: n**-0.2 + 10 * n**-0.7,
    ],
)
def test_slopes_that_level_off_are_no_logarithm(law, noise):
    """Local slopes fall from .75 to .53 and the like, then stay: against n^−β alone, 41 of these 60 fits say "log"."""
    sizes = np.geomspace(100, 10_000, 9)
    for seed in range(10):
        scatter = np.random.default_rng(seed).normal(scale=noise, size=(300, 9))
        rate = fit.fit_rate(sizes, scattered(law(sizes) * np.exp(scatter)))
        assert rate.law != "log"
        assert rate.evidence > -2.5


def test_evidence_is_calibrated_on_correlated_sizes():
    """Under the true law the misfit is χ² with sizes − 2 degrees of freedom, though its covariance is estimated."""
    rng = np.random.default_rng(3)
    misfits = [fit_rate(nested_errors(rng, 200)).misfit for _ in range(200)]
    # The smaller of two nested-in-nothing laws' misfits is a little below the true law's.
    assert 0.7 < np.mean(misfits) < 1.1


def test_the_misfit_is_calibrated_with_few_replicates():
    """15 correlated Gaussian replicates at five sizes: χ² is 1 per degree of freedom, and 1.4 if not shrunk."""
    rng, x, count = np.random.default_rng(6), np.log(SIZES[:5]), 15
    mix = np.tril(np.ones((5, 5))) + np.eye(5)
    draws = rng.standard_normal((4000, count, 5)) @ mix.T
    misfits = [fit._misfit(x, rows.mean(0), np.cov(rows.T) / count, count) / 3 for rows in draws]
    assert np.mean(misfits) == pytest.approx(1, abs=4 * np.std(misfits) / np.sqrt(len(draws)))


def test_unusable_sizes_are_left_out():
    rng = np.random.default_rng(4)
    errors = SIZES**-0.5 * np.exp(rng.normal(scale=0.01, size=(30, len(SIZES))))
    floored = np.maximum(errors, 0.01)
    usable = floored.mean(0) > 0.0105
    rate = fit_rate(floored, usable=usable)
    assert rate.slope == pytest.approx(0.5, abs=0.03)
    assert len(rate.used) == usable.sum() < len(SIZES)
    assert fit_rate(errors, usable=np.arange(len(SIZES)) < 2) is None
    assert fit_rate(errors[:1]) is None


def test_root_mean_squares_are_fitted_as_such():
    """E|e| and RMS decay at different rates when the tails of e change with n: here P(e = 1) = 1/√n."""
    rng = np.random.default_rng(7)
    hits = (rng.random((20_000, len(SIZES))) < SIZES**-0.5).astype(float)
    assert fit_rate(hits).slope == pytest.approx(0.5, abs=0.05)
    assert fit_rate(hits, moment=2).slope == pytest.approx(0.25, abs=0.03)


def test_local_slopes_see_a_bend():
    rng = np.random.default_rng(5)
    bent = np.where(SIZES < 5000, SIZES**-0.2, 5000**0.3 * SIZES**-0.5)
    slopes, stderr = local_slopes(bent * np.exp(rng.normal(scale=0.02, size=(100, len(SIZES)))))
    assert abs(slopes[0] - 0.2) < 4 * stderr[0]
    assert abs(slopes[-1] - 0.5) < 4 * stderr[-1]


def test_the_size_that_would_decide_between_two_laws_decides():
    """Curves of seven sizes with errors of 30% per replicate: the median size to decide decides nine times in ten."""

    def curve(law, last, seed):
        sizes = tuple(int(n) for n in np.geomspace(100, last, 7))
        noise = 0.3 * np.random.default_rng(seed).standard_normal((30, 7))
        return ErrorCurve.of(sizes, law(np.array(sizes, dtype=float)) * np.exp(noise), moment=1, seed=seed).rate

    rates = [curve(lambda n: n**-0.15, 3000, seed) for seed in range(15)]
    found = [rate for rate in rates if rate.law == "undecided"]
    assert len(found) > 12
    at = {name: float(np.median([rate.decides_at(name) for rate in found])) for name in ("power", "log")}
    assert 3000 < at["power"] < at["log"]
    laws = {"power": lambda n: n**-0.15, "log": lambda n: np.log(n) ** -0.95}
    for name, law in laws.items():
        assert np.mean([curve(law, at[name], seed).law == name for seed in range(100, 140)]) > 0.7
    assert curve(lambda n: n**-0.5, 1e6, 0).decides_at("power") is None  # decided already
