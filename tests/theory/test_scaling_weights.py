"""Expectations of the ordered weights, against closed forms, brute-force quadrature and reference numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from limitlens.errors import InputError
from limitlens.measures import VonMisesFisher
from limitlens.measures.radial import radial_K
from limitlens.theory import (
    KeyPoints,
    Points,
    PoissonPoints,
    PowerGap,
    VonMisesFisherGap,
    critical_beta,
    deficit_cdf,
    entropy,
    mean_top,
    nearest_cdf,
    output_law,
    participation,
    regime,
    top_cdf,
    uniform,
)
from limitlens.theory.scaling.control import averaging, collapse_deficit, nearest_distance
from limitlens.theory.scaling.weights import (
    gap_mean,
    gap_variance,
    keys_holding,
    mean_inverse_top,
    tangential_mean,
    tangential_variance,
)

GAMMA = float(np.euler_gamma)


@pytest.mark.parametrize(("dim", "expected"), [(3, 0.4385), (4, 0.2952), (5, 0.2033), (9, 0.0521)])
def test_participation_at_the_critical_scale(dim: int, expected: float) -> None:
    assert round(participation(PoissonPoints(1.0, (dim - 1) / 2)), 4) == expected


@pytest.mark.parametrize(("a", "theta"), [(0.75, 2.0), (1.5, 0.2), (2.0, 1.0), (4.0, 30.0)])
def test_participation_against_nested_quadrature(a: float, theta: float) -> None:
    """The design's formula ∫ s I₂(s) e^{−Φ(s)} ds, integrated naively."""

    def over_points(function: object) -> float:
        density = lambda u: function(u ** (1 / a)) * theta / math.gamma(a + 1)  # noqa: E731, x = u^{1/a} is smooth
        edges = [0.0, 1.0, 10.0**a, 40.0**a, 100.0**a]
        return sum(integrate.quad(density, lo, hi, limit=200, epsabs=1e-13)[0] for lo, hi in pairwise(edges))

    def integrand(y: float) -> float:
        s = math.exp(y)
        phi = over_points(lambda x: -math.expm1(-s * math.exp(-x)))
        second = over_points(lambda x: math.exp(-2 * x - s * math.exp(-x)))
        return s * s * second * math.exp(-phi)

    expected = integrate.quad(integrand, -20, 50, limit=60, epsabs=1e-8, points=[-5, 0, 5, 15])[0]
    assert participation(PoissonPoints(theta, a)) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    "points",
    [
        PoissonPoints(1e-3, 0.5),
        PoissonPoints(0.01, 4.0),
        PoissonPoints(1.0, 32.0),
        PoissonPoints(1e6, 1.0),
        KeyPoints(uniform(2), 2, 5.0),
        KeyPoints(uniform(5), 10, 0.5),
        KeyPoints(uniform(128), 1e4, 1000.0),
        KeyPoints(uniform(3), 1e10, 1e9),
        KeyPoints(PowerGap(3, -1.5), 1e4, 50.0),
        KeyPoints(VonMisesFisherGap(5, 7.0, 0.3), 1e6, 100.0),
    ],
    ids=repr,
)
def test_weights_sum_to_one(points: Points) -> None:
    """E Σw = 1 uses every part of the quadrature."""
    assert points.mean_over(lambda x, z: np.exp(z - np.exp(z))) == pytest.approx(1, abs=1e-12)
    constant = points.mean_over(lambda x, z: np.exp(z - np.exp(z)), chosen=2)
    assert constant + participation(points) == pytest.approx(1, abs=1e-11)  # (Σw)² = Σ_i w_i² + Σ_{i≠j} w_i w_j


