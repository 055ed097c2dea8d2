"""The list of token laws that every test of a measure runs over, each with a second implementation of K in torch.

The second K shares nothing with the package: radial laws integrate the marginal of the sphere by Gauss-Jacobi nodes,
the others use their textbook formula. It can be differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from scipy.special import roots_jacobi

from limitlens.measures import Ball, Cube, Discrete, Gaussian, GaussianMixture, Measure, Sample, Sphere, VonMisesFisher

Potential = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A measure and its K as a torch function of one tilt (d,), independent of the package."""

    measure: Measure
    K: Potential


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def radial_quadrature(dim: int, nodes: int = 200) -> Potential:
    """log E exp(r X₁) on the unit sphere of R^dim, dim ≥ 2: X₁ has density ∝ (1 − x²)^{(dim−3)/2}."""
    points, weights = (torch.from_numpy(array) for array in roots_jacobi(nodes, (dim - 3) / 2, (dim - 3) / 2))
    logs = torch.log(weights / weights.sum())
    return lambda r: torch.logsumexp(logs + r[..., None] * points, dim=-1)


def exact_radial(r: float, dim: float) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    """K, A/r and A' from Bessel functions in 60 digits."""
    with mpmath.workdps(60):
        x, order = mpmath.mpf(r), mpmath.mpf(dim) / 2 - 1
        low, high = (mpmath.besseli(order + step, x, maxterms=10**6) for step in (0, 1))
        mean = high / low
        value = mpmath.loggamma(order + 1) + order * mpmath.log(2 / x) + mpmath.log(low)
        return value, mean / x, 1 - mean**2 - (dim - 1) * mean / x


def _gaussian(mean: Any, covariance: Any) -> Potential:
    m, s = (torch.as_tensor(np.asarray(array, dtype=float)) for array in (mean, covariance))
    return lambda t: t @ m + t @ s @ t / 2


def _mixture(weights: Any, means: Any, covariances: Any) -> Potential:
    logs = torch.log(torch.as_tensor(np.asarray(weights, dtype=float)))
    parts = [_gaussian(mean, covariance) for mean, covariance in zip(means, covariances, strict=True)]
    return lambda t: torch.logsumexp(logs + torch.stack([part(t) for part in parts]), dim=0)


def _finite(points: Any, weights: Any) -> Potential:
    x, w = (torch.as_tensor(np.asarray(array, dtype=float)) for array in (points, weights))
    return lambda t: torch.logsumexp(torch.log(w) + x @ t, dim=0)


def _spherical(dim: int, radius: float) -> Potential:
    potential = radial_quadrature(dim)
    return lambda t: potential(radius * t.norm())


def _von_mises_fisher(direction: Any, concentration: float, radius: float) -> Potential:
    shift = torch.as_tensor(np.asarray(direction, dtype=float))
    shift = concentration * shift / shift.norm()
    potential = radial_quadrature(len(shift))
    return lambda t: potential((shift + radius * t).norm()) - potential(torch.tensor(concentration).double())


def _cube(half_width: float) -> Potential:
    potential = radial_quadrature(3)  # a coordinate of the sphere of R³ is uniform on [−1, 1]
    return lambda t: potential(half_width * t.abs()).sum()


_rng = np.random.default_rng(20)
_factor = _rng.standard_normal((3, 3))
_matrix = _factor @ _factor.T / 3
_singular = np.outer([1.0, 2.0, -1.0], [1.0, 2.0, -1.0]) / 3
_means = np.array([[1.0, 0.0, -1.0], [-2.0, 0.5, 0.0], [0.0, 0.0, 3.0]])
_weights = np.array([0.2, 0.5, 0.3])
_matrices = np.stack([_matrix, np.diag([0.5, 1.0, 2.0]), _singular])
_points = _rng.standard_normal((40, 3))
_probabilities = _rng.dirichlet(np.ones(40))
_tokens = _rng.standard_normal((500, 4)).astype(np.float32)

