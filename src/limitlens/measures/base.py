"""Base class of token laws, which are described by their cumulant generating function K(t) = log E exp<t, X>.

The limit of attention at the tilt t = A x is V ∇K(t), and its asymptotic covariance follows from K(t), K(2t) and their
derivatives (docs/theory.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array


class Measure(ABC):
    """A law of tokens on R^d: a sampler, K and its first two derivatives.

    K and its derivatives use NumPy in float64 and are batched over tilts; `sample` uses torch, imported when called.
    """

    dim: int  # dimension d of the tokens
    radius: float = float("inf")  # radius of the smallest ball around 0 that contains all tokens

    @abstractmethod
    def K(self, tilts: Array) -> Array:
        """Cumulant generating function K(t) = log E exp<t, X>: tilts (..., d) to values (...)."""

    @abstractmethod
    def grad_K(self, tilts: Array) -> Array:
        """∇K(t), the mean of the law tilted by exp<t, x>: tilts (..., d) to (..., d)."""

    @abstractmethod
    def hess_K(self, tilts: Array) -> Array:
        """∇²K(t), the covariance of the tilted law: tilts (..., d) to (..., d, d)."""

    @abstractmethod
    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample independent tokens in float64, of shape (*shape, d), on the generator's device."""

    @abstractmethod
    def scaled(self, factor: float) -> Measure:
        """The law of factor · X."""

    @cached_property
    def mean(self) -> Array:
        """E X = ∇K(0), shape (d,)."""
        return self.grad_K(np.zeros(self.dim))

    @cached_property
    def covariance(self) -> Array:
        """Cov X = ∇²K(0), shape (d, d)."""
        return self.hess_K(np.zeros(self.dim))

    def check_spread(self) -> None:
        """Raise an `InputError` if all tokens are equal in float32."""
        spread = float(np.sqrt(np.trace(self.covariance)))
        if not spread > max(1e-7 * float(np.linalg.norm(self.mean)), 1e-15):
            raise InputError(f"all tokens are equal (their spread is {spread:.2g}); expected tokens with some spread")

    def check_tilts(self, tilts: object) -> Array:
        """`tilts` as a finite float64 array whose last axis has length d."""
        array = as_array("tilts", tilts)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise InputError(f"tilts have shape {array.shape}; expected (..., {self.dim}), one row per query")
        return array
