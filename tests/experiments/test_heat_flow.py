"""The backward heat flow: modes against the heat equation and linear theory, Gaussians in R^d, tokens against noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from limitlens.errors import InputError
from limitlens.experiments.heat_flow import heat_flow, token_layer
from limitlens.measures import GaussianMixture
from limitlens.theory import ZonalFlow
from limitlens.theory.scaling.heat import (
    drift_to_noise,
    gaussian_flow,
    heat_growth,
    mode_growth,
    rms_slope,
    visible_until,
)


def test_four_hundred_layers_on_the_circle() -> None:
    """Mode 1 of 1 + cos/2 at β = 2000 grows to .6107 = .5 e^{0.2}, with all modes up to 8 in play."""
    path = ZonalFlow(2, 2000.0, 8).layers([0.5], 400)
    assert round(path[-1, 0], 4) == 0.6107
    assert path[-1, 0] == pytest.approx(0.5 * math.exp(0.2), rel=1e-4)
    assert path[-1, 0] == pytest.approx(0.5 * (1 + 1 / 2000) ** 400, rel=1e-7)
    assert np.abs(path[-1, 1:]).max() < 5e-3  # what the map creates at order 1/β


@pytest.mark.parametrize("dim", [2, 3, 5])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_small_modes_grow_by_funk_and_hecke(dim: int, degree: int) -> None:
    """The map itself, applied to a tiny mode, against the linear factor and against Bessel functions."""
    beta, size = 30.0, 1e-6
    start = np.zeros(degree)
    start[-1] = size
    grown = ZonalFlow(dim, beta, 5).layers(start, 1)[1, degree - 1] / size
    assert grown == pytest.approx(mode_growth(degree, beta, dim), abs=2e-6)
    order = dim / 2 - 1
    bessel = special.ive(order + degree, beta) / special.ive(order + 1, beta)
    assert mode_growth(degree, beta, dim) == pytest.approx(1 + degree * (degree + dim - 2) / beta * bessel, rel=1e-13)
    assert mode_growth(1, beta, dim) == pytest.approx(1 + (dim - 1) / beta, rel=1e-14)


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_heat_equation_is_the_limit(dim: int) -> None:
    """At fixed t = layers/β the difference to the heat equation falls like 1/β, for two modes at once."""
    start, time = np.array([0.3, 0.1]), 0.05
    heat = start * np.exp(time * np.array([heat_growth(1, dim), heat_growth(2, dim)]))
    errors = [
        ZonalFlow(dim, beta, 6).layers(start, round(time * beta))[-1, :2] - heat for beta in (500.0, 2000.0, 8000.0)
    ]
    assert np.abs(errors[-1] / heat).max() < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.03)


def test_map_of_the_circle_by_brute_force() -> None:
    """Where one layer sends a token, by plain integration over the circle."""
    beta, modes = 20.0, np.array([0.3, 0.2])
    y = np.linspace(-np.pi, np.pi, 4000, endpoint=False)
    density = 1 + modes[0] * np.cos(y) + modes[1] * np.cos(2 * y)
    angles = np.array([0.4, 1.3, 2.5])
    expected = []
    for angle in angles:
        weight = density * np.exp(beta * (np.cos(y - angle) - 1))
        expected.append(math.atan2(weight @ np.sin(y - angle), weight @ np.cos(y - angle)))
    assert ZonalFlow(2, beta, 2).displacement(modes, np.cos(angles)) == pytest.approx(expected, rel=1e-11)


def test_too_many_modes_blow_up() -> None:
    """Backward heat is ill posed: rounding errors of mode l grow like e^{l²t}; the user is told."""
    with pytest.raises(InputError, match=r"diverged.*fewer modes than 14"):
        ZonalFlow(2, 2000.0, 14).layers([0.5], 400)


def test_gaussian_in_euclidean_space() -> None:
    """N(0, Σ) after 400 layers at β = 2000 is close to Σ − 2tI with t = 0.2."""
    rotation = np.linalg.qr(np.array([[1.0, 0.3], [0.2, 1.0]]))[0]
    covariance = rotation @ np.diag([1.0, 2.0]) @ rotation.T
    final = gaussian_flow(covariance, 2000.0, 400)[-1]
    assert final == pytest.approx(covariance - 0.4 * np.eye(2), abs=5e-4)
    assert gaussian_flow(np.eye(1), 2000.0, 400)[-1, 0, 0] == pytest.approx(0.600382, abs=1e-6)


def test_map_is_a_gradient_step_on_the_smoothed_density() -> None:
    """T(x) = x + (1/β) ∇log(f ∗ N(0, I/β)) for a Gaussian mixture: ∇K against the smoothed density."""
    beta, x = 7.0, np.array([[0.4], [-1.1]])
    means, weights, variance = np.array([[-1.0], [1.5]]), np.array([0.3, 0.7]), 0.5
    # weights exp(−β|x−y|²/2) over f are exp(β<x,y>) over f(y) e^{−β|y|²/2}, again a mixture of Gaussians
    shrunk = variance / (1 + beta * variance)
    log_weight = np.log(weights) - beta * means[:, 0] ** 2 / (2 * (1 + beta * variance))
    tilted = np.exp(log_weight - log_weight.max())
    measure = GaussianMixture(tilted / tilted.sum(), means / (1 + beta * variance), shrunk * np.eye(1))
    smoothed = variance + 1 / beta
    density = weights * np.exp(-((x - means[:, 0]) ** 2) / (2 * smoothed))
    gradient = (density * (means[:, 0] - x) / smoothed).sum(axis=1) / density.sum(axis=1)
    assert measure.grad_K(beta * x)[:, 0] == pytest.approx(x[:, 0] + gradient / beta, rel=1e-12)


@pytest.mark.parametrize(("dim", "beta", "n"), [(2, 200.0, 4000), (3, 20.0, 4000), (5, 10.0, 4000)])
def test_tokens_drift_and_tremble_as_predicted(dim: int, beta: float, n: int) -> None:
    found = token_layer(dim, beta, 0.5, n, np.random.default_rng(1), replicates=200)
    slope, noise, ratio = found.drift_slope, found.noise, found.drift_to_noise
    assert abs(slope.measured.value - 1) < 3.5 * slope.measured.stderr
    relative = noise.measured.stderr / noise.measured.value
    assert abs(noise.measured.value / noise.predicted - 1) < 3.5 * relative + 0.02
    assert ratio.measured.value * noise.measured.value == pytest.approx(rms_slope(0.5, dim) / beta, rel=0.15)


def test_condition_for_the_flow_to_be_visible() -> None:
    """Drift equals noise at β ~ n^{2/(d+1)}; exactly the predicted β for large n."""
    for dim in (2, 3, 5):
        beta = visible_until(1e12, dim, 0.4)
        assert drift_to_noise(1e12, beta, dim, 0.4) == pytest.approx(1, rel=1e-3)
        assert visible_until(8e12, dim, 0.4) / beta == pytest.approx(8 ** (2 / (dim + 1)), rel=1e-12)
    assert rms_slope(0.5, 2) == pytest.approx(math.sqrt(1 - math.sqrt(0.75)), rel=1e-12)


def test_document() -> None:
    document = heat_flow(n=2000, seed=1).document()
    assert document["mode_1"]["predicted"] == pytest.approx(0.5 * math.exp(0.2))
    assert round(document["mode_1"]["measured"], 4) == 0.6107
    hot, cold = document["tokens"]
    assert hot["drift_to_noise"]["predicted"] < 1 < cold["drift_to_noise"]["predicted"]
    assert cold["beta"] < document["visible_until_beta"]["predicted"] < hot["beta"]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: ZonalFlow(1, 10.0, 3), "dim is 1"),
        (lambda: ZonalFlow(2, 0.0, 3), "beta is 0"),
        (lambda: ZonalFlow(2, 10.0, 0), "degree is 0"),
        (lambda: ZonalFlow(2, 10.0, 1).layers([0.1, 0.1], 1), "2 coefficients"),
        (lambda: ZonalFlow(2, 10.0, 1).layers([1.5], 1), "use smaller coefficients"),
        (lambda: heat_flow(amplitude=2.0), "amplitude is 2"),
        (lambda: heat_flow(layers=0), "layers is 0"),
    ],
)
def test_bad_input(act: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()  # type: ignore[operator]
