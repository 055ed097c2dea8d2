"""Laws of the gap to the nearest key and the control parameter θ, against Bessel functions and samples."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from limitlens.errors import InputError
from limitlens.measures import Sphere, VonMisesFisher
from limitlens.measures.radial import radial_K, radial_mean, radial_variance
from limitlens.theory import GapLaw, LocalPower, PowerGap, VonMisesFisherGap, critical_beta, regime, theta, uniform
from limitlens.theory.scaling.control import critical_n
from limitlens.theory.scaling.laws import named_law

BETAS = np.array([1e-3, 0.1, 1.0, 10.0, 100.0, 1e3])
LAWS = [uniform(2), uniform(5), PowerGap(3, -1.5), PowerGap(4, 2.5), VonMisesFisherGap(5, 7.0, 0.3)]


def test_constants_of_the_sphere() -> None:
    assert [math.exp(uniform(d).log_c) for d in (3, 5, 9)] == pytest.approx([0.5, 0.75, 2.1875], rel=1e-14)
    for dim in (2, 7, 40):
        log_c = (dim - 3) / 2 * math.log(2) + math.lgamma(dim / 2) - math.log(math.pi) / 2 - math.lgamma((dim + 1) / 2)
        assert uniform(dim).log_c == pytest.approx(log_c, abs=1e-12)


@pytest.mark.parametrize("dim", [2, 3, 5, 9, 64, 128])
def test_uniform_keys_are_bessel_functions(dim: int) -> None:
    law = uniform(dim)
    assert law.log_laplace(BETAS) == pytest.approx(radial_K(BETAS, dim) - BETAS, rel=1e-12, abs=2e-12)
    assert law.tilted(BETAS)[1] == pytest.approx(1 - radial_mean(BETAS, dim), abs=1e-14)
    assert law.tilted(BETAS)[2] == pytest.approx(radial_variance(BETAS, dim), rel=1e-11)


def test_no_cancellation_at_huge_beta() -> None:
    """K(β) − β would keep no digit here."""
    beta = 1e18
    expected = float(mpmath.log(mpmath.sqrt(1 / (2 * mpmath.pi * mpmath.mpf(beta)))))  # I_0(β) ~ e^β/√(2πβ)
    assert float(uniform(2).log_laplace(beta)) == pytest.approx(expected, rel=1e-14)
    assert float(uniform(2).tilted(beta)[1]) == pytest.approx(0.5 / beta, rel=1e-13)


@pytest.mark.parametrize("power", [-1.6, -1.0, 0.5, 3.3])
def test_power_densities_are_hypergeometric(power: float) -> None:
    law = PowerGap(3, power)
    exact = [float(mpmath.log(mpmath.hyp1f1(law.a, law.a + 1, -2 * beta))) for beta in BETAS]
    assert law.exponent == pytest.approx(2 + power)
    assert law.log_laplace(BETAS) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("cosine", [1.0, 0.3, -0.5])
def test_von_mises_fisher_agrees_with_its_measure(cosine: float) -> None:
    query = np.eye(5)[0]
    direction = np.array([cosine, math.sqrt(1 - cosine**2), 0, 0, 0])
    measure, law = VonMisesFisher(direction, 7.0), VonMisesFisherGap(5, 7.0, cosine)
    assert law.log_laplace(BETAS) == pytest.approx(measure.K(BETAS[:, None] * query) - BETAS, rel=1e-11)
    keys = measure.sample(20_000, torch.Generator().manual_seed(1)).numpy()
    grid = np.linspace(0, 2, 2001)  # fine enough for 20,000 keys, and a tenth of their cost
    assert stats.kstest(1 - keys @ query, lambda gap: np.interp(gap, grid, law.cdf(grid))).pvalue > 0.01
    assert (law.tangent_dim is None) == (abs(cosine) < 1)


def test_uniform_gap_of_sampled_keys() -> None:
    keys = Sphere(5).sample(20_000, torch.Generator().manual_seed(1)).numpy()
    assert stats.kstest(1 - keys[:, 0], uniform(5).cdf).pvalue > 0.01


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}{tuple(law.parameters.values())}")
def test_quantile_inverts_cdf(law: GapLaw) -> None:
    u = np.concatenate([np.geomspace(1e-25, 0.5, 60), np.linspace(0.5, 0.999, 20)])
    assert law.cdf(law.quantile(u)) == pytest.approx(u, rel=1e-7)
    assert float(law.cdf(2.0)) == pytest.approx(1, rel=1e-12)
    small = 1e-9
    assert float(law.cdf(small)) == pytest.approx(math.exp(law.log_c) * small**law.a, rel=1e-7)


def test_quantile_of_the_sphere_is_the_inverse_incomplete_beta() -> None:
    u = np.geomspace(1e-20, 0.9, 50)
    assert uniform(9).quantile(u) == pytest.approx(2 * special.betaincinv(4, 4, u), rel=2e-8)


def test_control_parameter() -> None:
    law, n = uniform(5), 10_000
    assert critical_beta(n, law.local) == pytest.approx(math.sqrt(n * 0.75 * 2), rel=1e-14)
    assert critical_beta(n, law) == pytest.approx(121.97139, rel=1e-7)
    assert theta(n, critical_beta(n, law, 3.0), law) == pytest.approx(3, rel=1e-12)
    assert critical_n(critical_beta(n, law), law) == pytest.approx(n, rel=1e-12)
    assert critical_n(critical_beta(n, law.local), law.local) == pytest.approx(n, rel=1e-12)
    assert theta(1e12, 1e5, law) == pytest.approx(theta(1e12, 1e5, law.local), rel=3e-5)
    assert theta(n, 1e-9, law) == pytest.approx(n, rel=1e-8)
    assert critical_beta(n, law, n * (1 - 1e-9)) == pytest.approx(1e-9, rel=1e-5)  # θ falls like n(1 − β)


def test_exponent_and_constant_of_distances() -> None:
    """P(|q − k| ≤ r) ~ C r^α means a = α/2 and c = C 2^{α/2}; the critical β grows like n^{2/α}."""
    alpha, constant = 3.0, 0.2
    local = LocalPower(alpha / 2, math.log(constant * 2 ** (alpha / 2)))
    ratio = critical_beta(8e6, local) / critical_beta(1e6, local)
    assert ratio == pytest.approx(8 ** (2 / alpha), rel=1e-12)
    sphere = uniform(4)  # on S³ the ball of radius r has measure 2r³/(3π) to leading order
    assert math.exp(sphere.log_c) * 2**-sphere.a == pytest.approx(2 / (3 * math.pi), rel=1e-12)


def test_regimes_are_named_by_participation() -> None:
    assert [regime(value) for value in (0.01, 0.2, 0.95)] == ["averaging", "selective", "frozen"]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: uniform(1), "dim is 1"),
        (lambda: PowerGap(3, -2), "power is -2 in dimension 3"),
        (lambda: VonMisesFisherGap(3, -1.0), "concentration is -1"),
        (lambda: VonMisesFisherGap(3, 1.0, 2.0), "between -1 and 1"),
        (lambda: named_law("cauchy", 3), "expected uniform, vmf or power"),
        (lambda: critical_beta(1, uniform(3)), "n is 1"),
        (lambda: critical_beta(10, uniform(3), 0.0), "theta is 0"),
        (lambda: critical_beta(10, uniform(3), 10.0), "less than n"),
        (lambda: theta(10, 0.0, uniform(3)), "beta is 0"),
        (lambda: theta(float("nan"), 1.0, uniform(3)), "n is nan"),
        (lambda: theta(10, 1e9, uniform(512)), "lower beta"),
        (lambda: uniform(3).log_laplace(-1.0), "beta is -1"),
    ],
)
def test_bad_input(act: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()  # type: ignore[operator]
