"""Point processes of the rescaled gaps x = βD of keys to a query, and expectations over softmax weights w ∝ e^{−x}.

`PoissonPoints` is the scaling limit, a Poisson process on (0, ∞) of intensity dΛ = θ x^{a−1}/Γ(a) dx. `KeyPoints` is n
independent keys of a given law, with dΛ = n dF(x/β) on (0, 2β). For both, exactly, with z = y − x,

    E Σ_j φ(x_j) w_j^p = 1/Γ(p) ∫ dy V(Φ(y)) ∫ φ(x) e^{pz − e^z} dΛ(x),     Φ(y) = ∫ (1 − e^{−e^z}) dΛ(x),

where V(Φ) is e^{−Φ} for the Poisson process and (1 − Φ/n)^{n−1} for n keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from limitlens.errors import Array, check_kind, check_number
from limitlens.theory.scaling.control import check_beta, check_keys, check_theta
from limitlens.theory.scaling.laws import GapLaw, Law, LocalPower, gauss_panels, negligible_beyond, tanh_sinh

_NODES = 401
_SATURATED = 4.0  # z above which 1 − e^{−e^z} is 1 up to 2e-24
_SMALLEST, _LARGEST = 1e-17, 45.0  # Φ outside this range contributes nothing in float64


class Points:
    """Point process of rescaled gaps x = βD of keys to a query; its mean measure Λ is number of keys × law of βD."""

    law: Law  # of the gap D
    mass: float  # factor of the law in Λ: the number of keys, or θ in the scaling limit
    beta: float  # rescales gaps: x = βD
    a: float  # half the local exponent
    log_theta: float  # θ = ∫ e^{−x} dΛ(x)
    edge: float = math.inf  # the x beyond which there are no points
    total: float = math.inf  # the number n of keys

    def reach(self, count: ArrayLike) -> Array:
        """Rescaled gap x below which there are `count` keys on average, the inverse of `cumulative`: (...) to (...)."""
        return self.beta * self.law.quantile(np.asarray(count, dtype=np.float64) / self.mass)

    def cumulative(self, x: Array) -> Array:
        """Mean number Λ([0, x]) of keys with a rescaled gap of at most x."""
        return self.mass * self.law.cdf(x / self.beta)

    def void(self, expected: NDArray[Any], chosen: int = 1) -> NDArray[Any]:
        """Factor V(Φ) of the integrand that stands for all keys but `chosen` = k ones, Φ = `expected`, real or complex.

        e^{−Φ} for a Poisson process. For n keys (1 − Φ/n)^{n−k}, times 1 − 1/n for a pair and Π_{j<k} (1 − j/n) for k.
        """
        if math.isinf(self.total):
            return np.asarray(np.exp(-expected))
        ordered = float(np.prod(1 - np.arange(chosen) / self.total))  # n(n−1)… ordered choices, against the n^k of Λ^k
        share = expected / self.total
        none_left = (share.real >= 1) & (share.imag == 0)  # the logarithm of zero, up to rounding
        log_share = np.log1p(-np.where(none_left, 0, share))
        factor = np.asarray(ordered * np.exp((self.total - chosen) * log_share))
        factor[none_left] = ordered * (self.total == chosen)
        return factor

    def tangent_square(self, x: Array) -> Array:
        """Squared distance, times β, of a key from the axis through the query: β D(2 − D), in the scaling limit 2x."""
        return 2 * x * (1 - x / self.edge)

    def mean_over(self, kernel: Callable[[Array, Array], Array], chosen: int = 1) -> float:
        """Expectation of a sum over keys (`chosen` = 1) or over ordered pairs of keys (2), given by its kernel.

        ∫ dy V(Φ(y)) [∫ kernel(x, z) dΛ(x)]^chosen, z = y − x; `kernel` must decay like e^{z − e^z}.
        """
        weight, x, z, mass, expected = self._grid
        inner = np.einsum("ij,ij->i", kernel(x, z), mass)
        return float(weight @ (inner**chosen * self.void(expected, chosen)))

    @cached_property
    def _grid(self) -> tuple[Array, Array, Array, Array, Array]:
        """Quadrature of `mean_over`: weights of y (rows,), x, z and masses (rows, nodes) for each y, Φ(y) (rows,)."""
        y, weight = gauss_panels(self._panel_edges())
        x, mass, expected = self._rows(y)
        return weight, x, y[:, None] - x, mass, expected

    def _rows(self, y: Array) -> tuple[Array, Array, Array]:
        """Quadrature nodes x and masses under Λ, both (rows, nodes), and Φ(y) (rows,), for each y (rows,)."""
        low = np.minimum(np.maximum(y - _SATURATED, 0), self.edge)
        high = np.minimum(np.maximum(y, 0) + negligible_beyond(self.a), self.edge)
        x, mass = self.between(low, high)
        z = y[:, None] - x
        expected = self.cumulative(low) + np.einsum("ij,ij->i", -np.expm1(-np.exp(z)), mass)
        return x, mass, expected

    def between(self, low: Array, high: Array, nodes: int = _NODES) -> tuple[Array, Array]:
        """Quadrature nodes from `low` to `high`, both (rows,), and their masses under Λ: two arrays (rows, nodes)."""
        node, complement, weight = tanh_sinh(nodes)
        span = (high - low)[:, None]
        x = low[:, None] + span * node
        to_edge = span * complement + (self.edge - high)[:, None]  # edge − x with full relative accuracy
        return x, self.density(x, to_edge) * (span * weight)

    def density(self, x: Array, to_edge: Array) -> Array:
        """Density dΛ/dx of the mean number of keys at rescaled gaps x, where `to_edge` is edge − x."""
        return np.asarray(self.mass / self.beta * np.exp(self.law.log_density(x / self.beta, to_edge / self.beta)))

    def _panel_edges(self) -> Array:
        """Edges of the quadrature panels in y, on each of which Φ grows by at most a factor e; widths are ≤ |y|/4."""
        bottom = math.log(_SMALLEST) - self.log_theta - 1  # since Φ(y) ≤ θ e^y
        top = float(self.reach(_LARGEST)) + _SATURATED
        low, high = self._level(_SMALLEST, bottom, top), self._level(_LARGEST, bottom, top)
        y = np.sinh(np.linspace(math.asinh(low), math.asinh(high), 400))
        log_expected = np.log(np.maximum(self._rows(y)[2], _SMALLEST))
        pace = np.maximum(np.gradient(log_expected, y), 1 / np.maximum(1, np.abs(y) / 4))
        count = np.concatenate([[0], np.cumsum(np.diff(y) * (pace[1:] + pace[:-1]) / 2)])
        return np.asarray(np.interp(np.linspace(0, count[-1], math.ceil(count[-1]) + 1), count, y))

    def _level(self, goal: float, bottom: float, top: float) -> float:
        """Solution y in [bottom, top] of Φ(y) = goal, or `top` if Φ stays below the goal (fewer keys than `goal`)."""

        def excess(y: float) -> float:
            return math.log(max(float(self._rows(np.array([y]))[2][0]), 1e-300) / goal)

        return top if excess(top) <= 0 else float(optimize.brentq(excess, bottom, top, xtol=1e-3))


@dataclass(frozen=True)
class PoissonPoints(Points):
    """Scaling limit of the keys' rescaled gaps x = βD: a Poisson process of intensity θ x^{a−1}/Γ(a)."""

    theta: float
    a: float

    def __post_init__(self) -> None:
        check_number("a", self.a, "half a local exponent, at least 0.15", low=0.15)
        law = LocalPower(self.a, -math.lgamma(self.a + 1))
        log_theta = math.log(check_theta(self.theta))
        vars(self).update(law=law, mass=self.theta, beta=1.0, log_theta=log_theta)  # follow from the frozen fields


@dataclass(frozen=True)
class KeyPoints(Points):
    """Rescaled gaps x = βD of n independent keys of a law at inverse temperature β: exact at finite n."""

    law: GapLaw
    n: float
    beta: float

    def __post_init__(self) -> None:
        check_kind("the law", self.law, GapLaw, "a law of gaps, such as theory.uniform(5)")
        log_theta = math.log(check_keys(self.n)) + float(self.law.log_laplace(check_beta(self.beta)))
        edge = 2 * self.beta  # the antipode of the query
        vars(self).update(mass=self.n, a=self.law.a, log_theta=log_theta, edge=edge, total=self.n)
