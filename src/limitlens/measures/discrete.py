"""Distributions of tokens on finitely many points x_i with weights w_i, such as the empirical one of a sample.

Their infinite-token limit is attention over all points: ∇K(t) = Σ_i p_i x_i with p = softmax(log w_i + <t, x_i>).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure, by_blocks, check_weights, choose, token_shape

_TILTS = 1024  # tilts in a block
LONGEST = 1e15  # largest norm of a token: its square times any dimension does not overflow in float32
_ENTRIES = 1 << 20  # float64 entries in a block of points, and in its scores


class _Finite(Measure):
    """Distribution on points x_i (n, d) with weights w_i, K(t) = log Σ_i w_i exp<t, x_i>; points are read in blocks."""

    _points: np.ndarray[Any, Any]
    _weights: Array | None = None  # None: equal

    def K(self, tilts: Array) -> Array:
        return by_blocks(lambda rows: self._sweep(rows, with_mean=False)[0], self.check_tilts(tilts), _TILTS)

    def grad_K(self, tilts: Array) -> Array:
        return by_blocks(lambda rows: self._sweep(rows, with_mean=True)[3], self.check_tilts(tilts), _TILTS)

    def hess_K(self, tilts: Array) -> Array:
        return by_blocks(self._hessians, self.check_tilts(tilts), _TILTS)

    def _hessians(self, tilts: Array) -> Array:
        _, top, total, means = self._sweep(tilts, with_mean=True)
        hessians = np.zeros((*tilts.shape, self.dim))
        for points, weights in self._point_blocks(1):
            for row, (tilt, mean) in enumerate(zip(tilts, means, strict=True)):
                shares = weights * np.exp(points @ tilt - top[row]) / total[row]
                centred = points - mean  # centred before squaring, to keep digits if the mean is far from zero
                hessians[row] += (shares[:, None] * centred).T @ centred
        return hessians

    def _sweep(self, tilts: Array, *, with_mean: bool) -> tuple[Array, Array, Array, Array]:
        """K (m,) at tilts (m, d), top score, Σ e_i with e_i = w_i exp(score_i − top), and Σ e_i x_i / Σ e_i (m, d)."""
        top, total = np.full(len(tilts), -np.inf), np.zeros(len(tilts))
        first = np.zeros_like(tilts)
        for points, weights in self._point_blocks(len(tilts)):
            scores = tilts @ points.T
            higher = np.maximum(top, scores.max(axis=1))
            shrink = np.exp(top - higher)
            scores -= higher[:, None]
            np.exp(scores, out=scores)
            scores *= weights
            total = total * shrink + scores.sum(axis=1)
            if with_mean:
                first = first * shrink[:, None] + scores @ points
            top = higher
        return top + np.log(total), top, total, first / total[:, None]

    def _point_blocks(self, tilts: int) -> Iterator[tuple[Array, Array | float]]:
        """Yield blocks of points (p, d) with their weights, small enough that their scores (tilts, p) fit in memory."""
        count = len(self._points)
        size = max(1, _ENTRIES // max(tilts, self.dim))
        for start in range(0, count, size):
            points = np.asarray(self._points[start : start + size], dtype=np.float64)
            yield points, 1 / count if self._weights is None else self._weights[start : start + size]


class Discrete(_Finite):
    """Distribution on points x (n, d) with probabilities w (n,), equal by default: K(t) = log Σ_i w_i exp<t, x_i>."""

    def __init__(self, points: ArrayLike, weights: ArrayLike | None = None) -> None:
        self.points = _check_rows("points", as_array("points", points, ndim=2)).copy()
        count, self.dim = self.points.shape
        self.weights = check_weights(np.full(count, 1 / count) if weights is None else weights, count)
        support = self.weights > 0  # the running maximum must ignore points of weight zero
        self._points, self._weights = self.points[support], self.weights[support]
        self.radius = _largest_length("points", self._points)

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d) independently from the points, with the weights as probabilities."""
        points = torch.as_tensor(self.points, device=generator.device)
        return points[choose(self.weights, token_shape(shape, self.dim)[:-1], generator)]

    def scaled(self, factor: float) -> Discrete:
        """Distribution on the points multiplied by `factor`, with unchanged weights."""
        return Discrete(factor * self.points, self.weights)

    def __repr__(self) -> str:
        return f"Discrete(dim={self.dim}, points={len(self.points)})"


class Sample(_Finite):
    """Empirical distribution of tokens (n, d), an array, tensor or memory map: K(t) = log (1/n) Σ_i exp<t, x_i>.

    >>> ll.Sample(np.arange(5.0)[:, None]).mean.tolist()
    [2.0]
    """

    def __init__(self, tokens: Any) -> None:
        self.tokens = self._points = _check_rows("tokens", _as_tokens(tokens))
        self.dim = self.tokens.shape[1]
        self.radius, seen = 0.0, 0
        for block, _ in self._point_blocks(1):
            finite = np.isfinite(block).all(axis=1)
            if not finite.all():
                row = seen + int(np.argmin(finite))
                raise InputError(f"tokens hold NaN or infinity in row {row}; expected finite numbers: drop such rows")
            self.radius, seen = max(self.radius, _largest_length("tokens", block)), seen + len(block)

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens (*shape, d) from the given ones, independently and with replacement."""
        wanted = token_shape(shape, self.dim)[:-1]
        rows = torch.randint(len(self.tokens), wanted, generator=generator, device=generator.device)
        return torch.as_tensor(np.asarray(self.tokens[rows.cpu().numpy()], dtype=np.float64), device=generator.device)

    def scaled(self, factor: float) -> Sample:
        """Empirical distribution of the tokens multiplied by `factor`, which are copied."""
        return Sample(factor * self.tokens)

    def __repr__(self) -> str:
        return f"Sample(dim={self.dim}, tokens={len(self.tokens)}, {self.tokens.dtype})"


def _as_tokens(tokens: Any) -> np.ndarray[Any, Any]:
    """Convert `tokens` (array, tensor or list) to a real array (n, d); arrays and CPU tensors are not copied."""
    if hasattr(tokens, "detach"):
        tensor = tokens.detach().cpu()
        tokens = (tensor.float() if tensor.element_size() < 4 else tensor).numpy()  # NumPy has no bfloat16
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "fiu" or tokens.ndim != 2:
        return as_array("tokens", tokens, ndim=2)
    # torch supports neither foreign byte orders nor long doubles
    return tokens if tokens.dtype.isnative and tokens.dtype.itemsize <= 8 else tokens.astype(np.float64)


def _check_rows(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not array.size:
        raise InputError(f"{name} have shape {array.shape}; expected (n, dim) with at least one row and one column")
    return array


def _largest_length(name: str, points: Array) -> float:
    with np.errstate(over="ignore"):
        length = float(np.sqrt(np.einsum("ij,ij->i", points, points).max()))
    expected = f"lengths up to {LONGEST:g}, since kernels compute in float32, so divide them by a constant"
    return check_number(f"the largest length of {name}", length, expected, below=LONGEST)
