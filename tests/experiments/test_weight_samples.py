"""Simulated attention: brute force against the nearest keys, and both against exact expectations and the limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from limitlens.errors import InputError
from limitlens.experiments.weight_samples import MOST_DRAWN, WeightSample, sample_direct, sample_ordered, sample_weights
from limitlens.measures import VonMisesFisher
from limitlens.theory import (
    KeyPoints,
    Points,
    PoissonPoints,
    PowerGap,
    VonMisesFisherGap,
    critical_beta,
    entropy,
    mean_top,
    participation,
    uniform,
)
from limitlens.theory.scaling.weights import gap_mean, gap_variance, mean_inverse_top, tangential_variance

COMPARED = ("top", "participation", "entropy", "keys90", "gap", "tangential", "nearest")


def deviation(values: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of `values` lies from `expected`."""
    return float((values.mean() - expected) / (values.std(ddof=1) / np.sqrt(values.size)))


def deviations(sample: WeightSample, points: Points, tangent_dim: int | None) -> list[float]:
    mean = gap_mean(points)
    found = [
        deviation(sample.participation, participation(points)),
        deviation(sample.entropy, entropy(points)),
        deviation(sample.top, mean_top(points)),
        deviation(1 / sample.top, mean_inverse_top(points)),
        deviation(sample.gap, mean),
        deviation(np.square(sample.gap - mean), gap_variance(points)),
    ]
    if tangent_dim is not None:
        found.append(deviation(np.square(sample.tangential), tangential_variance(points, tangent_dim)))
    return found


@pytest.mark.parametrize(
    ("dim", "n", "theta"),
    [(2, 100, 1.0), (3, 1e10, 1.0), (5, 1e4, 0.01), (5, 1e10, 1000.0), (9, 1e6, 1.0), (64, 1e4, 1.0)],
)
def test_nearest_keys_have_the_exact_expectations(dim: int, n: float, theta: float) -> None:
    """Seven expectations in every regime, all keys drawn or most of them replaced by a Gaussian."""
    law = uniform(dim)
    points = KeyPoints(law, n, critical_beta(n, law, theta))
    sample = sample_weights(points, 2000, np.random.default_rng(2), dim - 1)
    assert np.abs(deviations(sample, points, dim - 1)).max() < 3.5
    assert (sample.remainder.max() == 0) == (n <= MOST_DRAWN)


@pytest.mark.parametrize("law", [PowerGap(3, -1.0), PowerGap(3, 2.0), VonMisesFisherGap(5, 5.0, 0.2)], ids=repr)
def test_other_laws_have_the_exact_expectations(law: PowerGap | VonMisesFisherGap) -> None:
    points = KeyPoints(law, 1e5, critical_beta(1e5, law))
    sample = sample_weights(points, 2000, np.random.default_rng(3), law.tangent_dim)
    assert np.abs(deviations(sample, points, law.tangent_dim)).max() < 3.5
    assert np.isnan(sample.tangential).all() == (law.tangent_dim is None)


@pytest.mark.parametrize("theta", [0.3, 1.0, 20.0])
def test_limit_sampler_has_the_exact_expectations(theta: float) -> None:
    points = PoissonPoints(theta, 2.0)
    sample = sample_weights(points, 4000, np.random.default_rng(4), 4)
    assert np.abs(deviations(sample, points, 4)).max() < 3.5


@pytest.mark.parametrize(("dim", "theta", "n", "sets"), [(3, 1.0, 100_000, 400), (5, 30.0, 10_000, 2000)])
def test_nearest_keys_agree_with_brute_force(dim: int, theta: float, n: int, sets: int) -> None:
    """All seven laws: sets of real vectors against sets of order statistics."""
    law = uniform(dim)
    beta = critical_beta(n, law, theta)
    brute = sample_direct(dim, n, beta, sets, np.random.default_rng(5))
    quick = sample_weights(KeyPoints(law, n, beta), 3000, np.random.default_rng(6), dim - 1)
    pvalues = [stats.ks_2samp(getattr(brute, name), getattr(quick, name)).pvalue for name in COMPARED]
    assert min(pvalues) > 0.002, dict(zip(COMPARED, pvalues, strict=True))


