"""Sample sizes for certified reads: quantiles against simulation, coverage of the sizes, and of the proved radius."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, f

from limitlens import theory
from limitlens.errors import InputError
from limitlens.theory.certificates import variance_degrees


def test_the_quantile_is_exact_for_equal_eigenvalues() -> None:
    for count in (1, 3, 20):
        found = theory.error_quantile(count, count, 0.1)
        assert found == pytest.approx(chi2.ppf(0.9, count))
    assert theory.error_quantile(1.0, 1.0, 0.1) == pytest.approx(1.6449**2, rel=1e-4)
    assert theory.error_quantile(5.0, 5.0, 0.05, 12.0) == pytest.approx(5 * f.ppf(0.95, 5, 12))


def test_the_quantile_of_other_eigenvalues_is_that_of_a_simulation() -> None:
    rng = np.random.default_rng(0)
    for eigenvalues in (0.5 ** np.arange(10), 1 / np.arange(1.0, 65), np.array([1.0, 0.1, 0.1])):
        drawn = rng.standard_normal((100_000, len(eigenvalues))) ** 2 @ eigenvalues
        for delta in (0.05, 0.1, 0.2):
            found = theory.error_quantile(eigenvalues.sum(), (eigenvalues**2).sum(), delta)
            assert found == pytest.approx(np.quantile(drawn, 1 - delta), rel=0.08)


def test_a_small_first_sample_makes_the_quantile_larger() -> None:
    """An error divided by its own estimated variance is within the quantile in 90% of samples, unlike with χ²."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20_000, 6))
    error, variance = x.sum(1) ** 2 / 36, x.var(1, ddof=1) / 6
    corrected = theory.error_quantile(variance, variance**2, 0.1, 5.0)
    assert (error <= corrected).mean() == pytest.approx(0.9, abs=0.01)
    assert (error <= theory.error_quantile(variance, variance**2, 0.1)).mean() < 0.86


def test_degrees_of_a_variance() -> None:
    assert variance_degrees(np.ones(20)) == pytest.approx(40)
    assert variance_degrees([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).tolist() == pytest.approx([2, 6])
    assert variance_degrees(np.ones(20), np.full(20, 0.5)) == pytest.approx(80)


def test_a_uniform_sample_of_the_stated_size_keeps_its_promise() -> None:
    """Keys drawn without replacement from a tail of 1,000: the size from all influences holds in 90% of the draws."""
    rng = np.random.default_rng(2)
    count, error = 1000, 0.1
    weights, values = rng.uniform(0.5, 1.5, count), rng.standard_normal((count, 4)) + 1
    output = weights @ values / weights.sum()
    influence = count * weights[:, None] * (values - output) / weights.sum()
    size = theory.sample_size(influence, float(np.linalg.norm(output)), error, 0.1, count)
    assert 40 < size < 200
    held = []
    for _ in range(2000):
        drawn = rng.permutation(count)[: round(size)]
        found = weights[drawn] @ values[drawn] / weights[drawn].sum()
        held.append(np.linalg.norm(found - output) <= error * np.linalg.norm(output))
    assert np.mean(held) == pytest.approx(0.9, abs=0.025)
    unlimited = theory.sample_size(influence, float(np.linalg.norm(output)), error, 0.1)
    assert size == pytest.approx(unlimited / (1 + unlimited / count))
    with pytest.raises(InputError, match="norm is 0; expected a positive norm of the output"):
        theory.sample_size(influence, 0.0, error, 0.1)


def test_the_proved_radius_holds_where_the_normal_one_fails() -> None:
    """One key is large and rarely sampled: a sample without it has hardly any variance, and the normal radius fails."""
    rng = np.random.default_rng(3)
    influence = np.append(np.full(59, 0.02), 1.0) * rng.choice([-1.0, 1.0], 60)
    chance, delta = 0.3, 0.1
    drawn = rng.random((20_000, 60)) < chance
    error = np.abs(((drawn / chance - 1) * influence).sum(1))
    terms = drawn * influence**2 * (1 / chance - 1) / chance
    variance = terms.sum(1)
    normal = theory.error_quantile(variance, variance**2, delta)
    assert (error**2 > normal).mean() > 0.5
    largest, bound = (1 / chance - 1) / chance, 1 / chance
    assert (error > theory.bernstein_radius(variance, largest, bound, delta)).mean() <= delta
    exact = (influence**2).sum() * (1 / chance - 1)
    assert (error > theory.bernstein_radius(exact, 0.0, bound, delta)).mean() <= delta
    assert theory.bernstein_radius(0.5, 0.0, 0.0, 0.1) == pytest.approx(np.sqrt(2 * 0.5 * np.log(40)))


def test_predicted_reads() -> None:
    assert theory.priority_reads(0.5, 2.0, 1e6, 1e9, 0.1, 0.1) == pytest.approx(100, rel=0.01)
    assert theory.priority_reads(0.5, 2.0, 1e6, 100.0, 0.1, 0.1) == pytest.approx(50, rel=0.01)
    assert theory.priority_reads(0.5, 2.0, 1.0, 1e9, 0.1, 0.1) == pytest.approx(270.55, rel=1e-3)
    assert theory.priority_reads(1e-6, 2.0, 1.0, 1e9, 0.1, 0.1, 48.0) == pytest.approx(48, rel=1e-3)
