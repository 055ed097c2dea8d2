"""User-defined laws: any object with `dim`, `K`, `grad_K` and `sample` can be used as a measure.

The mean is ∇K(0), and ∇²K comes from central differences of ∇K unless the object has a `hess_K`. Every public function
that takes a measure passes it through `as_measure`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from limitlens.arrays import torch
from limitlens.errors import Array, InputError, as_array
from limitlens.measures._shared import brief, check_dim, token_shape
from limitlens.measures.base import Measure

_STEP = 1e-3  # step of differences in tilt, times 1 / the tokens' spread: truncation and rounding are about 1e-12
_CHECKED, _NEAR = 4, 0.2  # number of random tilts at which a law is checked, and their scale times 1 / the spread
_NEEDED = ("dim", "K", "grad_K", "sample")


class TokenLaw(Protocol):
    """Attributes that a user-defined law must have; its methods may return NumPy arrays or torch tensors."""

    @property
    def dim(self) -> int:
        """The dimension d of the tokens."""

    def K(self, tilts: Array) -> Any:
        """K(t) = log E exp<t, X>: tilts (..., d) to values (...)."""

    def grad_K(self, tilts: Array) -> Any:
        """∇K(t): tilts (..., d) to (..., d)."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        """Independent tokens of shape (*shape, d), determined by the generator alone."""


def as_measure(law: TokenLaw) -> Measure:
    """Convert a law to a `Measure` and check that its grad_K is the gradient of its K; return a `Measure` unchanged."""
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


def _spread(law: Measure) -> Array:
    """Standard deviations of the tokens along each axis, from ∇²K(0)."""
    return np.sqrt(np.maximum(np.diagonal(law.covariance), 0.0))


class CustomMeasure(Measure):
    """The law of factor · X for X of a user-defined law, whose `radius` and `hess_K` are used if it has them."""

    def __init__(self, law: TokenLaw, factor: float = 1.0) -> None:
        self.law, self.factor = law, float(factor)
        self.dim = check_dim(law.dim)
        self.radius = abs(self.factor) * float(getattr(law, "radius", float("inf")))

    def K(self, tilts: Array) -> Array:
        """K(factor · t) of the law."""
        at = self.factor * self.check_tilts(tilts)
        return self._answer("K", self.law.K(at), at.shape[:-1])

    def grad_K(self, tilts: Array) -> Array:
        """factor · ∇K(factor · t) of the law."""
        at = self.factor * self.check_tilts(tilts)
        return self.factor * self._answer("grad_K", self.law.grad_K(at), at.shape)

    def hess_K(self, tilts: Array) -> Array:
        """[8(g(h) − g(−h)) − g(2h) + g(−2h)] / 12h along each axis, g = ∇K, made symmetric."""
        at = self.check_tilts(tilts)
        if hasattr(self.law, "hess_K"):
            return self.factor**2 * self._answer("hess_K", self.law.hess_K(self.factor * at), (*at.shape, self.dim))
        return self._differences(at, self._steps)

    def check(self, tilts: Array) -> None:
        """Raise an `InputError` unless K is finite at the tilts (m, d), with ∇K its slope along a random direction."""
        tilts = self.check_tilts(tilts)
        direction = np.random.default_rng(1).standard_normal(self.dim)
        step = _STEP / max(float(np.linalg.norm(direction * _spread(self))), 1e-300) * direction
        moved = [self.K(tilts + move * step) for move in (1, -1, 2, -2)]
        change = (8 * (moved[0] - moved[1]) - (moved[2] - moved[3])) / 12
        claimed = self.grad_K(tilts) @ step
        # K has a rounding error of 1e-16 |K|, so differences over a step of 1e-3 have one of 1e-13 |K|.
        rounding = 1e-12 * (1 + np.abs(moved[0]))
        wrong = np.abs(change - claimed) > 1e-4 * np.maximum(np.abs(change), np.abs(claimed)) + rounding
        if wrong.any():
            i = int(np.argmax(wrong))
            raise InputError(
                f"grad_K is not the gradient of K: along a small step from the tilt {brief(tilts[i])} K changes by "
                f"{change[i]:.6g} and grad_K gives {claimed[i]:.6g}; expected K(t) = log E exp<t, X> and its gradient"
            )

    def sample(self, shape: int | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Tokens of the law, times the factor."""
        wanted = token_shape(shape, self.dim)
        tokens = torch.as_tensor(self.law.sample(wanted[:-1], generator), dtype=torch.float64, device=generator.device)
        if tokens.shape != wanted:
            raise InputError(f"sample returned the shape {tuple(tokens.shape)}; expected {wanted}, one row per token")
        return tokens if self.factor == 1 else self.factor * tokens

    def scaled(self, factor: float) -> CustomMeasure:
        """The law of `factor` times the tokens."""
        return CustomMeasure(self.law, factor * self.factor)

    @cached_property
    def _steps(self) -> Array:
        """Step of the differences along each axis: `_STEP` over the tokens' spread along it, found by iteration."""
        steps = np.full(self.dim, _STEP)
        for _ in range(4):
            variance = np.diagonal(self._differences(np.zeros(self.dim), steps))
            steps = np.where(variance > 0, _STEP / np.sqrt(np.maximum(variance, 1e-300)), steps)
        return steps

    def _differences(self, at: Array, steps: Array) -> Array:
        moved = [self.grad_K(at[..., None, :] + move * np.diag(steps)) for move in (1, -1, 2, -2)]
        slopes = (8 * (moved[0] - moved[1]) - (moved[2] - moved[3])) / (12 * steps[:, None])
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
