"""The Gaussian law, for which the limit of attention is affine in the tilt."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array, check_covariance
from limitlens.measures._shared import brief, standard_normal, symmetric_root, token_shape
from limitlens.measures.base import Measure


class Gaussian(Measure):
    """N(m, Σ): K(t) = <m, t> + ½ tᵀΣt, ∇K(t) = m + Σt, ∇²K(t) = Σ.

    The mean has shape (d,), or is a scalar for equal entries. The covariance is a matrix (d, d), variances (d,), or one
    variance for all coordinates; from variances a matrix is formed only by `covariance` and `hess_K`.

    >>> mu = ll.Gaussian(mean=[0.0, 1.0], covariance=2.0)
    >>> mu.dim, float(mu.K(np.ones(2))), mu.grad_K(np.ones(2)).tolist()
    (2, 3.0, [2.0, 3.0])
    """

    def __init__(self, mean: ArrayLike, covariance: ArrayLike) -> None:
        center = as_array("mean", mean, ndim=(0, 1))
        spread = as_array("covariance", covariance, ndim=(0, 1, 2))
        self.dim = max([1, *(len(array) for array in (center, spread) if array.ndim)])
        if any(array.ndim and len(array) != self.dim for array in (center, spread)):
            shapes = f"mean has shape {center.shape} and covariance {spread.shape}"
            raise InputError(f"{shapes}; expected (d,) or a scalar, and (d, d), (d,) or a scalar, with one d")
        if spread.ndim == 2:
            spread = check_covariance("covariance", spread)
        elif spread.min() < 0:
            raise InputError(f"covariance holds the negative variance {spread.min():g}; expected variances")
        self.mean = np.broadcast_to(center, (self.dim,)).copy()
        self._on_device: dict[str, tuple[torch.Tensor, ...]] = {}  # root and mean by device
        self._spread = spread.copy()

    def K(self, tilts: Array) -> Array:
        """<m, t> + ½ tᵀΣt."""
        tilts = self.check_tilts(tilts)
        return np.asarray(np.einsum("...i,...i->...", tilts, self.mean + self._times_covariance(tilts) / 2))

    def grad_K(self, tilts: Array) -> Array:
        """m + Σt."""
        return self.mean + self._times_covariance(self.check_tilts(tilts))

    def hess_K(self, tilts: Array) -> Array:
        """Σ for every tilt."""
        return np.broadcast_to(self.covariance, (*self.check_tilts(tilts).shape, self.dim)).copy()

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample m + Σ^{1/2} z with z standard normal."""
        return self.transport(standard_normal(token_shape(shape, self.dim), generator))

    def transport(self, normals: torch.Tensor) -> torch.Tensor:
        """m + Σ^{1/2} z for standard normal rows z: (..., d) to (..., d)."""
        device = str(normals.device)
        if device not in self._on_device:  # copied once, since a GPU waits for each copy
            self._on_device[device] = tuple(torch.as_tensor(part, device=device) for part in (self._root, self.mean))
        root, mean = self._on_device[device]
        spread = normals @ root if root.ndim == 2 else normals * root
        return spread + mean if self.mean.any() else spread

    def scaled(self, factor: float) -> Gaussian:
        """N(factor m, factor² Σ)."""
        return Gaussian(factor * self.mean, factor**2 * self._spread)

    @cached_property
    def covariance(self) -> Array:
        """Σ, shape (d, d)."""
        return self._spread if self._spread.ndim == 2 else self._spread * np.eye(self.dim)

    @cached_property
    def _root(self) -> Array:
        """Σ^{1/2}: a symmetric matrix (d, d), or standard deviations if Σ was given by variances."""
        return np.sqrt(self._spread) if self._spread.ndim < 2 else symmetric_root(self._spread)

    def _times_covariance(self, tilts: Array) -> Array:
        return np.asarray(tilts @ self._spread if self._spread.ndim == 2 else tilts * self._spread)

    def __repr__(self) -> str:
        return f"Gaussian(dim={self.dim}, mean={brief(self.mean)}, covariance={brief(self._spread)})"
