"""Tokens uniform on a sphere, ball or cube, or von Mises-Fisher: K of all follows from that of the unit sphere."""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array
from limitlens.measures.base import Measure, brief, check_dim, check_scalar, standard_normal, token_shape, uniform
from limitlens.measures.radial import radial_K, radial_tangential, radial_variance

SMOOTH_FROM = 8  # dimension from which on `limit_covariance` is accurate: the density of Q is smooth
_RATIOS, _FREQUENCIES = 400, 300  # quadrature nodes of `limit_covariance` in q and in u


class _Spherical(Measure):
    """Distribution with K(t) = Λ(|s|) − const, s = Rt + shift; Λ(r) = log E exp(r X₁), X uniform on a unit sphere.

    ∇K = R g s and ∇²K = R² [g I + (Λ'' − g) uuᵀ], with g = Λ'(|s|)/|s| and u = s/|s|.
    """

    _sphere_dim: int  # dimension of the space of the sphere whose Λ is used

    def _arguments(self, tilts: Array) -> Array:
        """Vectors s = Rt + shift (..., d) at tilts t (..., d), for K(t) = Λ(|s|) − const."""
        return self.radius * self.check_tilts(tilts)

    def K(self, tilts: Array) -> Array:
        return radial_K(_length(self._arguments(tilts)), self._sphere_dim)

    def grad_K(self, tilts: Array) -> Array:
        arguments = self._arguments(tilts)
        arguments *= self.radius * radial_tangential(_length(arguments), self._sphere_dim)[..., None]
        return arguments

    def hess_K(self, tilts: Array) -> Array:
        arguments = self._arguments(tilts)
        lengths = _length(arguments)
        units = arguments / np.where(lengths > 0, lengths, 1)[..., None]
        across = radial_tangential(lengths, self._sphere_dim)
        along = radial_variance(lengths, self._sphere_dim)
        hessian = (along - across)[..., None, None] * units[..., :, None] * units[..., None, :]
        hessian[..., range(self.dim), range(self.dim)] += across[..., None]
        return np.asarray(self.radius**2 * hessian)


