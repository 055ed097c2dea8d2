"""Base class of token distributions, described by their cumulant generating function K(t) = log E exp<t, X>.

Attention of a query x over infinitely many tokens X with scores <t, X>, t = A x, has the output V ∇K(t).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np

from limitlens.arrays import torch
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, as_array, check_number

_MATRICES = 12  # (d, d) matrices of a head and a law that are in memory at once


class Measure(ABC):
    """Distribution of tokens X on R^d: a sampler, and K(t) = log E exp<t, X> with its first two derivatives."""

    dim: int  # dimension d of the tokens
    radius: float = float("inf")  # radius of the smallest ball around 0 that contains all tokens

    @abstractmethod
    def K(self, tilts: Array) -> Array:
        """Cumulant generating function K(t) = log E exp<t, X> of the tokens X: tilts t (..., d) to values (...)."""

    @abstractmethod
    def grad_K(self, tilts: Array) -> Array:
        """Gradient ∇K(t), the mean of the tokens X reweighted by exp<t, X>: tilts t (..., d) to means (..., d)."""

    @abstractmethod
    def hess_K(self, tilts: Array) -> Array:
        """Hessian ∇²K(t), the covariance of the tokens X reweighted by exp<t, X>: tilts t (..., d) to (..., d, d)."""

    @abstractmethod
    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw independent tokens in float64, of shape (*shape, d), on the generator's device."""

    @abstractmethod
    def scaled(self, factor: float) -> Measure:
        """Distribution of `factor` times a token of this distribution."""

    @cached_property
    def mean(self) -> Array:
        """Mean E X = ∇K(0) of the tokens, shape (d,)."""
        return self.grad_K(np.zeros(self.dim))

    @cached_property
    def covariance(self) -> Array:
        """Covariance Cov X = ∇²K(0) of the tokens, shape (d, d)."""
        return self.hess_K(np.zeros(self.dim))

    def check_spread(self) -> None:
        """Raise an `InputError` if all tokens are equal up to float32 precision."""
        spread = float(np.sqrt(np.trace(self.covariance)))
        if not spread > max(1e-7 * float(np.linalg.norm(self.mean)), 1e-15):
            raise InputError(f"all tokens are equal (their spread is {spread:.2g}); expected tokens with some spread")

    def check_tilts(self, tilts: object) -> Array:
        """Return `tilts`, the arguments t of K, as a finite float64 array (..., d), or raise an `InputError`."""
        array = as_array("tilts", tilts)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise InputError(f"tilts have shape {array.shape}; expected (..., {self.dim}), one row per query")
        return array


def check_dim(dim: int) -> int:
    """Return the dimension of tokens as an int of at least 1; raises an error if it is invalid or too large."""
    try:
        number = operator.index(dim)
    except TypeError:
        raise InputError(f"dim is {dim!r}; expected a whole number, the dimension of the tokens") from None
    check_number("dim", number, "at least 1, the dimension of the tokens", low=1)
    memory = 8.0 * _MATRICES * number**2
    check_cost(f"a law of dimension {number:,}", memory=memory, remedy="choose a smaller dimension")
    return number


def check_scalar(name: str, value: float, *, above: float, closed: bool = False) -> float:
    """Return the parameter `name` as a finite float > `above`, or ≥ if `closed`; otherwise raise an `InputError`."""
    expected = f"{'at least' if closed else 'more than'} {above:g}"
    return check_number(name, float(as_array(name, value, ndim=0)), expected, low=above, closed=closed)


def check_weights(weights: object, count: int) -> Array:
    """Return `weights` as `count` probabilities; raises an `InputError` if their sum is not 1 within 1e-6."""
    array = as_array("weights", weights, ndim=1)
    if array.size != count:
        raise InputError(f"weights have length {array.size}; expected {count}, one for each point or component")
    if array.min() < 0:
        raise InputError(f"weights hold the negative number {array.min():g}; expected probabilities")
    total = float(array.sum())
    if abs(total - 1) > 1e-6:
        raise InputError(f"weights sum to {total:g}; expected 1, so divide them by their sum if that is meant")
    return array / total


def symmetric_root(covariance: Array) -> Array:
    """Symmetric square root of a positive semi-definite covariance matrix (d, d), which may be singular."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(values.clip(min=0))) @ vectors.T)


def by_blocks(function: Callable[[Array], Array], tilts: Array, size: int) -> Array:
    """Evaluate `function` on the rows of an array (..., d), `size` at a time to save memory; leading axes stay."""
    rows = tilts.reshape(-1, tilts.shape[-1])
    starts = range(0, max(1, len(rows)), max(1, size))
    joined = np.concatenate([function(rows[start : start + starts.step]) for start in starts])
    return joined.reshape(tilts.shape[:-1] + joined.shape[1:])


def token_shape(shape: int | tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Shape (*shape, dim) of an array of tokens; `shape` is a number of tokens or a tuple."""
    return (*shape, dim) if isinstance(shape, tuple) else (shape, dim)


def standard_normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Independent N(0, 1) numbers of the given shape in float64, on the generator's device."""
    if generator.device.type == "cpu":  # NumPy is twice as fast as torch, and torch truncates the tails
        seed = int(torch.randint(1 << 62, (), generator=generator))
        return torch.from_numpy(np.random.Generator(np.random.SFC64(seed)).standard_normal(shape))
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Independent uniform numbers on [0, 1) of the given shape in float64, on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def choose(weights: Array, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Independent random indices of the given shape, with probabilities `weights`."""
    steps = np.cumsum(weights)
    bounds = torch.as_tensor(steps / steps[-1], device=generator.device)
    return torch.searchsorted(bounds, uniform(shape, generator), right=True)


def brief(value: Array) -> str:
    """Short text of an array for `repr`: its entries if they are equal or few, else its shape."""
    value = value + 0.0  # prints no negative zero
    if value.ndim < 2 and (value == value.flat[0]).all():
        return f"{value.flat[0]:g}"
    if value.ndim == 1 and value.size <= 4:
        return "[" + ", ".join(f"{entry:g}" for entry in value) + "]"
    return "array(" + ", ".join(str(length) for length in value.shape) + ")"