def test_off_axis_keys_agree_with_brute_force() -> None:
    law, n = VonMisesFisherGap(4, 6.0, 0.5), 1000
    beta = critical_beta(n, law)
    measure = VonMisesFisher(np.array([0.5, np.sqrt(0.75), 0, 0]), 6.0)
    generator = torch.Generator().manual_seed(7)
    gaps = np.stack([1 - measure.sample(n, generator).numpy()[:, 0] for _ in range(300)])
    weight = np.exp(-beta * (gaps - gaps.min(axis=1, keepdims=True)))
    top = 1 / weight.sum(axis=1)
    quick = sample_weights(KeyPoints(law, n, beta), 3000, np.random.default_rng(8))
    assert stats.ks_2samp(top, quick.top).pvalue > 0.01
    assert stats.ks_2samp((weight * gaps).sum(axis=1) * top * beta, quick.gap).pvalue > 0.01


def test_design_numbers_at_ten_thousand_keys() -> None:
    """The design measured E Σw² = .437 ± .005 (d = 3) and .206 ± .004 (d = 5) at the asymptotic critical β."""
    for dim, design in ((3, 0.437), (5, 0.206)):
        law = uniform(dim)
        beta = critical_beta(10_000, law.local)
        values = sample_direct(dim, 10_000, beta, 1000, np.random.default_rng(9)).participation
        stderr = values.std(ddof=1) / np.sqrt(values.size)
        assert abs(deviation(values, participation(KeyPoints(law, 10_000, beta)))) < 3
        assert abs(values.mean() - design) < 3 * np.hypot(stderr, 0.005)


def test_ten_billion_keys_follow_the_limit() -> None:
    law, n = uniform(5), 1e10
    points = KeyPoints(law, n, critical_beta(n, law))
    finite = sample_weights(points, 2000, np.random.default_rng(10), 4)
    limit = sample_weights(PoissonPoints(1.0, law.a), 2000, np.random.default_rng(11), 4)
    for name in COMPARED:
        assert stats.ks_2samp(getattr(finite, name), getattr(limit, name)).pvalue > 0.005, name


def test_kolmogorov_smirnov_sees_a_wrong_exponent() -> None:
    """The test has power: the limit of dimension 4 is rejected for keys of dimension 5."""
    law, n = uniform(5), 10_000
    found = sample_weights(KeyPoints(law, n, critical_beta(n, law)), 2000, np.random.default_rng(12), 4)
    wrong = sample_weights(PoissonPoints(1.0, 1.5), 2000, np.random.default_rng(13), 3)
    assert stats.ks_2samp(found.top, wrong.top).pvalue < 1e-6


def test_ordered_weights() -> None:
    points = PoissonPoints(1.0, 1.0)
    weights = sample_ordered(points, 50, 4000, np.random.default_rng(14))
    assert weights.shape == (4000, 50)
    assert (np.diff(weights, axis=1) <= 0).all()
    assert weights.sum(axis=1) == pytest.approx(1, abs=1e-6)
    assert abs(deviation(np.square(weights).sum(axis=1), participation(points))) < 3.5
    assert abs(deviation(weights[:, 0], np.exp(-np.euler_gamma))) < 3.5
    with pytest.raises(InputError, match="ranks is 0"):
        sample_ordered(points, 0, 10, np.random.default_rng(0))


def test_same_seed_same_sample() -> None:
    points = KeyPoints(uniform(5), 1e6, 100.0)
    first, second = (sample_weights(points, 50, np.random.default_rng(15), 4).gap for _ in range(2))
    assert (first == second).all()


def test_bad_input() -> None:
    with pytest.raises(InputError, match="replicates is 1"):
        sample_weights(PoissonPoints(1.0, 1.0), 1, np.random.default_rng(0))
    with pytest.raises(InputError, match="dim is 1"):
        sample_direct(1, 10, 1.0, 10, np.random.default_rng(0))