class _Uniform(_Spherical):
    """First d coordinates of a uniform point on a sphere of R^{d + dropped}: uniform on a sphere (0) or a ball (2)."""

    _dropped: ClassVar[int]

    def __init__(self, dim: int, radius: float = 1.0) -> None:
        self.dim = check_dim(dim)
        self.radius = check_scalar("radius", radius, above=0)
        self._sphere_dim = self.dim + self._dropped

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d): normal vectors scaled to length R, of which the first d coordinates are used."""
        normals = standard_normal(token_shape(shape, self._sphere_dim), generator)
        return normals.div_(normals.norm(dim=-1, keepdim=True) / self.radius)[..., : self.dim].contiguous()

    def scaled(self, factor: float) -> Self:
        """Uniform distribution on the sphere or ball of radius |factor| R."""
        return type(self)(self.dim, abs(factor) * self.radius)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, radius={self.radius:g})"


class Sphere(_Uniform):
    """Uniform distribution on the sphere of radius R in R^d: K(t) = Λ_d(R|t|), with Λ_d = `radial_K`; ±R if d = 1.

    >>> ll.Sphere(3).grad_K(np.array([0.0, 0.0, 2.0])).round(4).tolist()
    [0.0, 0.0, 0.5373]
    """

    _dropped = 0


class Ball(_Uniform):
    """Uniform distribution on the ball of radius R in R^d: K(t) = Λ(R|t|), Λ = `radial_K` of dimension d + 2."""

    _dropped = 2


class VonMisesFisher(_Spherical):
    """Von Mises-Fisher distribution: density ∝ exp(κ<μ, x>/R) on the sphere of radius R, K(t) = Λ(|κμ + Rt|) − Λ(κ).

    Λ is `radial_K`. The mean direction μ (d,) may have any length. The concentration κ = 0 gives uniform tokens.

    >>> ll.VonMisesFisher(direction=[0, 0, 1], concentration=10.0).mean.round(4).tolist()
    [0.0, 0.0, 0.9]
    """

    def __init__(self, direction: ArrayLike, concentration: float, radius: float = 1.0) -> None:
        vector = as_array("direction", direction, ndim=1)
        if not vector.any():
            raise InputError(f"direction is zero, of shape {vector.shape}; expected a vector with a non-zero entry")
        vector = vector / np.abs(vector).max()
        self.direction: Array = vector / np.linalg.norm(vector)
        self.concentration = check_scalar("concentration", concentration, above=0, closed=True)
        self.radius = check_scalar("radius", radius, above=0)
        self.dim = self._sphere_dim = vector.size

    def _arguments(self, tilts: Array) -> Array:
        return super()._arguments(tilts) + self.concentration * self.direction

    def K(self, tilts: Array) -> Array:
        """Cumulant generating function K(t) = Λ(|κμ + Rt|) − Λ(κ) at tilts t (..., d), with Λ = `radial_K`."""
        return np.asarray(super().K(tilts) - super().K(np.zeros(self.dim)))

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d) by Wood's rejection method (1994)."""
        tokens = torch.empty(token_shape(shape, self.dim), dtype=torch.float64, device=generator.device)
        flat = tokens.view(-1, self.dim)
        direction = torch.as_tensor(self.direction, device=generator.device)
        filled = 0
        while filled < len(flat):
            accepted = self._propose(len(flat) - filled, direction, generator)
            flat[filled : filled + len(accepted)] = accepted
            filled += len(accepted)
        return tokens

    def _propose(self, count: int, direction: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Tokens (accepted, d) that Wood's rejection accepts out of `count` proposals, about two thirds or more."""
        kappa, sides = self.concentration, self.dim - 1
        if sides == 0:
            signs = torch.where(uniform((count, 1), generator) < 1 / (1 + math.exp(-2 * kappa)), 1.0, -1.0)
            return self.radius * signs.double() * direction
        normals = standard_normal((count, self.dim), generator)
        height = (normals @ direction)[:, None]
        tangent = normals - height * direction
        beta: torch.Tensor = (1 - height / normals.norm(dim=-1, keepdim=True)) / 2
        # Written in the distances 1 − w and 1 − x₀, which stay accurate at high concentration.
        b = sides / (2 * kappa + math.hypot(2 * kappa, sides))
        drop = 2 * b * beta / (1 - (1 - b) * beta)
        mode = 2 * b / (1 + b)
        log_ratio = kappa * (mode - drop) + sides * torch.log((mode + (1 - mode) * drop) / (mode * (2 - mode)))
        keep = (torch.log(uniform((count, 1), generator)) <= log_ratio).squeeze(1)
        drop, tangent = drop[keep], tangent[keep]
        across: torch.Tensor = torch.sqrt(drop * (2 - drop)) / tangent.norm(dim=-1, keepdim=True)
        return self.radius * ((1 - drop) * direction + across * tangent)

    def scaled(self, factor: float) -> VonMisesFisher:
        """Distribution on the sphere of radius |factor| R, with the mean direction reversed if `factor` < 0."""
        direction = math.copysign(1.0, factor) * self.direction
        return VonMisesFisher(direction, self.concentration, abs(factor) * self.radius)

    def __repr__(self) -> str:
        shown = f"dim={self.dim}, direction={brief(self.direction)}, concentration={self.concentration:g}"
        return f"VonMisesFisher({shown}, radius={self.radius:g})"


class Cube(Measure):
    """Uniform distribution on the cube [−w, w]^d, w the half width: K(t) = Σ_i log(sinh(w t_i)/(w t_i))."""

    def __init__(self, dim: int, half_width: float = 1.0) -> None:
        self.dim = check_dim(dim)
        self.half_width = check_scalar("half_width", half_width, above=0)
        self.radius = self.half_width * self.dim**0.5

    def K(self, tilts: Array) -> Array:
        """K(t) = Σ_i Λ(w|t_i|) at tilts t (..., d), Λ that of the unit sphere in R³, whose coordinates are uniform."""
        return np.asarray(radial_K(self._arguments(tilts), 3).sum(axis=-1))

    def grad_K(self, tilts: Array) -> Array:
        """Gradient of K at tilts t (..., d): ∇K(t)_i = w coth(w t_i) − 1/t_i in each coordinate i."""
        return self.half_width**2 * self.check_tilts(tilts) * radial_tangential(self._arguments(tilts), 3)

    def hess_K(self, tilts: Array) -> Array:
        """Hessian of K at tilts t (..., d): diagonal matrices (..., d, d), since coordinates are independent."""
        arguments = self._arguments(tilts)
        hessian = np.zeros((*arguments.shape, self.dim))
        hessian[..., range(self.dim), range(self.dim)] = self.half_width**2 * radial_variance(arguments, 3)
        return hessian

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d) with every coordinate uniform on [−w, w)."""
        return self.half_width * (2 * uniform(token_shape(shape, self.dim), generator) - 1)

    def scaled(self, factor: float) -> Cube:
        """Uniform distribution on the cube of half width |factor| w."""
        return Cube(self.dim, abs(factor) * self.half_width)

    def _arguments(self, tilts: Array) -> Array:
        return self.half_width * np.abs(self.check_tilts(tilts))

    def __repr__(self) -> str:
        return f"Cube(dim={self.dim}, half_width={self.half_width:g})"


def limit_covariance(A: ArrayLike, radius: float = 1.0) -> Array:
    """Covariance (d, d) of the infinite-token output Γ(X) = ∇K(A X), queries X uniform on a sphere of radius R, d ≥ 8.

    Proved; computed by quadrature. The tokens are uniform on the same sphere. With X = R z, A = U diag(s) Wᵀ,
    τ = `radial_tangential` and p_i the density of Q weighted by d z_i²,

        Cov Γ(X) = U diag(λ) Uᵀ,    λ_i = R⁶ s_i² E[τ(R² √Q)² z_i²],    Q = Σ_j s_j² z_j²,
        p_i(q) = 1/π ∫ Re[φ r_i (Σ_j r_j + 2 r_i)] du,    r_j = 1/(1 − 2iu (s_j² − q)),    φ = Π_j r_j^{1/2}.
    """
    U, s, _ = np.linalg.svd(as_array("A", A, ndim=2))
    largest = float(s[0])
    if largest == 0:
        return np.zeros((len(s), len(s)))
    squares = np.square(s / largest)
    low = float(squares[-1])
    if 1 - low < 1e-9:  # all singular values are equal, so Q is constant
        ratios, densities = np.ones(1), np.ones((1, len(s)))
    else:
        x, weights = _rule(_RATIOS)
        ratios = low + (1 - low) * (x + 1) / 2
        densities = np.stack([_densities(squares, q) for q in ratios]) * weights[:, None]
        densities /= densities.sum(axis=0)
    tangential = radial_tangential(radius**2 * largest * np.sqrt(ratios), len(s))
    values = radius**6 * np.square(s) * (np.square(tangential) @ densities) / len(s)
    return np.asarray((U * values) @ U.T)


def _densities(squares: Array, q: float) -> Array:
    """Densities p_i(q) (d,) of Q = Σ_j s_j² z_j² weighted by z_i², up to a common factor; `squares` are the s_j²."""
    x, weights = _rule(_FREQUENCIES)
    angle = np.pi * (x + 1) / 4
    gaps = squares - q
    scale = float(np.sqrt(2 * np.square(gaps).sum()))
    u = np.tan(angle)[:, None] / scale
    r = 1 / (1 - 2j * u * gaps)
    phi = np.exp(np.log(r).sum(axis=1, keepdims=True) / 2)
    inside = np.real(phi * r * (r.sum(axis=1, keepdims=True) + 2 * r))
    return np.asarray((weights / np.cos(angle) ** 2 / scale) @ inside)


_rule = cache(np.polynomial.legendre.leggauss)


def _length(vectors: Array) -> Array:
    return np.asarray(np.sqrt(np.einsum("...i,...i->...", vectors, vectors)))
