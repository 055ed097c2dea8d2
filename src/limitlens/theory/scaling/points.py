"""The rescaled gaps x = βD of the keys as a point process, and expectations of what softmax does with them.

Weights are w_j = e^{−x_j} / Σ_i e^{−x_i}. Two point processes matter, with the same interface:

- `PoissonPoints`: the scaling limit, a Poisson process on (0, ∞) of intensity dΛ = θ x^{a−1}/Γ(a) dx;
- `KeyPoints`: n independent keys of a given law at a given β, with dΛ = n dF(x/β) on (0, 2β): exact at finite n.

Writing 1/S^p = ∫ s^{p−1} e^{−sS} ds / Γ(p) for the sum S = Σ e^{−x_i} separates the keys. With s = e^y and z = y − x,

    E Σ_j φ(x_j) w_j^p = 1/Γ(p) ∫ dy V(Φ(y)) ∫ φ(x) e^{pz − e^z} dΛ(x),     Φ(y) = ∫ (1 − e^{−e^z}) dΛ(x),

where V(Φ) is e^{−Φ} for the Poisson process and (1 − Φ/n)^{n−1} for n keys. Nothing is asymptotic in it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from limitlens.errors import Array, InputError
from limitlens.theory.scaling.control import check_beta, check_keys, check_theta
from limitlens.theory.scaling.laws import GapLaw, negligible_beyond
from limitlens.theory.scaling.quadrature import panels, tanh_sinh

_NODES = 401
_SATURATED = 4.0  # e^{−e^4} = 2e-24: keys with z beyond it count fully
_SMALLEST, _LARGEST = 1e-17, 45.0  # Φ outside this range contributes nothing to double precision


class Points(ABC):
    """A point process of rescaled gaps x with mean measure Λ."""

    @property
    @abstractmethod
    def a(self) -> float:
        """Half the local exponent."""

    @property
    @abstractmethod
    def edge(self) -> float:
        """The x beyond which there are no points, possibly infinite."""

    @property
    @abstractmethod
    def log_theta(self) -> float:
        """log θ, with θ = ∫ e^{−x} dΛ(x)."""

    @property
    @abstractmethod
    def total(self) -> float:
        """The number of keys, possibly infinite."""

    @abstractmethod
    def reach(self, count: ArrayLike) -> Array:
        """The x within which `count` keys lie on average, the inverse of `cumulative`: (...) to (...)."""

    @abstractmethod
    def cumulative(self, x: Array) -> Array:
        """Λ([0, x]), the mean number of keys within x."""

    @abstractmethod
    def density(self, x: Array, to_edge: Array) -> Array:
        """dΛ/dx, with `to_edge` = edge − x given apart for its accuracy (infinite when there is no edge)."""

    @abstractmethod
    def void(self, expected: NDArray[Any], chosen: int = 1) -> NDArray[Any]:
        """The factor V(Φ) that the other keys leave when `chosen` of them are singled out."""

    @abstractmethod
    def tangent_square(self, x: Array) -> Array:
        """β times the squared distance of a key to the axis of the query."""

    def mean_over(self, kernel: Callable[[Array, Array], Array]) -> float:
        """∫ dy V(Φ(y)) ∫ kernel(x, z) dΛ(x) with z = y − x; `kernel` must decay like e^{z − e^z}."""
        grid = self._grid
        inner = np.einsum("ij,ij->i", kernel(grid.x, grid.z), grid.mass)
        return float(grid.weight @ (inner * self.void(grid.expected)))

    def mean_over_pairs(self, kernel: Callable[[Array, Array], Array]) -> float:
        """∫ dy V₂(Φ(y)) [∫ kernel(x, z) dΛ(x)]²: the same for ordered pairs of different keys."""
        grid = self._grid
        inner = np.einsum("ij,ij->i", kernel(grid.x, grid.z), grid.mass)
        return float(grid.weight @ (np.square(inner) * self.void(grid.expected, chosen=2)))

    @cached_property
    def _grid(self) -> _Grid:
        y, weight = panels(self._panel_edges())
        x, mass, expected = self._rows(y)
        return _Grid(weight, x, y[:, None] - x, mass, expected)

    def _rows(self, y: Array) -> tuple[Array, Array, Array]:
        """Per y (rows): nodes x, their masses under Λ, both (rows, nodes), and Φ(y), (rows,)."""
        low = np.minimum(np.maximum(y - _SATURATED, 0), self.edge)
        high = np.minimum(np.maximum(y, 0) + negligible_beyond(self.a), self.edge)
        x, mass = self.between(low, high)
        z = y[:, None] - x
        expected = self.cumulative(low) + np.einsum("ij,ij->i", -np.expm1(-np.exp(z)), mass)
        return x, mass, expected

    def between(self, low: Array, high: Array, nodes: int = _NODES) -> tuple[Array, Array]:
        """Nodes in each interval (rows,) and their masses under Λ: two arrays (rows, nodes)."""
        node, complement, weight = tanh_sinh(nodes)
        span = (high - low)[:, None]
        x = low[:, None] + span * node
        to_edge = span * complement + (self.edge - high)[:, None]
        return x, self.density(x, to_edge) * (span * weight)

    def _expected(self, y: float) -> float:
        return float(self._rows(np.array([y]))[2][0])

    def _panel_edges(self) -> Array:
        """Edges in y of panels on which the integrands are smooth: Φ grows by at most e, the width is at most |y|/4."""
        bottom = math.log(_SMALLEST) - self.log_theta - 1  # since Φ(y) ≤ θ e^y
        top = float(self.reach(_LARGEST)) + _SATURATED
        low, high = self._level(_SMALLEST, bottom, top), self._level(_LARGEST, bottom, top)
        y = np.sinh(np.linspace(math.asinh(low), math.asinh(high), 400))
        log_expected = np.log(np.maximum(self._rows(y)[2], _SMALLEST))
        pace = np.maximum(np.gradient(log_expected, y), 1 / np.maximum(1, np.abs(y) / 4))
        count = np.concatenate([[0], np.cumsum(np.diff(y) * (pace[1:] + pace[:-1]) / 2)])
        edges: Array = np.interp(np.linspace(0, count[-1], math.ceil(count[-1]) + 1), count, y)
        return edges

    def _level(self, goal: float, bottom: float, top: float) -> float:
        """The y in [bottom, top] with Φ(y) = goal, or `top` when Φ stays below (fewer keys than the goal)."""
        if self._expected(top) <= goal:
            return top

        def excess(y: float) -> float:
            return math.log(max(self._expected(y), 1e-300) / goal)

        return float(optimize.brentq(excess, bottom, top, xtol=1e-3))


@dataclass(frozen=True)
class _Grid:
    weight: Array  # (rows,) of the integral over y
    x: Array  # (rows, nodes)
    z: Array  # (rows, nodes)
    mass: Array  # (rows, nodes)
    expected: Array  # (rows,)


@dataclass(frozen=True)
class PoissonPoints(Points):
    """The scaling limit: a Poisson process of intensity θ x^{a−1}/Γ(a)."""

    theta: float
    half_exponent: float

    def __post_init__(self) -> None:
        check_theta(self.theta)
        if not 0.15 <= self.half_exponent < math.inf:
            raise InputError(f"a is {self.half_exponent:g}; expected half a local exponent, at least 0.15")

    @property
    def a(self) -> float:
        """As given."""
        return self.half_exponent

    @property
    def edge(self) -> float:
        """None."""
        return math.inf

    @property
    def log_theta(self) -> float:
        """As given."""
        return math.log(self.theta)

    @property
    def total(self) -> float:
        """Infinite."""
        return math.inf

    def reach(self, count: ArrayLike) -> Array:
        """(Γ(a+1) count/θ)^{1/a}."""
        x: Array = np.exp((np.log(count) + math.lgamma(self.a + 1) - self.log_theta) / self.a)
        return x

    def cumulative(self, x: Array) -> Array:
        """θ x^a / Γ(a+1)."""
        value: Array = self.theta * np.exp(special.xlogy(self.a, x) - math.lgamma(self.a + 1))
        return value

    def density(self, x: Array, to_edge: Array) -> Array:
        """θ x^{a−1} / Γ(a)."""
        value: Array = self.theta * np.exp(special.xlogy(self.a - 1, x) - math.lgamma(self.a))
        return value

    def void(self, expected: NDArray[Any], chosen: int = 1) -> NDArray[Any]:
        """e^{−Φ}: the other keys of a Poisson process do not notice the chosen ones."""
        factor: NDArray[Any] = np.exp(-expected)
        return factor

    def tangent_square(self, x: Array) -> Array:
        """2x."""
        return 2 * x


@dataclass(frozen=True)
class KeyPoints(Points):
    """n independent keys of a law at inverse temperature β: exact at finite n."""

    law: GapLaw
    n: float
    beta: float

    def __post_init__(self) -> None:
        check_keys(self.n)
        check_beta(self.beta)

    @property
    def a(self) -> float:
        """That of the law."""
        return self.law.a

    @cached_property
    def log_theta(self) -> float:
        """log n + log E e^{−βD}."""
        return math.log(self.n) + float(self.law.log_laplace(self.beta))

    @property
    def total(self) -> float:
        """n."""
        return self.n

    def reach(self, count: ArrayLike) -> Array:
        """β times the quantile of D at count/n."""
        return self.beta * self.law.quantile(np.minimum(1, np.asarray(count, dtype=np.float64) / self.n))

    @property
    def edge(self) -> float:
        """2β, the antipode of the query."""
        return 2 * self.beta

    def cumulative(self, x: Array) -> Array:
        """n P(D ≤ x/β)."""
        return self.n * self.law.cdf(x / self.beta)

    def density(self, x: Array, to_edge: Array) -> Array:
        """n/β times the density of D."""
        return self.n / self.beta * np.exp(self.law.log_density(x / self.beta, to_edge / self.beta))

    def void(self, expected: NDArray[Any], chosen: int = 1) -> NDArray[Any]:
        """(1 − Φ/n)^{n−1}, or (1 − 1/n)(1 − Φ/n)^{n−2} for a pair."""
        ordered_pairs = 1 - 1 / self.n if chosen == 2 else 1.0  # n(n−1) of them, against the n² of Λ × Λ
        none_left = expected >= self.n  # the logarithm of zero, up to rounding
        log_share = np.log1p(-np.where(none_left, 0, expected) / self.n)
        factor: NDArray[Any] = ordered_pairs * np.exp((self.n - chosen) * log_share)
        factor[none_left] = float(self.n == chosen)
        return factor

    def tangent_square(self, x: Array) -> Array:
        """β D(2 − D) = x (2 − x/β)."""
        return x * (2 - x / self.beta)
