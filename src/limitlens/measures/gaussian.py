"""Gaussian tokens, for which the infinite-token output is affine in the query, and mixtures of Gaussians."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array, check_covariance
from limitlens.measures import base
from limitlens.measures.base import Measure

_ENTRIES = 1 << 17  # float64 entries in a block of tilted means, so that it stays in the processor's cache


class Gaussian(Measure):
    """Gaussian distribution N(m, Σ) of tokens: K(t) = <m, t> + ½ tᵀΣt, ∇K(t) = m + Σt, ∇²K(t) = Σ.

    The mean is (d,), or one number for all entries. The covariance is a matrix (d, d), variances (d,) or one variance.

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
        """Cumulant generating function K(t) = <m, t> + ½ tᵀΣt of N(m, Σ): tilts t (..., d) to values (...)."""
        tilts = self.check_tilts(tilts)
        return np.asarray(np.einsum("...i,...i->...", tilts, self.mean + self._times_covariance(tilts) / 2))

    def grad_K(self, tilts: Array) -> Array:
        """Gradient ∇K(t) = m + Σt, the mean of N(m, Σ) reweighted by exp<t, x>: tilts t (..., d) to (..., d)."""
        return self.mean + self._times_covariance(self.check_tilts(tilts))

    def hess_K(self, tilts: Array) -> Array:
        """Hessian ∇²K(t) = Σ of N(m, Σ), repeated for every tilt: (..., d) to (..., d, d)."""
        return np.broadcast_to(self.covariance, (*self.check_tilts(tilts).shape, self.dim)).copy()

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens of N(m, Σ), of shape (*shape, d)."""
        return self.transport(base.standard_normal(base.token_shape(shape, self.dim), generator))

    def transport(self, normals: torch.Tensor) -> torch.Tensor:
        """Map standard normal vectors z (..., d) to tokens m + Σ^{1/2} z of N(m, Σ)."""
        device = str(normals.device)
        if device not in self._on_device:  # copied once, since a GPU waits for each copy
            self._on_device[device] = tuple(torch.as_tensor(part, device=device) for part in (self._root, self.mean))
        root, mean = self._on_device[device]
        spread = normals @ root if root.ndim == 2 else normals * root
        return spread + mean if self.mean.any() else spread

    def scaled(self, factor: float) -> Gaussian:
        """Distribution N(factor m, factor² Σ) of `factor` times a token."""
        return Gaussian(factor * self.mean, factor**2 * self._spread)

    @cached_property
    def covariance(self) -> Array:
        """Covariance matrix Σ of the tokens, shape (d, d)."""
        return self._spread if self._spread.ndim == 2 else self._spread * np.eye(self.dim)

    @cached_property
    def _root(self) -> Array:
        """Root Σ^{1/2} of the covariance: a symmetric matrix (d, d), or standard deviations if variances were given."""
        return np.sqrt(self._spread) if self._spread.ndim < 2 else base.symmetric_root(self._spread)

    def _times_covariance(self, tilts: Array) -> Array:
        return np.asarray(tilts @ self._spread if self._spread.ndim == 2 else tilts * self._spread)

    def __repr__(self) -> str:
        return f"Gaussian(dim={self.dim}, mean={base.brief(self.mean)}, covariance={base.brief(self._spread)})"


class GaussianMixture(Measure):
    """Mixture Σ_c w_c N(m_c, Σ_c) as a distribution of tokens, with probabilities w (c,) and means (c, d).

    Covariances are one variance, one per component (c,), one matrix (d, d), or one matrix per component (c, d, d).

    >>> mu = ll.GaussianMixture([0.7, 0.3], [[-1.0], [2.0]], [0.3, 0.3])
    >>> mu.mean.round(4).tolist()
    [-0.1]
    """

    def __init__(self, weights: ArrayLike, means: ArrayLike, covariances: ArrayLike) -> None:
        centers = as_array("means", means, ndim=2)
        count, dim = centers.shape
        if not centers.size:
            raise InputError(f"means have shape {centers.shape}; expected (components, dim) with at least one of each")
        spreads = as_array("covariances", covariances, ndim=(0, 1, 2, 3))
        if spreads.shape not in ((), (count,), (dim, dim), (count, dim, dim)):
            expected = f"a scalar, ({count},), ({dim}, {dim}) or ({count}, {dim}, {dim})"
            given = f"covariances have shape {spreads.shape}; expected {expected}"
            raise InputError(f"{given} to go with means of shape {centers.shape}")
        each = spreads if spreads.ndim in (1, 3) else [spreads] * count
        self.dim, self.means = dim, centers.copy()
        self.weights = base.check_weights(weights, count)
        with np.errstate(divide="ignore"):  # a component of weight zero scores −∞
            self._log_weights = np.log(self.weights)
        self.components = tuple(Gaussian(center, spread) for center, spread in zip(centers, each, strict=True))
        self.covariances = (spreads + spreads.swapaxes(-1, -2)) / 2 if spreads.ndim > 1 else spreads.copy()

    def K(self, tilts: Array) -> Array:
        """K(t) = log Σ_c w_c exp K_c(t) of the mixture, K_c that of component c: tilts t (..., d) to values (...)."""
        return self._by_blocks(lambda rows: self._tilted(rows)[0], tilts)

    def grad_K(self, tilts: Array) -> Array:
        """∇K(t) = Σ_c p_c (m_c + Σ_c t) with p = softmax(log w_c + K_c(t)): tilts t (..., d) to gradients (..., d)."""
        return self._by_blocks(lambda rows: self._tilted(rows)[1], tilts)

    def hess_K(self, tilts: Array) -> Array:
        """∇²K = Σ_c p_c [Σ_c + (∇K_c − ∇K)(∇K_c − ∇K)ᵀ] (..., d, d), p = softmax(log w_c + K_c), at tilts (..., d)."""
        return self._by_blocks(self._hessian, tilts)

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d) of the mixture: a random component for each token, then the token from it."""
        tokens = base.standard_normal(base.token_shape(shape, self.dim), generator)
        chosen = base.choose(self.weights, tuple(tokens.shape[:-1]), generator)
        for index, component in enumerate(self.components):
            rows = chosen == index
            tokens[rows] = component.transport(tokens[rows])
        return tokens

    def scaled(self, factor: float) -> GaussianMixture:
        """Mixture with the tokens of every component multiplied by `factor`."""
        return GaussianMixture(self.weights, factor * self.means, factor**2 * self.covariances)

    def _by_blocks(self, function: Callable[[Array], Array], tilts: Array) -> Array:
        return base.by_blocks(function, self.check_tilts(tilts), _ENTRIES // self.means.size)

    def _tilted(self, tilts: Array) -> tuple[Array, Array, Array, Array]:
        """At tilts (m, d): K (m,), ∇K (m, d), the components' softmax weights p (c, m) and their means (c, m, d)."""
        spreads = self.covariances
        by_matrix = spreads.ndim > 1  # moves: (c, m, d), or (1, m, d) if all components share one covariance
        moves = tilts @ spreads.reshape(-1, self.dim, self.dim) if by_matrix else spreads.reshape(-1, 1, 1) * tilts
        centers = self.means[:, None, :]
        scores = self._log_weights[:, None] + np.einsum("md,cmd->cm", tilts, centers + moves / 2)
        top = scores.max(axis=0)
        shares = np.exp(scores - top)
        total = shares.sum(axis=0)
        shares, means = shares / total, centers + moves
        return top + np.log(total), np.einsum("cm,cmd->md", shares, means), shares, means

    def _hessian(self, tilts: Array) -> Array:
        _, mean, shares, means = self._tilted(tilts)
        offsets = means - mean
        between = (shares[..., None] * offsets).transpose(1, 2, 0) @ offsets.transpose(1, 0, 2)
        within = np.tensordot(shares, [component.covariance for component in self.components], axes=(0, 0))
        return np.asarray(between + within)

    def __repr__(self) -> str:
        weights = base.brief(self.weights)
        return f"GaussianMixture(dim={self.dim}, components={len(self.components)}, weights={weights})"
