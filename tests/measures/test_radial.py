"""Radial functions against 60-digit arithmetic, closed forms and each other."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import exact_radial
from limitlens.errors import InputError
from limitlens.measures.radial import radial_K, radial_mean, radial_tangential, radial_variance


def relative(computed: np.ndarray, expected: list[mpmath.mpf]) -> float:
    pairs = zip(computed, expected, strict=True)
    return max(float(abs((mpmath.mpf(float(value)) - true) / true)) for value, true in pairs)


@pytest.mark.parametrize("dim", [1, 1.5, 2, 3, 4, 9, 33, 48, 49, 50, 51, 100, 384, 4096])
def test_relative_accuracy(dim: float) -> None:
    order = dim / 2 - 1
    grid = [1e-12, 1e-6, 1e-3, 0.1, 1, 3, 10, 25, 60, 300, 1e3, 1e4, 0.66 * order, order, 2 * order, order**2]
    r = np.array([radius for radius in grid if 0 < radius <= 1e4])
    values, tangential, variances = zip(*(exact_radial(radius, dim) for radius in r), strict=True)
    assert relative(radial_K(r, dim), values) < 2e-15
    assert relative(radial_tangential(r, dim), tangential) < 2e-15
    if dim > 1:  # in d = 1 the variance is exponentially small: see the closed form below
        assert relative(radial_variance(r, dim), variances) < 1e-12


def test_beyond_the_working_range() -> None:
    for dim in (2, 3, 64):
        values = exact_radial(1e6, dim)
        computed = radial_K(1e6, dim), radial_tangential(1e6, dim), radial_variance(1e6, dim)
        for value, true in zip(computed, values, strict=True):
            assert abs(float(value) / float(true) - 1) < 1e-12
        assert np.isfinite(radial_K(1e12, dim))
        assert radial_mean(1e12, dim) == pytest.approx(1 - (dim - 1) / 2e12, abs=1e-15)


def test_one_dimension_is_hyperbolic() -> None:
    r = np.array([1e-9, 1e-3, 0.5, 2, 20, 300.0])
    np.testing.assert_allclose(radial_K(r[2:], 1), np.logaddexp(r, -r)[2:] - np.log(2), rtol=1e-14)
    np.testing.assert_allclose(radial_mean(r, 1), np.tanh(r), rtol=1e-14)
    np.testing.assert_allclose(radial_variance(r, 1), np.cosh(r) ** -2.0, rtol=1e-13)


def test_three_dimensions_are_langevin() -> None:
    r = np.array([0.5, 1, 5, 50, 1000.0])
    np.testing.assert_allclose(radial_mean(r, 3), 1 / np.tanh(r) - 1 / r, rtol=1e-13)
    np.testing.assert_allclose(radial_K(r, 3), r + np.log(-np.expm1(-2 * r) / (2 * r)), rtol=1e-13)


def test_origin_is_exact_radial() -> None:
    for dim in (1, 2, 3, 50, 4096):
        assert radial_K(0, dim) == 0
        assert radial_mean(0, dim) == 0
        assert radial_tangential(0, dim) == pytest.approx(1 / dim, rel=1e-15)
        assert radial_variance(0, dim) == pytest.approx(1 / dim, rel=1e-14)


@given(r=st.floats(1e-3, 1e4), dim=st.floats(1, 5000), gap=st.floats(0.01, 3))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_mean_increases_and_stays_below_one(r: float, dim: float, gap: float) -> None:
    low, high = radial_mean([r, r * (1 + gap)], dim)
    assert 0 < low <= high * (1 + 1e-15) <= 1 + 1e-15
    assert radial_variance(r, dim) <= radial_tangential(r, dim) * (1 + 1e-12) <= (1 + 2e-12) / dim


def test_shapes_and_errors() -> None:
    assert radial_K(np.ones((2, 3)), 4).shape == (2, 3)
    assert radial_variance(np.ones(20_000), 4).shape == (20_000,)
    assert radial_mean([], 4).shape == (0,)
    with pytest.raises(InputError, match="expected radii"):
        radial_K([-1.0], 3)
    with pytest.raises(InputError, match="at least 1"):
        radial_K([1.0], 0.5)
    with pytest.raises(InputError, match="finite"):
        radial_K([np.nan], 3)
