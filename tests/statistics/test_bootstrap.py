"""Standard errors from two sources, replicates and clusters of queries, without counting the common part twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from limitlens.errors import Array
from limitlens.statistics.bootstrap import student_factor
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.statistics.regimes import Regime, classify, resampled
from limitlens.theory.exact_bootstrap import pilot_errors

SIZES = (64, 128, 256, 512)
CLUSTERS, REPLICATES = 16, 24


def drawn(rng: np.random.Generator, over: float, across: float, both: float) -> ErrorCurve:
    """A curve e = n^−1/2 with noise of replicates, of clusters (in the output too), and of single cells."""
    replicate, cluster = (
        1 + width * rng.standard_normal(count) for width, count in ((over, REPLICATES), (across, CLUSTERS))
    )
    cells = 1 + both * rng.standard_normal((CLUSTERS, REPLICATES, len(SIZES)))
    output = 1 + 0.3 * (cluster - 1)  # a cluster with large errors has large outputs
    error_moments = cluster[:, None, None] * replicate[:, None] * cells / np.array(SIZES)
    mean = output.mean()
    return ErrorCurve(SIZES, error_moments / mean, np.tile((output / mean)[:, None], (1, len(SIZES))))


@pytest.mark.parametrize("widths", [(0.5, 0.0, 0.0), (0.0, 0.4, 0.0), (0.3, 0.3, 0.2), (0.0, 0.0, 0.8)])
def test_standard_errors_are_the_scatter_of_whole_experiments(widths: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(0)
    curves = [drawn(rng, *widths) for _ in range(400)]
    logs = np.log([curve.error for curve in curves])
    stated = np.sqrt(np.mean([np.square(curve.stderr / curve.error) for curve in curves], axis=0))
    assert stated / logs.std(0) == pytest.approx(np.ones(len(SIZES)), abs=0.12)  # 3.5% is the scatter of 400


def test_replicates_alone_would_miss_the_queries() -> None:
    """What a probe said before: replicates share their queries, so their scatter does not know of them."""
    curve = drawn(np.random.default_rng(1), 0.05, 0.5, 0.0)
    alone = ErrorCurve.of(SIZES, curve.rows)
    assert (curve.stderr > 3 * alone.stderr).all()
    wide, narrow = (np.subtract(*one.predict(200)[:0:-1]) for one in (curve, alone))
    assert wide > 3 * narrow
    assert np.diff(curve.tokens_for(0.08).interval) > 3 * np.diff(alone.tokens_for(0.08).interval)


def test_resamples_of_few_replicates_scatter_as_their_standard_error_says() -> None:
    """Resamples of r replicates have (r − 1)/r of the variance of their mean: with four a quarter is missing."""
    rows = 1 + 0.02 * np.random.default_rng(5).standard_normal((4, 3))
    deviations, _ = ErrorCurve.of(SIZES[:3], rows, moment=1)._bootstrap.deviations()
    assert deviations.std(0) == pytest.approx(rows.std(0, ddof=1) / 2, rel=0.05)


def test_intervals_cover() -> None:
    rng, hits = np.random.default_rng(2), []
    for _ in range(300):
        curve = drawn(rng, 0.3, 0.4, 0.3)
        _, low, high = curve.predict(128)
        interval = curve.tokens_for(0.0625).interval
        hits.append(
            (
                low <= 128**-0.5 <= high,
                interval[0] <= 256 <= interval[1],
                curve.rate.interval[0] <= 0.5 <= curve.rate.interval[1],
            )
        )
    assert np.mean(hits, axis=0) == pytest.approx([0.95] * 3, abs=0.035)


def test_a_slope_that_differs_between_windows_is_uncertain() -> None:
    rng = np.random.default_rng(3)
    slopes = 0.5 + 0.1 * rng.standard_normal(CLUSTERS)
    error_moments = np.array(SIZES) ** (-2 * slopes[:, None, None]) * (
        1 + 0.02 * rng.standard_normal((CLUSTERS, REPLICATES, len(SIZES)))
    )
    rate = ErrorCurve(SIZES, error_moments).rate
    assert rate is not None
    assert rate.stderr > 0.01
    assert ErrorCurve.of(SIZES, error_moments.mean(0)).rate.stderr < 0.002  # type: ignore[union-attr]


def of_clusters(effective: Array, top: Array) -> tuple[Array, Array, Array, Array]:
    """Sums of one replicate: effective tokens at four sizes and largest weights of clusters of one query each."""
    sizes = np.array(SIZES, dtype=float)
    return effective[None, :, None] * sizes**0.9, top[None], np.ones(len(top)), sizes


@pytest.mark.parametrize("mixed", [False, True])
def test_a_regime_has_a_certainty(mixed: bool) -> None:
    count = np.full(CLUSTERS, 0.2)
    if mixed:  # a few windows share the mass widely, most do not: the mean is near the border
        count = np.where(np.arange(CLUSTERS) < 3, 0.45, 0.01)
    effective, top, members, sizes = of_clusters(count, np.full(CLUSTERS, 0.1))
    verdict = classify(effective[0].mean(0), sizes, 0.1)
    found = resampled(verdict, effective, top, members, sizes, seed=0)
    assert found.regime is verdict.regime is Regime.AVERAGING
    assert found.agreement is not None
    assert (found.agreement < 0.9) == mixed
    assert ("uncertain" in found.reason) == mixed


@pytest.mark.parametrize(("spread", "converged"), [(1.0, True), (4.0, False), (5.0, False)])
def test_a_pool_that_has_not_converged_is_marked(spread: float, converged: bool) -> None:
    """Gaussian scores of this deviation with values along them: 85,000 tokens give 1.0, 0.7 and 0.5 of the error."""
    rng, sizes, pool, found, true = np.random.default_rng(4), (512, 1024, 2048, 4096), 85_000, [], []
    for _ in range(40):
        token = rng.standard_normal(pool)
        weight = np.exp(spread * (token - token.max()))
        limit = weight @ token / weight.sum()
        sample = [(weight[:n] @ token[:n]) / weight[:n].sum() for n in sizes]
        found.append(np.square(np.array(sample) - limit))
        true.append((sample[-1] - spread) ** 2)
    curve = ErrorCurve.of(sizes, np.array(found), finite_population_correction=np.sqrt(1 - np.array(sizes) / pool))
    assert (curve.pool_share < 0.5) == converged
    assert (curve.error[-1] / np.sqrt(np.mean(true)) > 0.85) == converged


def test_other_windows_of_text_count() -> None:
    """Each experiment has a pool of its own, which moves its whole curve; three halvings tell by how much."""
    rng, width, hits, wide = np.random.default_rng(3), 0.2, [], 0.95
    for _ in range(300):
        curve = drawn(rng, 0.1, 0.1, 0.1)
        moved, halvings = width * rng.standard_normal(), width * rng.standard_normal((3, 1))
        text = student_factor(3) * np.tile(halvings, (1, len(SIZES))) / np.sqrt(3)
        own = replace(curve, error_moments=curve.error_moments * np.exp(2 * moved), text=text)
        (_, low, high), (_, least, most) = own.predict(128), replace(own, text=text[:0]).predict(128)
        interval = own.tokens_for(0.0625).interval
        hits.append(
            (low <= 128**-0.5 <= high, interval[0] <= 256 <= (interval[1] or np.inf), least <= 128**-0.5 <= most)
        )
    told, crossed, without = np.mean(hits, axis=0)
    assert (told, crossed) == pytest.approx((wide, wide), abs=0.035)
    assert without < 0.6


@pytest.mark.parametrize("same", [True, False], ids=["seeds on one text", "other texts"])
def test_standard_errors_are_between_seeds_and_the_text_is_a_second_number(same: bool) -> None:
    """Each run samples 48 of 64 windows, whose mean level moves its curve; pairs of runs on one text, or on two.

    On one text 4.3% of the points differ by more than two standard errors. With the whole variance by windows in the
    standard errors none would, with none of it 71%.
    """
    rng, windows, pool, width, far = np.random.default_rng(5), 64, 48, 0.15, []

    def run(levels: Array) -> ErrorCurve:
        curve, moved = drawn(rng, 0.1, 0.1, 0.1), rng.permutation(levels)[:pool].mean()
        text = np.full((3, len(SIZES)), width / np.sqrt(3))
        moments = curve.error_moments * np.exp(2 * moved)
        return replace(curve, error_moments=moments, text=text, text_share=1 - pool / windows)

    for _ in range(1000):
        texts = width * np.sqrt(pool) * rng.standard_normal((2, windows))
        pair = run(texts[0]), run(texts[0 if same else 1])
        stderr = [one.stderr if same else np.hypot(one.stderr, one.text_stderr) for one in pair]
        far.append(np.abs(pair[0].error - pair[1].error) > 2 * np.hypot(*stderr))
    assert 0.03 <= np.mean(far) <= 0.07
    one, total = pair[0], pair[0].for_other_text
    assert np.hypot(one.stderr, one.text_stderr) == pytest.approx(total.stderr)
    assert one.interval[1] - one.error == pytest.approx(1.96 * one.stderr)
    assert one.predict(128) == total.predict(128)
    tilted = replace(one, text=one.text * np.linspace(0, 1, len(SIZES)))
    assert tilted.rate.stderr < 0.8 * tilted.for_other_text.rate.stderr  # type: ignore[union-attr]


@pytest.mark.parametrize(("shared", "share"), [(0.0, (0.0, 0.7)), (0.3, (0.6, 1.1)), (1.0, (0.6, 1.1))])
def test_a_pilot_separates_scatter_of_windows_and_tokens(shared: float, share: tuple[float, float]) -> None:
    """Tokens of a window share a level: what other windows move, over how far the errors of whole pilots scatter."""
    rng, n, told, errors = np.random.default_rng(4), np.array([16, 64]), [], []
    for _ in range(40):
        level = np.repeat(shared * rng.standard_normal(64), 32)
        scores, values = 0.7 * rng.normal(size=(32, 2048)) + 0.5 * level, rng.normal(size=(2048, 3))
        values = 5 + values * np.exp(level)[:, None]
        (one,) = pilot_errors(scores, values, n, quarters=np.arange(2048) // 512)
        (found,) = PredictedErrors.of(n, one, np.arange(32), 2048, 0)
        told.append(np.square(found.text_shifts(n)).sum(0))
        errors.append(found.logs[0])
    ratio = np.sqrt(np.mean(told, axis=0)) / student_factor(3) / np.std(errors, axis=0)
    assert (ratio >= share[0]).all()
    assert (ratio <= share[1]).all()