def test_two_keys_exactly() -> None:
    """n = 2 in dimension 3, where D is uniform on [0, 2]: a plain double integral."""
    node, weight = np.polynomial.legendre.leggauss(80)
    gap, mass = node + 1, weight / 2
    beta = 3.0
    first = special.expit(beta * (gap[None, :] - gap[:, None]))  # weight of the key at gap[:, None]

    def mean(values: np.ndarray) -> float:
        return float(mass @ values @ mass)

    points = KeyPoints(uniform(3), 2, beta)
    out = beta * (first * gap[:, None] + (1 - first) * gap[None, :])
    assert participation(points) == pytest.approx(mean(first**2 + (1 - first) ** 2), rel=1e-10)
    assert entropy(points) == pytest.approx(-2 * mean(first * np.log(first)), rel=1e-10)
    assert gap_mean(points) == pytest.approx(mean(out), rel=1e-10)
    assert gap_variance(points) == pytest.approx(mean(out**2) - mean(out) ** 2, rel=1e-9)
    square = beta * gap * (2 - gap)
    across = mean(first**2 * square[:, None] + (1 - first) ** 2 * square[None, :]) / 2
    assert tangential_variance(points, 2) == pytest.approx(across, rel=1e-10)
    top = np.maximum(first, 1 - first)
    assert mean_top(points) == pytest.approx(
        mean(top), rel=2e-4
    )  # the maximum has a kink, which 80 nodes resolve so far
    assert mean_inverse_top(points) == pytest.approx(mean(1 / top), rel=2e-4)


def test_closed_forms_in_dimension_three() -> None:
    """For a = 1, 1/w₁ − 1 is a generalised Dickman variable; at θ = 1, E w₁ = e^{−γ} and E Σw² = 1 − e^{−γ}."""
    critical = PoissonPoints(1.0, 1.0)
    assert participation(critical) == pytest.approx(1 - math.exp(-GAMMA), abs=1e-12)
    assert mean_top(critical) == pytest.approx(math.exp(-GAMMA), abs=1e-12)
    for theta in (0.1, 1.0, 3.0, 50.0):
        assert mean_inverse_top(PoissonPoints(theta, 1.0)) == pytest.approx(1 + theta, rel=1e-12)
    for theta in (0.3, 1.0, 3.0):
        t = np.array([0.6, 0.75, 0.9])
        exact = 1 - math.exp(-GAMMA * theta) / math.gamma(1 + theta) * (1 / t - 1) ** theta
        assert top_cdf(t, PoissonPoints(theta, 1.0)) == pytest.approx(exact, abs=1e-6)
        assert top_cdf(0.5, PoissonPoints(theta, 1.0)) == pytest.approx(
            1 - math.exp(-GAMMA * theta) / math.gamma(1 + theta), abs=5e-4
        )


def test_law_of_the_top_weight_has_the_right_mean() -> None:
    """E w₁ = ∫ (1 − F): the inverted law against the quadrature of its mean."""
    points = PoissonPoints(1.0, 2.0)
    node, weight = np.polynomial.legendre.leggauss(12)
    assert float(weight / 2 @ (1 - top_cdf((node + 1) / 2, points))) == pytest.approx(mean_top(points), abs=1e-4)


def test_critical_limit_is_reached_from_finite_n() -> None:
    limit = participation(PoissonPoints(1.0, 4.0))
    finite = [participation(KeyPoints(uniform(9), n, critical_beta(n, uniform(9)))) for n in (1e4, 1e8, 1e12, 1e16)]
    errors = np.array(finite) - limit
    assert finite[1] == pytest.approx(0.05268, abs=5e-6)  # dimension 9 is slow
    assert errors[1:] / errors[:-1] == pytest.approx(0.1, rel=0.15)  # like 1/β, that is n^{−1/4}
    # at the asymptotic β, where θ is not quite one, simulations had given .0539 at n = 1e8
    assert participation(KeyPoints(uniform(9), 1e8, critical_beta(1e8, uniform(9).local))) == pytest.approx(
        0.05367, abs=5e-6
    )


def test_keys_on_a_subsphere_have_its_exponent() -> None:
    """Keys on a subsphere of dimension 4 in dimension 9: critical at n^{2/3}, spread thin at the ambient n^{1/4}."""
    law, n = uniform(4), 10_000
    assert law.exponent == 3
    assert participation(KeyPoints(law, n, critical_beta(n, law))) == pytest.approx(0.2954, abs=5e-5)
    assert participation(KeyPoints(law, n, critical_beta(n, uniform(9)))) == pytest.approx(0.00578, abs=5e-6)


@pytest.mark.parametrize("dim", [2, 3, 5, 9])
def test_averaging_formulas_are_the_limit_of_the_exact_ones(dim: int) -> None:
    law, n = uniform(dim), 1e9
    for theta, tolerance in ((10.0, 0.25), (1000.0, 3e-3)):
        beta = critical_beta(n, law, theta)
        points, formula = KeyPoints(law, n, beta), averaging(n, beta, law)
        assert formula.effective_sample_size * participation(points) == pytest.approx(1, rel=tolerance)
        assert formula.effective_sample_size == pytest.approx(2**law.a * theta, rel=0.12 if dim == 9 else 1e-2)
        assert gap_variance(points) / beta**2 == pytest.approx(formula.radial_variance, rel=tolerance)
        assert formula.tangential_variance is not None
        assert tangential_variance(points, dim - 1) / beta == pytest.approx(formula.tangential_variance, rel=tolerance)
        assert formula.shrinkage - gap_mean(points) / beta == pytest.approx(formula.bias, rel=tolerance)


