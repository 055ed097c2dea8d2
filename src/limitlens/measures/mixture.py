"""Gaussian mixtures: a tilt reweights the components by a softmax and shifts each component as a Gaussian."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array
from limitlens.measures._shared import brief, by_blocks, check_weights, choose, standard_normal, token_shape
from limitlens.measures.base import Measure
from limitlens.measures.gaussian import Gaussian

_ENTRIES = 1 << 17  # float64 entries in a block of tilted means, so that it stays in the processor's cache


class GaussianMixture(Measure):
    """Σ_c w_c N(m_c, Σ_c): K = log Σ_c w_c exp K_c, ∇K = Σ_c p_c ∇K_c with p = softmax(log w + K_1, …, K_C at t).

    Weights (c,) are probabilities, means (c, d), covariances one variance for all, one per component (c,), one matrix
    for all (d, d), or one matrix per component (c, d, d).

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
            raise InputError(
                f"covariances have shape {spreads.shape}; expected a scalar, ({count},), ({dim}, {dim}) or "
                f"({count}, {dim}, {dim}) to go with means of shape {centers.shape}"
            )
        each = spreads if spreads.ndim in (1, 3) else [spreads] * count
        self.dim, self.means = dim, centers.copy()
        self.weights = check_weights(weights, count)
        with np.errstate(divide="ignore"):  # a component of weight zero scores −∞
            self._log_weights = np.log(self.weights)
        self.components = tuple(Gaussian(center, spread) for center, spread in zip(centers, each, strict=True))
        self.covariances = (spreads + spreads.swapaxes(-1, -2)) / 2 if spreads.ndim > 1 else spreads.copy()

    def K(self, tilts: Array) -> Array:
        """log Σ_c w_c exp K_c(t), by log-sum-exp."""
        return self._by_blocks(lambda rows: self._tilted(rows)[0], tilts)

    def grad_K(self, tilts: Array) -> Array:
        """Σ_c p_c (m_c + Σ_c t)."""
        return self._by_blocks(lambda rows: _average(*self._tilted(rows)[1:]), tilts)

    def hess_K(self, tilts: Array) -> Array:
        """Σ_c p_c [Σ_c + (∇K_c − ∇K)(∇K_c − ∇K)ᵀ]: covariance within components plus covariance of their means."""
        return self._by_blocks(self._hessian, tilts)

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample a component for every token, then the token."""
        tokens = standard_normal(token_shape(shape, self.dim), generator)
        chosen = choose(self.weights, tuple(tokens.shape[:-1]), generator)
        for index, component in enumerate(self.components):
            rows = chosen == index
            tokens[rows] = component.transport(tokens[rows])
        return tokens

    def scaled(self, factor: float) -> GaussianMixture:
        """The mixture of the scaled components."""
        return GaussianMixture(self.weights, factor * self.means, factor**2 * self.covariances)

    def _by_blocks(self, function: Callable[[Array], Array], tilts: Array) -> Array:
        return by_blocks(function, self.check_tilts(tilts), _ENTRIES // self.means.size)

    def _tilted(self, tilts: Array) -> tuple[Array, Array, Array]:
        """For m tilts: K (m,), softmax weights p of the components (c, m), their tilted means (c, m, d)."""
        spreads = self.covariances
        by_matrix = spreads.ndim > 1  # moves: (c, m, d), or (1, m, d) if all components share one covariance
        moves = tilts @ spreads.reshape(-1, self.dim, self.dim) if by_matrix else spreads.reshape(-1, 1, 1) * tilts
        centers = self.means[:, None, :]
        scores = self._log_weights[:, None] + np.einsum("md,cmd->cm", tilts, centers + moves / 2)
        top = scores.max(axis=0)
        shares = np.exp(scores - top)
        total = shares.sum(axis=0)
        return top + np.log(total), shares / total, centers + moves

    def _hessian(self, tilts: Array) -> Array:
        _, shares, centers = self._tilted(tilts)
        offsets = centers - _average(shares, centers)
        between = (shares[..., None] * offsets).transpose(1, 2, 0) @ offsets.transpose(1, 0, 2)
        within = np.tensordot(shares, [component.covariance for component in self.components], axes=(0, 0))
        return np.asarray(between + within)

    def __repr__(self) -> str:
        return f"GaussianMixture(dim={self.dim}, components={len(self.components)}, weights={brief(self.weights)})"


def _average(shares: Array, centers: Array) -> Array:
    """Σ_c p_c m_c: (c, m) and (c, m, d) to (m, d)."""
    return np.asarray(np.einsum("cm,cmd->md", shares, centers))
