"""The critical factor from gap counting: laws with a known critical scale; ties; the error bar of a head."""

from __future__ import annotations

import numpy as np
import pytest

from limitlens.heads.critical_factor import critical_factors
from limitlens.statistics.gap_counting import critical_inverse_temperature
from limitlens.theory import critical_beta, uniform


def rows_of(dim: int, n: int, rows: int, seed: int) -> np.ndarray:
    """Scores <q, k> of n uniform keys on the sphere."""
    return np.asarray(1 - uniform(dim).quantile(np.random.default_rng(seed).random((rows, n))))


@pytest.mark.parametrize(("dim", "ratio"), [(3, 0.24), (5, 0.65), (9, 1.15)])
def test_it_grows_like_the_critical_scale_of_a_known_law(dim: int, ratio: float) -> None:
    """β over the exact critical β is one number for every n, and so grows like n^{2/(d−1)}."""
    for seed, n in enumerate((500, 8000)):
        found = critical_inverse_temperature(rows_of(dim, n, 400, seed))
        assert np.median(found) / critical_beta(n, uniform(dim)) == pytest.approx(ratio, rel=0.08)


def test_at_the_critical_scale_of_a_sphere_the_transform_is_one_more_than_theta() -> None:
    """d = 3: E Σ e^{−βg} = 1 + θ, so that five keys are θ = 4."""
    scores = rows_of(3, 4000, 2000, 3)
    gaps = scores.max(1, keepdims=True) - scores
    transform = np.exp(-critical_beta(4000, uniform(3), 4.0) * gaps).sum(1)
    assert abs(transform.mean() - 5) < 3 * transform.std() / np.sqrt(len(transform))


def test_each_row_is_solved_and_ties_are_told() -> None:
    scores = np.random.default_rng(4).normal(size=(7, 300)).astype(np.float32)
    found = critical_inverse_temperature(scores)
    transform = np.exp(-found[:, None] * (scores.max(1, keepdims=True) - scores)).sum(1)
    np.testing.assert_allclose(transform, 5, rtol=1e-4)
    np.testing.assert_allclose(critical_inverse_temperature(2 * scores), found / 2, rtol=1e-5)
    scores[0, :5] = 9  # five keys tie: no temperature parts them
    assert np.isinf(critical_inverse_temperature(scores)[0])
    assert (critical_inverse_temperature(scores[:, :5]) == 0).all()


def test_a_head_has_the_median_of_its_rows_with_an_error_that_covers() -> None:
    """The standard error of the median and of the growth over windows, against the scatter of independent heads."""
    sizes, windows = (500, 2000, 4000), np.arange(32)
    found = [critical_factors(rows_of(5, 2000, 32, 10 + i), sizes, windows, 3000, seed=i) for i in range(60)]
    assert {one.n for one in found} == {2000}  # the largest size within the context
    logs = np.log([one.factor for one in found])
    assert np.mean([one.stderr / one.factor for one in found]) == pytest.approx(logs.std(ddof=1), rel=0.3)
    growth = np.array([one.growth for one in found])
    assert abs(growth.mean() - 0.5) < 3 * growth.std() / np.sqrt(60) + 0.02
    tied = critical_factors(np.zeros((4, 64)), (32, 64), np.arange(4), 64)
    assert np.isinf(tied.factor)
    assert tied.growth is None