def test_averaging_uses_bessel_forms() -> None:
    """In dimension 9 with n = 1e4 keys the large-β size 2^a θ is a quarter too large at θ = 10."""
    law, n = uniform(9), 10_000
    beta = critical_beta(n, law, 10.0)
    size = averaging(n, beta, law).effective_sample_size
    assert size == pytest.approx(n * math.exp(2 * radial_K(beta, 9) - radial_K(2 * beta, 9)), rel=1e-11)
    assert size * participation(KeyPoints(law, n, beta)) == pytest.approx(1, abs=0.025)
    assert 160 / size > 1.25


def test_shrinkage_expansion() -> None:
    for dim in (2, 5, 9):
        beta = 500.0
        expansion = (dim - 1) / (2 * beta) - (dim - 1) * (dim - 3) / (8 * beta**2)
        exact = averaging(1e6, beta, uniform(dim)).shrinkage
        assert expansion == pytest.approx(exact, rel=2 * (dim / beta) ** 2)


@pytest.mark.parametrize("dim", [3, 4, 5, 9])
def test_collapse_formula(dim: int) -> None:
    law, n = uniform(dim), 1e20  # so large that the curvature of the sphere is no longer felt
    for theta in (1e-2, 1e-2 * 10.0 ** -(dim - 1)):  # the second β is a hundred times larger
        beta = critical_beta(n, law, theta)
        scale = (theta / math.gamma(law.a + 1)) ** (
            1 / law.a
        )  # of the gap of the nearest key, over 1/β: the next order
        deficit = 1 - mean_top(KeyPoints(law, n, beta))
        assert deficit == pytest.approx(collapse_deficit(n, beta, law), rel=0.6 * scale)


def test_nearest_distance_is_that_of_order_statistics() -> None:
    law, n = uniform(5), 1e6
    for rank in (1, 3):
        # E √(2D) with n P(D ≤ s) Gamma distributed, from the exact quantile
        density = stats.gamma(rank).pdf
        mean = integrate.quad(lambda g, pdf=density: math.sqrt(2 * float(law.quantile(g / n))) * pdf(g), 0, 50)[0]
        assert nearest_distance(n, law, rank) == pytest.approx(mean, rel=1e-3)


def test_keys_holding_ninety_percent() -> None:
    """In dimension 3 the mass decays like e^{−x} over uniform keys: θ ln 10 of them hold 90%."""
    assert keys_holding(PoissonPoints(100.0, 1.0)) == pytest.approx(100 * math.log(10), rel=1e-12)
    beta = critical_beta(1e8, uniform(3), 100.0)
    assert keys_holding(KeyPoints(uniform(3), 1e8, beta)) == pytest.approx(100 * math.log(10), rel=1e-5)


