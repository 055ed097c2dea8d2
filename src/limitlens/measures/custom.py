"""User-defined distributions of tokens: any object with `dim`, `K`, `grad_K` and `sample` can be used as a measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array
from limitlens.measures.base import Measure, brief, check_dim, token_shape

_STEP = 1e-3  # step in tilt of the differences, times 1 / the tokens' spread: errors are about 1e-12
_CHECKED, _NEAR = 4, 0.2  # number of random tilts at which a law is checked, and their scale times 1 / the spread
_NEEDED = ("dim", "K", "grad_K", "sample")


class TokenLaw(Protocol):
    """Interface of a user-defined distribution of tokens X; methods may return NumPy arrays or torch tensors."""

    @property
    def dim(self) -> int:
        """The dimension d of the tokens."""

    def K(self, tilts: Array) -> Any:
        """Cumulant generating function K(t) = log E exp<t, X> of the tokens X: tilts t (..., d) to values (...)."""

    def grad_K(self, tilts: Array) -> Any:
        """Gradient ∇K(t) of K(t) = log E exp<t, X>, X a token: tilts t (..., d) to gradients (..., d)."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        """Independent tokens of shape (*shape, d), determined by the generator alone."""


def as_measure(law: TokenLaw) -> Measure:
    """Convert a user-defined distribution to a `Measure`, checking grad_K against K; a `Measure` stays unchanged."""
    if isinstance(law, Measure):
        return law
    missing = [name for name in _NEEDED if not hasattr(law, name)]
    if missing or isinstance(law, type):
        what = f"the class {law.__name__}" if isinstance(law, type) else f"a {type(law).__name__} without {missing[0]}"
        tokens = " (for tokens in an array use Sample)" if hasattr(law, "shape") else ""
        expected = f"expected a law of limitlens{tokens} or an object with {', '.join(_NEEDED)}"
        raise InputError(f"the measure is {what}; {expected}")
    custom = CustomMeasure(law)
    # Random tilts, since the gradient of a centred law vanishes at 0.
    normals = np.random.default_rng(0).standard_normal((_CHECKED, custom.dim))
    custom.check(normals * _NEAR / np.maximum(_spread(custom), 1e-300))
    return custom


def _change(g: Callable[[Array], Array], at: Array, step: Array) -> Array:
    """Change of a function g over a step h, to fourth order: [8(g(h) − g(−h)) − g(2h) + g(−2h)] / 12."""
    return (8 * (g(at + step) - g(at - step)) - (g(at + 2 * step) - g(at - 2 * step))) / 12


def _spread(law: Measure) -> Array:
    """Standard deviation of the tokens along each axis, (d,), from ∇²K(0)."""
    return np.sqrt(np.maximum(np.diagonal(law.covariance), 0.0))


class CustomMeasure(Measure):
    """User-defined distribution of tokens, multiplied by `factor`; uses its `radius` and `hess_K` if it has them."""

    def __init__(self, law: TokenLaw, factor: float = 1.0) -> None:
        self.law, self.factor = law, float(factor)
        self.dim = check_dim(law.dim)
        self.radius = abs(self.factor) * float(getattr(law, "radius", float("inf")))

    def K(self, tilts: Array) -> Array:
        """K(factor · t) at tilts t (..., d), with K the cumulant generating function of the user's distribution."""
        at = self.factor * self.check_tilts(tilts)
        return self._answer("K", self.law.K(at), at.shape[:-1])

    def grad_K(self, tilts: Array) -> Array:
        """Gradient factor · ∇K(factor · t) at tilts t (..., d), with ∇K that of the user's distribution."""
        at = self.factor * self.check_tilts(tilts)
        return self.factor * self._answer("grad_K", self.law.grad_K(at), at.shape)

    def hess_K(self, tilts: Array) -> Array:
        """Hessian ∇²K at tilts (..., d), from the user's `hess_K` or else by finite differences of ∇K."""
        at = self.check_tilts(tilts)
        if hasattr(self.law, "hess_K"):
            return self.factor**2 * self._answer("hess_K", self.law.hess_K(self.factor * at), (*at.shape, self.dim))
        return self._differences(at, self._steps)

    def check(self, tilts: Array) -> None:
        """Raise an `InputError` unless grad_K agrees with the slope of K in a random direction, at tilts (m, d)."""
        tilts = self.check_tilts(tilts)
        direction = np.random.default_rng(1).standard_normal(self.dim)
        step = _STEP / max(float(np.linalg.norm(direction * _spread(self))), 1e-300) * direction
        change = _change(self.K, tilts, step)
        claimed = self.grad_K(tilts) @ step
        # K has a rounding error of 1e-16 |K|, so differences over a step of 1e-3 have one of 1e-13 |K|.
        rounding = 1e-12 * (1 + np.abs(self.K(tilts)))
        wrong = np.abs(change - claimed) > 1e-4 * np.maximum(np.abs(change), np.abs(claimed)) + rounding
        if wrong.any():
            i = int(np.argmax(wrong))
            step_of = f"along a small step from the tilt {brief(tilts[i])} K changes by {change[i]:.6g}"
            found = f"grad_K is not the gradient of K: {step_of} and grad_K gives {claimed[i]:.6g}"
            raise InputError(f"{found}; expected K(t) = log E exp<t, X> and its gradient")

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw tokens of the user's distribution and multiply them by the factor; shape (*shape, d)."""
        wanted = token_shape(shape, self.dim)
        tokens = torch.as_tensor(self.law.sample(wanted[:-1], generator), dtype=torch.float64, device=generator.device)
        if tokens.shape != wanted:
            raise InputError(f"sample returned the shape {tuple(tokens.shape)}; expected {wanted}, one row per token")
        return tokens if self.factor == 1 else self.factor * tokens

    def scaled(self, factor: float) -> CustomMeasure:
        """Distribution of `factor` times a token of this distribution."""
        return CustomMeasure(self.law, factor * self.factor)

    @cached_property
    def _steps(self) -> Array:
        """Steps (d,) of finite differences, by iteration: `_STEP` / standard deviation of the tokens on each axis."""
        steps = np.full(self.dim, _STEP)
        for _ in range(4):
            variance = np.diagonal(self._differences(np.zeros(self.dim), steps))
            steps = np.where(variance > 0, _STEP / np.sqrt(np.maximum(variance, 1e-300)), steps)
        return steps

    def _differences(self, at: Array, steps: Array) -> Array:
        slopes = _change(self.grad_K, at[..., None, :], np.diag(steps)) / steps[:, None]
        return np.asarray((slopes + np.swapaxes(slopes, -1, -2)) / 2)

    def _answer(self, name: str, found: Any, shape: tuple[int, ...]) -> Array:
        values = as_array(f"{name} of the measure at a tilt", found)
        if values.shape != shape:
            raise InputError(f"{name} returned the shape {values.shape}; expected {shape}, one value for each tilt")
        return values

    def __repr__(self) -> str:
        has_repr = type(self.law).__repr__ is not object.__repr__
        name = repr(self.law) if has_repr else f"{type(self.law).__name__}(dim={self.dim})"
        return name if self.factor == 1 else f"{self.factor:g}·{name}"
