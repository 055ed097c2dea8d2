"""Rotationally symmetric laws: the uniform laws on sphere and ball, and the von Mises-Fisher law, a tilted sphere.

Their K is the function Λ(r) = log E exp(r X₁) of a length, X uniform on a unit sphere (`radial.py`). The first d
coordinates of the uniform law on the sphere of R^{d+2} are uniform on the ball of R^d. Tilting a sphere shifts t.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array
from limitlens.measures._shared import brief, check_dim, check_scalar, standard_normal, token_shape, uniform
from limitlens.measures.base import Measure
from limitlens.measures.radial import radial_increment, radial_K, radial_tangential, radial_variance


class _Spherical(Measure):
    """K(t) = Λ(|s|) − const, s = Rt + shift: ∇K = R g s, ∇²K = R² [g I + (Λ'' − g) uuᵀ], g = Λ'(|s|)/|s|, u = s/|s|."""

    _sphere_dim: int  # dimension of the space of the sphere whose Λ is used

    def _arguments(self, tilts: Array) -> Array:
        """s, the argument of the radial function, shape (..., d)."""
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
    """The law of the first d coordinates of a uniform token on the sphere of R^{d + dropped}."""

    _dropped: ClassVar[int]

    def __init__(self, dim: int, radius: float = 1.0) -> None:
        self.dim = check_dim(dim)
        self.radius = check_scalar("radius", radius, above=0)
        self._sphere_dim = self.dim + self._dropped

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample normal vectors, divide them by their lengths and keep the first d coordinates."""
        normals = standard_normal(token_shape(shape, self._sphere_dim), generator)
        return normals.div_(normals.norm(dim=-1, keepdim=True) / self.radius)[..., : self.dim].contiguous()

    def scaled(self, factor: float) -> Self:
        """The same law with the radius |factor| R."""
        return type(self)(self.dim, abs(factor) * self.radius)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, radius={self.radius:g})"


class Sphere(_Uniform):
    """The uniform law on the sphere of radius R in R^d, ±R in d = 1: K(t) = Λ_d(R|t|), ∇K(t) = R A_d(R|t|) t/|t|.

    >>> ll.Sphere(3).grad_K(np.array([0.0, 0.0, 2.0])).round(4).tolist()
    [0.0, 0.0, 0.5373]
    """

    _dropped = 0


class Ball(_Uniform):
    """The uniform law on the ball of radius R in R^d: K(t) = Λ_{d+2}(R|t|), ∇K(t) = R A_{d+2}(R|t|) t/|t|.

    >>> ll.Ball(3, radius=2.0).covariance.round(4).tolist()[0]
    [0.8, 0.0, 0.0]
    """

    _dropped = 2


class VonMisesFisher(_Spherical):
    """The law of density ∝ exp(κ<μ, x>/R) on the sphere of radius R: K(t) = Λ_d(|κμ + Rt|) − Λ_d(κ).

    The mean direction μ (d,) may have any length; the concentration κ = 0 gives the uniform law.

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
        """Λ(|κμ + Rt|) − Λ(κ), without cancellation for small tilts."""
        scaled = super()._arguments(tilts)
        change = _square(scaled) + 2 * self.concentration * (scaled @ self.direction)  # |κμ + Rt|² − κ²
        return radial_increment(self.concentration, change, self.dim)

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample by Wood's rejection (1994), with beta variable and tangent from one normal vector per proposal."""
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
        """Accepted tokens (accepted, d) out of `count` proposals; about two thirds or more are accepted."""
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
        """The law on the sphere of radius |factor| R, with the direction reversed if the factor is negative."""
        direction = math.copysign(1.0, factor) * self.direction
        return VonMisesFisher(direction, self.concentration, abs(factor) * self.radius)

    def __repr__(self) -> str:
        shown = f"dim={self.dim}, direction={brief(self.direction)}, concentration={self.concentration:g}"
        return f"VonMisesFisher({shown}, radius={self.radius:g})"


def _square(vectors: Array) -> Array:
    return np.asarray(np.einsum("...i,...i->...", vectors, vectors))


def _length(vectors: Array) -> Array:
    return np.sqrt(_square(vectors))
