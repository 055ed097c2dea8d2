"""Critical factor by gap counting: laws with a known critical scale, ties, and the standard error of a head."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch

from limitlens.statistics.critical_factor import (
    CriticalFactor,
    critical_factors,
    critical_of_first,
    critical_rows,
    some_rows,
    within,
)
from limitlens.theory import critical_beta, uniform


def rows_of(dim: int, n: int, rows: int, seed: int) -> np.ndarray:
    """Scores <q, k> of n uniform keys on the sphere."""
    return np.asarray(1 - uniform(dim).quantile(np.random.default_rng(seed).random((rows, n))))


def row_factors(scores: np.ndarray) -> np.ndarray:
    """Critical factor of each row of scores (rows, n)."""
    return np.asarray(critical_rows(scores, [scores.shape[1]])[0])


@pytest.mark.parametrize(("dim", "ratio"), [(3, 0.24), (5, 0.65), (9, 1.15)])
def test_it_grows_like_the_critical_scale_of_a_known_law(dim: int, ratio: float) -> None:
    """β over the exact critical β is one number for every n, and so grows like n^{2/(d−1)}."""
    for seed, n in enumerate((500, 8000)):
        found = row_factors(rows_of(dim, n, 400, seed))
        assert np.median(found) / critical_beta(n, uniform(dim)) == pytest.approx(ratio, rel=0.08)


def test_at_the_critical_scale_of_a_sphere_the_transform_is_one_more_than_theta() -> None:
    """d = 3: E Σ e^{−βg} = 1 + θ, so that five keys are θ = 4."""
    scores = rows_of(3, 4000, 2000, 3)
    gaps = scores.max(1, keepdims=True) - scores
    transform = np.exp(-critical_beta(4000, uniform(3), 4.0) * gaps).sum(1)
    assert abs(transform.mean() - 5) < 3 * transform.std() / np.sqrt(len(transform))


def of_a_head(
    scores: np.ndarray, sizes: tuple[int, ...], windows: np.ndarray, context: int, seed: int = 0
) -> CriticalFactor:
    """The factor of one head from scores (q, N)."""
    some, few = some_rows(len(scores)), within(sizes, context)
    (found,) = critical_factors(critical_rows(scores[None, some], few), few, windows[some], seed=seed)
    return found


def test_each_row_is_solved_and_ties_are_infinite() -> None:
    scores = np.random.default_rng(4).normal(size=(7, 300)).astype(np.float32)
    found = row_factors(scores)
    transform = np.exp(-found[:, None] * (scores.max(1, keepdims=True) - scores)).sum(1)
    np.testing.assert_allclose(transform, 5, rtol=1e-4)
    np.testing.assert_allclose(row_factors(2 * scores), found / 2, rtol=1e-5)
    scores[0, :5] = 9  # five keys tie: no temperature parts them
    assert np.isinf(row_factors(scores)[0])
    assert (row_factors(scores[:, :5]) == 0).all()


def test_a_head_has_the_median_of_its_rows_with_an_error_that_covers() -> None:
    """The standard error of the median and of the growth over windows, against the scatter of independent heads."""
    sizes, windows = (500, 2000, 4000), np.arange(32)
    found = [of_a_head(rows_of(5, 2000, 32, 10 + i), sizes, windows, 3000, i) for i in range(60)]
    assert {one.n for one in found} == {2000}  # the largest size within the context
    logs = np.log([one.factor for one in found])
    assert np.mean([one.stderr / one.factor for one in found]) == pytest.approx(logs.std(ddof=1), rel=0.3)
    growth = np.array([one.growth for one in found])
    assert abs(growth.mean() - 0.5) < 3 * growth.std() / np.sqrt(60) + 0.02
    tied = of_a_head(np.zeros((4, 64)), (32, 64), np.arange(4), 64)
    assert np.isinf(tied.factor)
    assert tied.growth is None


def test_on_a_device_all_rows_and_sizes_are_solved_at_once() -> None:
    """Ties, all but ties that need many steps, and sizes with no more keys than make a row critical."""
    scores = np.random.default_rng(5).normal(size=(3, 8, 400)).astype(np.float32) * 3
    scores[0, 0, :6] = 20  # in every sample, even the smallest
    scores[1, 2, 100:106] = 20  # in the largest alone
    scores[2, 1, :8] = 20 + np.arange(8, dtype=np.float32) * 1e-5
    sizes = (5, 50, 400)
    expected = critical_rows(scores, sizes)
    assert np.isinf(expected).sum() == 3
    assert expected[1, 2, 1] > 1e4
    found = critical_rows(torch.from_numpy(scores), sizes).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_heads_at_once_have_the_factors_they_have_alone() -> None:
    sizes, windows = (100, 300, 900), np.arange(32) // 2
    rows = critical_rows(np.random.default_rng(6).normal(size=(4, 32, 900)), sizes)
    rows[:, 1] = np.inf
    together = critical_factors(rows, sizes, windows, seed=3)
    assert [one.growth is None for one in together] == [False, True, False, False]
    alone = [critical_factors(rows[:, head, None], sizes, windows, seed=3)[0] for head in range(4)]
    both = (np.array([astuple(one) for one in found], float) for found in (together, alone))
    np.testing.assert_allclose(*both, rtol=1e-12)


@pytest.mark.parametrize("power", [1, 2, 4])
def test_gap_counting_grows_as_the_keys_thin_out(power: int) -> None:
    generator, found = np.random.default_rng(power), []
    for n in (300, 30_000):
        gaps = generator.random((200, n)) ** (1 / power)
        beta = row_factors(-gaps)
        weights = np.exp(-beta[:, None] * (gaps - gaps.min(1, keepdims=True)))
        assert weights.sum(1) == pytest.approx(5, rel=1e-4)
        found.append(np.median(np.log(beta)))
    assert (found[1] - found[0]) / math.log(100) == pytest.approx(1 / power, abs=0.02 + 0.03 / power)


def test_the_median_of_a_head_is_that_of_its_rows() -> None:
    """For an odd and an even number of queries, whose own window is drawn in every resample."""
    for count in (5, 6):
        rows = np.random.default_rng(count).gamma(3.0, size=(2, 3, count))
        found = critical_factors(rows, (100, 200), np.zeros(count, int))
        assert [one.factor for one in found] == pytest.approx(np.median(rows[1], axis=-1))
        assert [one.stderr for one in found] == pytest.approx([0, 0, 0])


def test_rows_over_keys_of_their_own_number() -> None:
    scores = np.random.default_rng(8).normal(size=(5, 300)) * 3
    scores[2, :6] = 20  # five keys or more tie
    counts = np.array([300, 7, 120, 5, 299])
    expected = [critical_rows(row[None, :count], [count])[0, 0] for row, count in zip(scores, counts, strict=True)]
    for found in (critical_of_first(scores, counts), critical_of_first(torch.from_numpy(scores), counts).numpy()):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
