"""Every law of tokens against a second formula for K, autograd, its own samples, and laws it must coincide with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import CASES, Case, exact_radial, generator
from limitlens.errors import InputError
from limitlens.measures import (
    Ball,
    Cube,
    Discrete,
    Gaussian,
    GaussianMixture,
    Measure,
    Sample,
    Sphere,
    VonMisesFisher,
    as_measure,
)
from limitlens.measures.custom import CustomMeasure

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def tilts(dim: int, lengths: tuple[float, ...] = (0.01, 0.3, 1.0, 5.0, 30.0, 100.0)) -> np.ndarray:
    """Two random directions at each length, shape (lengths, 2, dim)."""
    directions = np.random.default_rng(dim).standard_normal((len(lengths), 2, dim))
    return directions / np.linalg.norm(directions, axis=-1, keepdims=True) * np.array(lengths)[:, None, None]


def relative(computed: np.ndarray, expected: np.ndarray) -> float:
    """The largest error over tilts, relative to the largest entry at that tilt."""
    flat, true = (array.reshape(len(expected), -1) for array in (computed, expected))
    return float((np.abs(flat - true).max(axis=1) / np.abs(true).max(axis=1)).max())


# --- K and its derivatives -------------------------------------------------------------------------------------------


@every_case
def test_K_agrees_with_a_second_formula(case: Case) -> None:
    at = tilts(case.measure.dim)
    expected = np.array([case.K(torch.from_numpy(tilt)) for tilt in at.reshape(-1, case.measure.dim)])
    # For small tilts the second formula, a plain log-sum-exp, is the less accurate one: absolute 1e-13 there.
    np.testing.assert_allclose(case.measure.K(at).reshape(-1), expected, rtol=1e-12, atol=1e-13)


@every_case
def test_gradient_is_that_of_autograd(case: Case) -> None:
    at = torch.from_numpy(tilts(case.measure.dim).reshape(-1, case.measure.dim))
    expected = np.stack([torch.func.grad(case.K)(tilt).numpy() for tilt in at])
    assert relative(case.measure.grad_K(at.numpy()), expected) < 1e-10


@every_case
def test_hessian_is_that_of_autograd(case: Case) -> None:
    at = torch.from_numpy(tilts(case.measure.dim, (0.3, 1.0, 5.0, 30.0)).reshape(-1, case.measure.dim))
    expected = np.stack([torch.autograd.functional.hessian(case.K, tilt).numpy() for tilt in at])
    computed = case.measure.hess_K(at.numpy())
    # Relative to the variance scale of the law where the tilted law has collapsed onto one point.
    scale = 1e-4 * np.abs(case.measure.covariance).max()
    error = np.abs(computed - expected).max(axis=(1, 2)) / np.maximum(np.abs(expected).max(axis=(1, 2)), scale)
    assert error.max() < 1e-8


@every_case
def test_origin(case: Case) -> None:
    measure, zero = case.measure, np.zeros(case.measure.dim)
    assert abs(measure.K(zero)) < 1e-15
    np.testing.assert_array_equal(measure.grad_K(zero), measure.mean)
    np.testing.assert_array_equal(measure.hess_K(zero), measure.covariance)
    assert measure.mean is measure.mean


@every_case
def test_shapes_follow_the_leading_axes(case: Case) -> None:
    measure = case.measure
    for leading in ((), (0,), (3,), (2, 1, 3)):
        at = np.ones((*leading, measure.dim))
        assert measure.K(at).shape == leading
        assert measure.grad_K(at).shape == (*leading, measure.dim)
        assert measure.hess_K(at).shape == (*leading, measure.dim, measure.dim)
    assert isinstance(measure.K(np.ones(measure.dim)), np.ndarray)
    assert "\n" not in repr(measure)
    assert repr(measure).startswith(f"{type(measure).__name__}(dim={measure.dim}")


@every_case
def test_tilts_are_left_alone_and_blocks_do_not_matter(case: Case) -> None:
    at = np.random.default_rng(1).standard_normal((3000, case.measure.dim))
    before = at.copy()
    together = case.measure.grad_K(at)
    np.testing.assert_array_equal(at, before)
    np.testing.assert_allclose(
        together[::700], [case.measure.grad_K(tilt) for tilt in at[::700]], rtol=1e-13, atol=1e-14
    )


@given(
    name=st.sampled_from(sorted(CASES)),
    factor=st.floats(0.1, 10),
    sign=st.sampled_from([-1, 1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_scaling_the_law_scales_the_tilt(name: str, factor: float, sign: int, seed: int) -> None:
    measure, factor = CASES[name].measure, sign * factor
    at = np.random.default_rng(seed).standard_normal((4, measure.dim))
    scaled = measure.scaled(factor)
    assert type(scaled) is type(measure)
    single = name == "sample"  # scaled tokens are rounded to their own type, float32
    rtol, atol = (1e-6, 1e-6) if single else (1e-11, 1e-13)
    np.testing.assert_allclose(scaled.K(at), measure.K(factor * at), rtol=rtol, atol=atol)
    np.testing.assert_allclose(scaled.grad_K(at), factor * measure.grad_K(factor * at), rtol=1e2 * rtol, atol=10 * atol)
    assert scaled.radius == pytest.approx(abs(factor) * measure.radius, rel=rtol)


@given(name=st.sampled_from(sorted(CASES)), length=st.floats(0.01, 300), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_K_is_convex_and_below_its_radius(name: str, length: float, seed: int) -> None:
    measure = CASES[name].measure
    a, b = length * np.random.default_rng(seed).standard_normal((2, measure.dim))
    ends, middle = measure.K(np.stack([a, b])), measure.K((a + b) / 2)
    slack = 1e-12 * (1 + np.abs(ends).max())
    assert middle <= ends.mean() + slack
    assert (measure.grad_K(a) - measure.grad_K(b)) @ (a - b) >= -slack
    assert np.linalg.eigvalsh(measure.hess_K(a)).min() >= -1e-10 * np.abs(measure.covariance).max()
    assert ends[0] <= np.linalg.norm(a) * measure.radius + slack


# --- samples ---------------------------------------------------------------------------------------------------------


@every_case
def test_samples_have_the_mean_and_covariance_of_the_law(case: Case) -> None:
    measure, quarter = case.measure, 100_000 // case.measure.dim
    tokens = measure.sample((4, quarter), generator(3))
    assert tokens.shape == (4, quarter, measure.dim)
    assert tokens.dtype == torch.float64
    flat = tokens.reshape(-1, measure.dim).numpy()
    assert np.linalg.norm(flat, axis=1).max() <= measure.radius * (1 + 1e-12)
    centred = flat - measure.mean
    products = centred[:, :, None] * centred[:, None, :]
    for values, true in ((centred, 0), (products, measure.covariance)):
        stderr = values.std(axis=0) / np.sqrt(len(values))
        assert (np.abs(values.mean(axis=0) - true) <= 4.5 * stderr + 1e-12).all()


@every_case
def test_samples_are_reproducible(case: Case) -> None:
    first, again, other = (case.measure.sample(50, generator(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert case.measure.sample((), generator(7)).shape == (case.measure.dim,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_case
def test_samples_live_on_the_device_of_the_generator(case: Case) -> None:
    tokens = case.measure.sample((2, 500), torch.Generator("cuda").manual_seed(0))
    assert tokens.is_cuda
    assert tokens.dtype == torch.float64
    spread = np.sqrt(np.diag(case.measure.covariance) / 1000)
    assert (np.abs(tokens.mean(dim=(0, 1)).cpu().numpy() - case.measure.mean) <= 5 * spread + 1e-12).all()


@every_case
def test_attention_over_many_tokens_is_the_gradient(case: Case) -> None:
    """The self-normalised softmax average of 10⁶ tokens, within 4.5 of its standard errors in every coordinate."""
    measure, count = case.measure, 1_000_000 // case.measure.dim
    tokens = measure.sample(count, generator(11))
    scale = np.sqrt(np.linalg.eigvalsh(measure.covariance)[-1])
    tilt = tilts(measure.dim, (1.0,))[0, 0] / scale  # a score of standard deviation about 1: weights have light tails
    weights = torch.softmax(tokens @ torch.from_numpy(tilt), dim=0)
    output = weights @ tokens
    stderr = torch.sqrt((weights**2) @ (tokens - output) ** 2).numpy()
    assert (np.abs(output.numpy() - measure.grad_K(tilt)) <= 4.5 * stderr + 1e-12).all()


@pytest.mark.parametrize(
    ("dim", "concentration"), [(1, 0.3), (2, 0.01), (2, 500.0), (3, 1e6), (50, 20.0), (1000, 3000.0)]
)
def test_von_mises_fisher_samples_at_every_concentration(dim: int, concentration: float) -> None:
    measure = VonMisesFisher(np.linspace(1, 2, dim), concentration)
    count = max(4000, 100_000 // dim)
    tokens = measure.sample(count, generator(5)).numpy()
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=1), 1, rtol=1e-13)
    gaps = 1 - tokens @ measure.direction  # 1 − cos, exact to rounding of order 1e-16
    along = measure.direction @ measure.covariance @ measure.direction
    mean_gap = 1 - measure.direction @ measure.mean
    assert abs(gaps.mean() - mean_gap) <= 4.5 * np.sqrt(along / count) + 1e-15
    spread = gaps.var() / count**0.5 * np.sqrt(np.mean((gaps - gaps.mean()) ** 4) / gaps.var() ** 2 - 1)
    assert abs(gaps.var() - along) <= 4.5 * spread + 1e-15


# --- laws that must coincide -----------------------------------------------------------------------------------------

COINCIDENCES: dict[str, tuple[Measure, Measure]] = {
    "the sphere of R¹ is a pair": (Sphere(1, 2.0), Discrete([[2.0], [-2.0]])),
    "the cube of R¹ is a ball": (Cube(1, 1.5), Ball(1, 1.5)),
    "no concentration is the sphere": (VonMisesFisher([1.0, 1.0, 0.0, 2.0], 0.0, 1.5), Sphere(4, 1.5)),
    "one component is a Gaussian": (GaussianMixture([1.0], [[1.0, 2.0]], 0.5), Gaussian([1.0, 2.0], 0.5)),
    "equal components are a Gaussian": (GaussianMixture([0.3, 0.7], np.ones((2, 3)), 2.0), Gaussian(1.0, [2.0] * 3)),
    "a weight of zero is no component": (GaussianMixture([0, 1], [[9.0], [1.0]], [5, 1]), Gaussian(1.0, 1.0)),
    "a point of weight zero is no point": (Discrete([[1.0], [50.0]], [1, 0]), Discrete([[1.0]])),
    "variances are a diagonal": (Gaussian(0, [1.0, 2.0, 3.0]), Gaussian(0, np.diag([1.0, 2.0, 3.0]))),
    "tokens are points of equal weight": (
        Sample(np.arange(12.0).reshape(4, 3)),
        Discrete(np.arange(12.0).reshape(4, 3)),
    ),
    "whole numbers are tokens": (Sample(np.arange(6).reshape(2, 3)), Discrete([[0, 1, 2], [3, 4, 5]])),
}


@pytest.mark.parametrize("pair", COINCIDENCES.values(), ids=COINCIDENCES.keys())
def test_laws_coincide(pair: tuple[Measure, Measure]) -> None:
    first, second = pair
    at = tilts(first.dim, (0.0, 1e-3, 1.0, 10.0, 1000.0))
    np.testing.assert_allclose(first.K(at), second.K(at), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(first.grad_K(at), second.grad_K(at), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(first.hess_K(at), second.hess_K(at), rtol=1e-10, atol=1e-13)


def test_a_tilted_sphere_is_a_von_mises_fisher_law() -> None:
    sphere, shift = Sphere(6, 2.0), np.array([1.0, 0, -2, 0.5, 0, 3])
    tilted = VonMisesFisher(shift, 2.0 * np.linalg.norm(shift), 2.0)
    at = tilts(6)
    np.testing.assert_allclose(tilted.K(at), sphere.K(at + shift) - sphere.K(shift), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(tilted.grad_K(at), sphere.grad_K(at + shift), rtol=1e-12)


# --- far tilts, high dimensions, large samples -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1e-8, 1.0, 64.0, 1e4])
def test_high_dimension(length: float) -> None:
    """d = 4096: radial laws against Bessel functions in 60 digits, the others against their formulas."""
    dim, kappa = 4096, 1000.0
    tilt = np.random.default_rng(0).standard_normal(dim)
    tilt *= length / np.linalg.norm(tilt)
    sphere, ball, vmf, cube = Sphere(dim), Ball(dim), VonMisesFisher(tilt, kappa), Cube(dim)
    for measure, sphere_dim in ((sphere, dim), (ball, dim + 2)):
        value, tangential, _ = exact_radial(length, sphere_dim)
        assert float(measure.K(tilt)) == pytest.approx(float(value), rel=1e-14)
        np.testing.assert_allclose(measure.grad_K(tilt), float(tangential) * tilt, rtol=1e-14)
    end, start = exact_radial(mpmath.mpf(kappa) + length, dim), exact_radial(kappa, dim)  # the tilt is along μ
    assert float(vmf.K(tilt)) == pytest.approx(float(end[0] - start[0]), rel=1e-13)
    np.testing.assert_allclose(vmf.grad_K(tilt), float(end[1]) * (kappa / length + 1) * tilt, rtol=1e-13)
    sides = np.abs(tilt)
    expected = np.log(np.sinh(sides) / sides).sum() if length >= 1 else length**2 / 6
    assert float(cube.K(tilt)) == pytest.approx(expected, rel=1e-11)
    mixture = GaussianMixture([0.5, 0.5], [np.zeros(dim), np.ones(dim)], 1.0)
    assert float(mixture.K(tilt)) == pytest.approx(length**2 / 2 + np.logaddexp(0, tilt.sum()) - np.log(2), rel=1e-11)
    assert float(Gaussian(np.zeros(dim), 2.0).K(tilt)) == pytest.approx(length**2, rel=1e-14)
    for measure in (sphere, ball, vmf, cube):
        assert np.linalg.norm(measure.grad_K(tilt)) <= measure.radius


def test_far_tilts_select_the_extreme_token() -> None:
    tokens = np.random.default_rng(4).standard_normal((2000, 16))
    tilt = 1e4 * np.random.default_rng(5).standard_normal(16)
    best = tokens[np.argmax(tokens @ tilt)]
    for measure in (Sample(tokens), Discrete(tokens)):
        np.testing.assert_allclose(measure.grad_K(tilt), best, rtol=1e-12)
        assert float(measure.K(tilt)) == pytest.approx(tilt @ best - np.log(2000), rel=1e-13)
        assert np.abs(measure.hess_K(tilt)).max() < 1e-12
    mixture = GaussianMixture([0.5, 0.5], [[0.0, 0.0], [1.0, 0.0]], 1.0)
    np.testing.assert_allclose(mixture.grad_K(np.array([1e4, 0.0])), [10_001, 0], rtol=1e-15)


def test_a_sample_is_never_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.npy"
    tokens = np.random.default_rng(6).standard_normal((5000, 8)).astype(np.float32)
    np.save(path, tokens)
    mapped = np.load(path, mmap_mode="r")
    measure = Sample(mapped)
    assert measure.tokens is mapped
    assert Sample(tokens).tokens is tokens
    assert np.shares_memory(Sample(torch.from_numpy(tokens)).tokens, tokens)
    at = tilts(8, (0.1, 3.0))
    expected = [method(at) for method in (measure.K, measure.grad_K, measure.hess_K)]
    monkeypatch.setattr("limitlens.measures.discrete._ENTRIES", 512)
    monkeypatch.setattr("limitlens.measures.discrete._TILTS", 3)
    blocked = [method(at) for method in (measure.K, measure.grad_K, measure.hess_K)]
    for value, true in zip(blocked, expected, strict=True):
        np.testing.assert_allclose(value, true, rtol=1e-12, atol=1e-14)
    drawn = measure.sample((3, 10), generator(0))
    assert drawn.dtype == torch.float64
    assert {tuple(row) for row in drawn.reshape(-1, 8).tolist()} <= {
        tuple(row) for row in tokens.astype(float).tolist()
    }


def test_sample_reads_half_precision_and_distant_means() -> None:
    tokens = torch.randn(300, 4, generator=generator(0))
    half = Sample(tokens.bfloat16())
    np.testing.assert_array_equal(half.tokens, tokens.bfloat16().float().numpy())
    far = tokens.double().numpy() + 1e6
    np.testing.assert_allclose(Sample(far).covariance, np.cov(far.T, bias=True), rtol=1e-9)


# --- bad input -------------------------------------------------------------------------------------------------------

BAD_INPUT = {
    "nan mean": (lambda: Gaussian([0.0, np.nan], 1.0), "mean holds nan at index"),
    "infinite variance": (lambda: Gaussian(0.0, np.inf), "covariance holds inf"),
    "negative variance": (lambda: Gaussian(0.0, [1.0, -2.0]), "negative variance -2"),
    "indefinite": (lambda: Gaussian(0.0, [[1.0, 2.0], [2.0, 1.0]]), "negative eigenvalue -1"),
    "asymmetric": (lambda: Gaussian(0.0, [[1.0, 0.5], [0.0, 1.0]]), "not symmetric"),
    "not square": (lambda: Gaussian(0.0, np.ones((3, 2))), "square matrix"),
    "two dimensions": (lambda: Gaussian([0.0, 0.0], np.eye(3)), "with one d"),
    "no dimension": (lambda: Gaussian([], 1.0), "with one d"),
    "text": (lambda: Gaussian("zero", 1.0), "could not be read as numbers"),
    "weights sum": (lambda: GaussianMixture([0.5, 0.4], np.ones((2, 2)), 1.0), "weights sum to 0.9"),
    "negative weights": (lambda: Discrete([[0.0], [1.0]], [1.5, -0.5]), "negative number -0.5"),
    "weights length": (lambda: Discrete([[0.0], [1.0]], [1.0]), "length 1; expected 2"),
    "mixture spread": (lambda: GaussianMixture([1.0], [[0.0, 0.0]], np.ones((3, 3))), r"shape \(3, 3\)"),
    "mixture indefinite": (lambda: GaussianMixture([1.0], [[0.0, 0.0]], [np.diag([1.0, -1.0])]), "negative eigenvalue"),
    "no components": (lambda: GaussianMixture([], np.ones((0, 2)), 1.0), "at least one"),
    "dim zero": (lambda: Sphere(0), "dim is 0; expected at least 1"),
    "dim fraction": (lambda: Cube(2.5), "whole number"),
    "radius zero": (lambda: Ball(3, 0.0), "radius is 0; expected more than 0"),
    "radius nan": (lambda: Sphere(3, float("nan")), "radius holds nan"),
    "half width": (lambda: Cube(3, -1.0), "half_width is -1"),
    "no direction": (lambda: VonMisesFisher([0.0, 0.0], 1.0), "direction is zero"),
    "concentration": (lambda: VonMisesFisher([1.0, 0.0], -1.0), "concentration is -1; expected at least 0"),
    "no tokens": (lambda: Sample(np.ones((0, 3))), r"shape \(0, 3\); expected \(n, dim\) with at least one row"),
    "no columns": (lambda: Discrete(np.ones((3, 0))), "at least one row and one column"),
    "flat tokens": (lambda: Sample(np.ones(3)), "expected 2 dimension"),
    "nan tokens": (lambda: Sample(np.array([[1.0], [np.nan]], dtype=np.float32)), "NaN or infinity in row 1"),
    "tilt length": (lambda: Sphere(3).K(np.ones((2, 4))), r"expected \(..., 3\)"),
    "tilt nan": (lambda: Gaussian(0, 1).grad_K(np.array([[np.nan]])), "tilts holds nan"),
    "scaled to nothing": (lambda: Sphere(3).scaled(0.0), "radius is 0"),
}


@pytest.mark.parametrize(("build", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_named_in_one_sentence(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_weights_are_made_exact() -> None:
    assert Discrete([[0.0], [1.0]], [0.5, 0.5 + 5e-7]).weights.sum() == pytest.approx(1, abs=1e-15)


# --- A law of one's own ----------------------------------------------------------------------------------------------


class Bare:
    """A law stripped to what `as_measure` needs, answering in NumPy."""

    def __init__(self, law: Measure) -> None:
        self.law, self.dim = law, law.dim

    def K(self, tilts: np.ndarray) -> np.ndarray:
        return self.law.K(tilts)

    def grad_K(self, tilts: np.ndarray) -> np.ndarray:
        return self.law.grad_K(tilts)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
        return self.law.sample(shape, generator).numpy()


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e6])
@every_case
def test_missing_methods_of_a_custom_law_are_derived(case: Case, scale: float) -> None:
    law = case.measure.scaled(scale)
    own = as_measure(Bare(law))
    at = tilts(law.dim, (0.1, 1.0, 3.0)) / scale
    np.testing.assert_allclose(own.K(at), law.K(at), rtol=1e-12)
    np.testing.assert_allclose(own.mean, law.mean)
    assert relative(own.covariance[None], law.covariance[None]) < 1e-8
    assert relative(own.hess_K(at), law.hess_K(at)) < 1e-6
    assert relative(own.scaled(-2.0).covariance[None], 4 * law.covariance[None]) < 1e-8
    drawn = own.sample((2, 3), generator(0))
    assert torch.equal(drawn, law.sample((2, 3), generator(0)))
    assert torch.equal(own.scaled(2.0).sample(3, generator(0)), 2 * law.sample((3,), generator(0)))


def test_a_custom_law_with_wrong_values_is_refused() -> None:
    class Wrong(Bare):
        def K(self, tilts: np.ndarray) -> np.ndarray:
            return self.law.K(tilts)[None]

        def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
            return np.zeros(shape)

    with pytest.raises(InputError, match="K returned the shape"):
        as_measure(Wrong(Gaussian(np.zeros(2), 1.0)))
    own = CustomMeasure(Wrong(Gaussian(np.zeros(2), 1.0)))
    with pytest.raises(InputError, match="sample returned the shape"):
        own.sample((5,), generator(0))
    assert repr(own) == "Wrong(dim=2)"
