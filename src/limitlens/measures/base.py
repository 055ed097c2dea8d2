"""Base class of laws of tokens X, described by the cumulant generating function K(t) = log E exp<t, X>.

The infinite-token output at the query x, with tilt t = A x (score of token X: <t, X>), is V ∇K(t). The asymptotic
covariance of the output follows from K(t), K(2t) and their derivatives (docs/theory.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array


class Measure(ABC):
    """A law of tokens X on R^d: a sampler, K(t) = log E exp<t, X> and the first two derivatives of K.

    K, ∇K and ∇²K take tilts t (..., d) as NumPy float64 arrays; `sample` uses torch, imported when called.
    """

    dim: int  # dimension d of the tokens
    radius: float = float("inf")  # radius of the smallest ball around 0 that contains all tokens

    @abstractmethod
    def K(self, tilts: Array) -> Array:
        """Cumulant generating function K(t) = log E exp<t, X> of the tokens X: tilts t (..., d) to values (...)."""

    @abstractmethod
    def grad_K(self, tilts: Array) -> Array:
        """Gradient ∇K(t), the mean of the tokens' law tilted by exp<t, x>: tilts t (..., d) to means (..., d)."""

    @abstractmethod
    def hess_K(self, tilts: Array) -> Array:
        """Hessian ∇²K(t), the covariance of the tokens' law tilted by exp<t, x>: tilts t (..., d) to (..., d, d)."""

    @abstractmethod
    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample independent tokens of the law in float64, of shape (*shape, d), on the generator's device."""

    @abstractmethod
    def scaled(self, factor: float) -> Measure:
        """The law of factor · X, where X is a token of this law."""

    @cached_property
    def mean(self) -> Array:
        """Mean E X = ∇K(0) of the tokens, shape (d,)."""
        return self.grad_K(np.zeros(self.dim))

    @cached_property
    def covariance(self) -> Array:
        """Covariance Cov X = ∇²K(0) of the tokens, shape (d, d)."""
        return self.hess_K(np.zeros(self.dim))

    def check_spread(self) -> None:
        """Raise an `InputError` if all tokens of the law are equal in float32."""
        spread = float(np.sqrt(np.trace(self.covariance)))
        if not spread > max(1e-7 * float(np.linalg.norm(self.mean)), 1e-15):
            raise InputError(f"all tokens are equal (their spread is {spread:.2g}); expected tokens with some spread")

    def check_tilts(self, tilts: object) -> Array:
        """Check `tilts`, the arguments t of K, and return them as a finite float64 array (..., d)."""
        array = as_array("tilts", tilts)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise InputError(f"tilts have shape {array.shape}; expected (..., {self.dim}), one row per query")
        return array
