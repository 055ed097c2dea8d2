"""The uniform law on a cube."""

from __future__ import annotations

import numpy as np

from limitlens.arrays import torch
from limitlens.errors import Array
from limitlens.measures._shared import check_dim, check_scalar, token_shape, uniform
from limitlens.measures.base import Measure
from limitlens.measures.radial import radial_K, radial_tangential, radial_variance


class Cube(Measure):
    """The uniform law on [−w, w]^d: K(t) = Σ_i log(sinh(w t_i)/(w t_i)), ∇K(t)_i = w coth(w t_i) − 1/t_i.

    A coordinate of the unit sphere of R³ is uniform on [−1, 1] (Archimedes), so each term is the radial function of
    d = 3, which avoids the cancellation in coth x − 1/x near zero.

    >>> ll.Cube(2).grad_K(np.array([1.0, 0.0])).round(4).tolist()
    [0.313, 0.0]
    """

    def __init__(self, dim: int, half_width: float = 1.0) -> None:
        self.dim = check_dim(dim)
        self.half_width = check_scalar("half_width", half_width, above=0)
        self.radius = self.half_width * self.dim**0.5

    def K(self, tilts: Array) -> Array:
        """Σ_i Λ_3(w|t_i|)."""
        return np.asarray(radial_K(self._arguments(tilts), 3).sum(axis=-1))

    def grad_K(self, tilts: Array) -> Array:
        """w² t_i g_3(w|t_i|) in each coordinate."""
        return self.half_width**2 * self.check_tilts(tilts) * radial_tangential(self._arguments(tilts), 3)

    def hess_K(self, tilts: Array) -> Array:
        """Diagonal matrix with entries w² Λ_3''(w|t_i|)."""
        arguments = self._arguments(tilts)
        hessian = np.zeros((*arguments.shape, self.dim))
        hessian[..., range(self.dim), range(self.dim)] = self.half_width**2 * radial_variance(arguments, 3)
        return hessian

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample every coordinate uniformly on [−w, w)."""
        return self.half_width * (2 * uniform(token_shape(shape, self.dim), generator) - 1)

    def scaled(self, factor: float) -> Cube:
        """The cube of half width |factor| w."""
        return Cube(self.dim, abs(factor) * self.half_width)

    def _arguments(self, tilts: Array) -> Array:
        return self.half_width * np.abs(self.check_tilts(tilts))

    def __repr__(self) -> str:
        return f"Cube(dim={self.dim}, half_width={self.half_width:g})"