CASES: dict[str, Case] = {
    "gaussian-1d": Case(Gaussian(0.5, 2.0), _gaussian([0.5], [[2.0]])),
    "gaussian-isotropic": Case(Gaussian([1.0, -2.0, 0.0, 3.0], 0.7), _gaussian([1, -2, 0, 3], 0.7 * np.eye(4))),
    "gaussian-diagonal": Case(Gaussian(0.3, [1.0, 0.0, 4.0]), _gaussian([0.3] * 3, np.diag([1, 0, 4]))),
    "gaussian-matrix": Case(Gaussian([1.0, 0.0, -1.0], _matrix), _gaussian([1, 0, -1], _matrix)),
    "gaussian-singular": Case(Gaussian(0.0, _singular), _gaussian([0.0] * 3, _singular)),
    "mixture-shared-variance": Case(
        GaussianMixture(_weights, _means, 0.5), _mixture(_weights, _means, [0.5 * np.eye(3)] * 3)
    ),
    "mixture-variances": Case(
        GaussianMixture(_weights, _means, [0.5, 1.0, 0.1]),
        _mixture(_weights, _means, [variance * np.eye(3) for variance in (0.5, 1.0, 0.1)]),
    ),
    "mixture-shared-matrix": Case(
        GaussianMixture(_weights, _means, _matrix), _mixture(_weights, _means, [_matrix] * 3)
    ),
    "mixture-matrices": Case(GaussianMixture(_weights, _means, _matrices), _mixture(_weights, _means, _matrices)),
    "sphere-1d": Case(Sphere(1, 1.5), _finite([[1.5], [-1.5]], [0.5, 0.5])),
    "sphere-2d": Case(Sphere(2), _spherical(2, 1.0)),
    "sphere-3d": Case(Sphere(3, 0.5), _spherical(3, 0.5)),
    "sphere-20d": Case(Sphere(20, 2.0), _spherical(20, 2.0)),
    "ball-1d": Case(Ball(1), _cube(1.0)),
    "ball-2d": Case(Ball(2, 1.5), _spherical(4, 1.5)),
    "ball-9d": Case(Ball(9), _spherical(11, 1.0)),
    "vmf-1d": Case(VonMisesFisher([-2.0], 0.8), _finite([[1.0], [-1.0]], np.exp([-0.8, 0.8]) / (2 * np.cosh(0.8)))),
    "vmf-2d": Case(VonMisesFisher([1.0, 1.0], 3.0, 2.0), _von_mises_fisher([1, 1], 3.0, 2.0)),
    "vmf-3d": Case(VonMisesFisher([1.0, 2.0, -1.0], 50.0), _von_mises_fisher([1, 2, -1], 50.0, 1.0)),
    "vmf-10d": Case(VonMisesFisher(np.arange(10.0), 5.0), _von_mises_fisher(np.arange(10), 5.0, 1.0)),
    "cube-1d": Case(Cube(1, 2.0), _cube(2.0)),
    "cube-5d": Case(Cube(5), _cube(1.0)),
    "discrete": Case(Discrete(_points, _probabilities), _finite(_points, _probabilities)),
    "sample": Case(Sample(_tokens), _finite(_tokens, np.full(500, 1 / 500))),
}


@dataclass(frozen=True)
class KeyCase:
    """What a choice of keys claims of itself, which tests hold it to."""

    sees_queries: bool = False
    ordered: bool = False
    needs_past: bool = False
    sampled: bool = False
    unbiased: bool = False
    needs_repeat: bool = False


KEY_CASES = {
    "random": KeyCase(sampled=True, unbiased=True),
    "random_eviction": KeyCase(sampled=True),
    "recent": KeyCase(ordered=True),
    "streaming": KeyCase(ordered=True),
    "knorm": KeyCase(),
    "snapkv": KeyCase(needs_past=True),
    "expected": KeyCase(needs_past=True),
    "priority": KeyCase(needs_past=True, sampled=True, unbiased=True),
    "reconstruction": KeyCase(needs_repeat=True),
    "oracle_topk": KeyCase(sees_queries=True),
    "bigbird": KeyCase(ordered=True, sampled=True),
    "strided": KeyCase(ordered=True),
    "dilated": KeyCase(ordered=True),
    "block": KeyCase(ordered=True),
}