def test_high_dimension_averages_at_theta_one() -> None:
    """With a = 32, θ = 1 still shares the mass between 2^a keys: θ alone does not name the regime."""
    assert participation(PoissonPoints(1.0, 32.0)) * 2**32 == pytest.approx(1, rel=1e-5)
    law, n = uniform(64), 4096
    assert regime(participation(KeyPoints(law, n, critical_beta(n, law)))) == "averaging"
    assert regime(participation(KeyPoints(law, n, 35.49))) == "selective"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: PoissonPoints(0.0, 1.0), "theta is 0"),
        (lambda: PoissonPoints(1.0, 0.1), "at least 0.15"),
        (lambda: KeyPoints(uniform(3), 1, 1.0), "n is 1"),
        (lambda: KeyPoints(uniform(3), 10, -1.0), "beta is -1"),
        (lambda: top_cdf([0.5, 1.0], PoissonPoints(1.0, 1.0)), "strictly between 0 and 1"),
        (lambda: collapse_deficit(10, 1.0, uniform(2)), "expected more than 1"),
    ],
)
def test_bad_input(act: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()  # type: ignore[operator]


def test_two_laws_of_one_exponent_share_one_critical_scale() -> None:
    # On the sphere of R³ gaps are uniform, on the circle with density |q − k| P(D ≤ s) = 1 − √(1 − s/2): shapes differ,
    # the exponent 2 does not. A von Mises-Fisher law seen from aside has it too, with 1/180 of the keys near the query.
    laws = (uniform(3), PowerGap(2, 1.0), VonMisesFisherGap(3, 5.0, -0.5))
    assert [law.exponent for law in laws] == [2, 2, 2]
    assert abs(laws[0].cdf(1.0) - laws[1].cdf(1.0)) > 0.2
    for law in laws:
        betas = [critical_beta(n, law) for n in (1e6, 1e8)]
        assert math.log(betas[1] / betas[0]) / math.log(100) == pytest.approx(1, abs=2e-3)  # n^(2/α)
        assert betas[1] / (1e8 * math.exp(law.log_c)) == pytest.approx(1, abs=1e-3)  # Γ(a+1)^(1/a) = 1 for a = 1
        assert participation(KeyPoints(law, 1e8, betas[1])) == pytest.approx(1 - math.exp(-np.euler_gamma), abs=1e-3)


def test_direct_draws_of_two_laws_of_one_exponent_at_their_critical_scales() -> None:
    rng, n = np.random.default_rng(0), 2000
    u = rng.random((3000, n))
    for law, gap in ((uniform(3), 2 * u), (PowerGap(2, 1.0), 2 * (1 - np.square(1 - u)))):
        weights = np.exp(-critical_beta(n, law) * gap)
        weights /= weights.sum(axis=1, keepdims=True)
        shared = np.square(weights).sum(axis=1)
        stderr = shared.std() / math.sqrt(len(shared))
        assert abs(shared.mean() - (1 - math.exp(-np.euler_gamma))) < 4 * stderr + 1e-3
        assert stderr < 0.006


def gaps_of_drawn_keys(dim: int, n: int, sets: int, seed: int) -> np.ndarray:
    """Sorted gaps 1 − <q, k> of drawn vectors, (sets, n): nothing here is shared with the theory."""
    keys = np.random.default_rng(seed).standard_normal((sets, n, dim))
    return np.sort(1 - keys[..., 0] / np.linalg.norm(keys, axis=-1), axis=1)


@pytest.mark.parametrize(("dim", "n", "beta"), [(3, 50, 20.0), (5, 300, 21.0), (2, 12, 1.0)])
def test_laws_of_ordered_weights_of_drawn_keys(dim: int, n: int, beta: float) -> None:
    """P(w_k ≤ t) of n drawn keys, for k = 1, 2, 3 and 10, at 10 quantiles each."""
    sets = 6000
    weight = np.exp(-beta * gaps_of_drawn_keys(dim, n, sets, 11))
    weight /= weight.sum(axis=1, keepdims=True)
    points = KeyPoints(uniform(dim), n, beta)
    share = np.linspace(0.05, 0.95, 10)
    for rank in (1, 2, 3, 10):
        found = top_cdf(np.quantile(weight[:, rank - 1], share), points, rank)
        assert np.abs((found - share) / np.sqrt(share * (1 - share) / sets)).max() < 3.5


def test_the_limit_is_off_where_the_exact_law_is_not() -> None:
    """d = 8, n = 1e5, P(w₁ ≤ 0.15), at both definitions of the critical β; simulated with 3,000 sets of drawn keys."""
    law, simulated = uniform(8), {}
    simulated[critical_beta(1e5, law)] = 0.3717
    simulated[critical_beta(1e5, law.local)] = 0.3413
    for beta, share in simulated.items():
        assert float(top_cdf(0.15, KeyPoints(law, 1e5, beta))) == pytest.approx(share, abs=0.009)
    assert float(top_cdf(0.15, PoissonPoints(1.0, 3.5))) == pytest.approx(0.3908, abs=1e-4)


@pytest.mark.parametrize(("dim", "accuracy"), [(2, 2e-5), (3, 1e-7), (4, 1e-7)])
def test_two_keys_have_the_law_of_their_spacing(dim: int, accuracy: float) -> None:
    """w₂ = 1 − w₁ ≤ t if the two gaps differ by ln(1/t − 1)/β, whose probability is one integral."""
    beta, law = 5.0, uniform(dim)
    points = KeyPoints(law, 2, beta)
    t = np.array([0.01, 0.05, 0.1, 0.3, 0.4])
    spacing = np.log(1 / t - 1) / beta
    u = (np.arange(100_000) + 0.5) / 100_000  # quantiles of one gap
    expected = [2 * np.mean(1 - law.cdf(law.quantile(u) + one)) for one in spacing]
    assert top_cdf(t, points, 2) == pytest.approx(np.array(expected), abs=accuracy)
    assert 1 - top_cdf(1 - t, points) == pytest.approx(np.array(expected), abs=accuracy)
    near = np.array([0.45, 0.48, 0.495])  # the density of w₁ jumps at 1/2
    assert 1 - top_cdf(1 - near, points) == pytest.approx(top_cdf(near, points, 2), abs=5e-4)
    assert top_cdf(0.7, points, 2) == 1


def test_weights_that_hardly_vary_are_refused() -> None:
    with pytest.raises(InputError, match="varies by less than 6%"):
        top_cdf(0.003, PoissonPoints(300.0, 2.0))


def test_law_of_the_nearest_distance() -> None:
    gaps = gaps_of_drawn_keys(4, 200, 4000, 12)
    points = KeyPoints(uniform(4), 200, 10.0)
    for rank in (1, 5):
        law = stats.kstest(np.sqrt(2 * gaps[:, rank - 1]), lambda r, k=rank: nearest_cdf(r, points, k))
        assert law.pvalue > 0.01
    assert nearest_cdf(math.sqrt(2 * 0.7), PoissonPoints(1.0, 1.0)) == pytest.approx(1 - math.exp(-0.7))


def test_law_of_the_collapse() -> None:
    """1 − w₁ of drawn keys where E w₁ is 0.99, and with the law of all keys."""
    beta, low = 3000.0, 1e-9
    gaps = gaps_of_drawn_keys(5, 1000, 3000, 13)
    deficit = 1 - 1 / np.exp(-beta * (gaps - gaps[:, :1])).sum(axis=1)
    points = KeyPoints(uniform(5), 1000, beta)
    for epsilon in (low, 1e-6, 1e-3, 0.1):
        share = float(deficit_cdf(epsilon, points))
        assert float(np.mean(deficit <= epsilon)) == pytest.approx(
            share, abs=3.5 * math.sqrt(share * (1 - share) / 3000)
        )
        assert 1 - float(top_cdf(1 - epsilon, points)) == pytest.approx(share, abs=5e-3)


@pytest.mark.parametrize(("dim", "cosine", "n", "beta"), [(3, 0.3, 500, 8.0), (2, 0.5, 500, 6.0)])
def test_tangential_bias_of_keys_off_axis(dim: int, cosine: float, n: int, beta: float) -> None:
    """Bias of drawn keys, measured beyond its linear part, whose mean is 0."""
    law, kappa = VonMisesFisherGap(dim, 4.0, cosine), 4.0
    measure = VonMisesFisher(np.array([cosine, math.sqrt(1 - cosine**2), 0.0])[:dim], kappa)
    tilt = beta * np.eye(dim)[0]
    limit, normal = measure.grad_K(tilt), float(measure.K(tilt))
    keys = measure.sample((3000, n), torch.Generator().manual_seed(1)).numpy()
    weight = np.exp(keys @ tilt - normal) / n
    linear = np.einsum("ij,ij->i", weight, keys[..., 1] - limit[1])
    bias = linear / weight.sum(axis=1) - linear
    expected = averaging(n, beta, law)
    exact = tangential_mean(KeyPoints(law, n, beta)) - expected.tangential_mean
    assert expected.tangential_mean == pytest.approx(limit[1], rel=1e-12)
    assert exact == pytest.approx(bias.mean(), abs=3.5 * bias.std() / math.sqrt(3000))
    assert expected.tangential_bias == pytest.approx(exact, rel=0.05)
    assert bias.mean() > 8 * bias.std() / math.sqrt(3000)


def test_output_of_a_value_matrix() -> None:
    points, value = KeyPoints(uniform(3), 40, 6.0), np.array([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]])
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((20_000, 40, 3))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    weight = special.softmax(6.0 * keys[..., 0], axis=1)
    outputs = np.einsum("rn,rnd->rd", weight, keys) @ value.T
    mean, covariance = output_law(points, value)
    assert outputs.mean(axis=0) == pytest.approx(mean, abs=0.012)
    assert np.cov(outputs.T) == pytest.approx(covariance, rel=0.04, abs=0.002)
