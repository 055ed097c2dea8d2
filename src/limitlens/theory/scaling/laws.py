"""Distributions of the gap D = 1 − <q, k> between a unit query q and a random unit key k.

Attention weights are proportional to e^{−βD}. At large β only small gaps matter, where P(D ≤ s) ~ c s^a. Equivalently
P(|q − k| ≤ r) ~ C r^α with a = α/2 and c = C 2^{α/2}.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy import special
from scipy.interpolate import CubicHermiteSpline

from limitlens.errors import LARGEST, Array, InputError, as_array, check_number
from limitlens.measures.radial import radial_K, radial_mean

_NODES = 401
_EXPONENTS = 0.3, 1000  # range of α: quadrature misses mass at the singularity below, float64 overflows above


@lru_cache(maxsize=8)
def tanh_sinh(nodes: int) -> tuple[Array, Array, Array]:
    """Nodes v = 1 / (1 + exp(−π sinh t)), 1 − v and weights of tanh-sinh quadrature on (0, 1), each (nodes,)."""
    t = np.linspace(-5.0, 5.0, nodes)
    node, complement = special.expit(np.pi * np.sinh(t)), special.expit(-np.pi * np.sinh(t))  # both fully accurate
    weight = np.pi * np.cosh(t) * node * complement * (t[1] - t[0])
    for array in (node, complement, weight):
        array.setflags(write=False)  # all callers share the cached arrays
    return node, complement, weight


def gauss_panels(edges: Array, nodes: int = 16) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on the panels between `edges`, (panels · nodes,) each."""
    node, weight = np.polynomial.legendre.leggauss(nodes)
    half = np.diff(edges)[:, None] / 2
    return ((edges[1:] + edges[:-1])[:, None] / 2 + half * node).ravel(), (half * weight).ravel()


@dataclass(frozen=True)
class LocalPower:
    """Power law P(D ≤ s) ~ c s^a of small gaps D = 1 − <q, k>, which determines the scaling limit of attention."""

    a: float  # half the local exponent α
    log_c: float

    def __post_init__(self) -> None:
        check_number("a", self.a, "half a local exponent, more than 0", closed=False)
        check_number("log_c", self.log_c, "the logarithm of a number", low=-LARGEST)

    def log_laplace(self, beta: float) -> float:
        """Logarithm of E e^{−βD}, D the gap, as the inverse temperature β grows: log(c Γ(a+1) β^{−a})."""
        return self.log_c + math.lgamma(self.a + 1) - self.a * math.log(beta)

    def cdf(self, gap: Array) -> Array:
        """Probability c s^a that the gap D is at most s = `gap`."""
        return np.asarray(np.exp(self.log_c + special.xlogy(self.a, gap)))

    def quantile(self, probability: ArrayLike) -> Array:
        """Gap s = (u/c)^{1/a} below which a gap lies with probability u."""
        return np.asarray(np.exp((np.log(probability) - self.log_c) / self.a))

    def log_density(self, gap: Array, to_antipode: Array) -> Array:
        """Log-density log(c a s^{a−1}) of the gap at s = `gap`; `to_antipode` is ignored, as there is no upper end."""
        return np.asarray(self.log_c + math.log(self.a) + special.xlogy(self.a - 1, gap))


class GapLaw(ABC):
    """Distribution of the gap D = 1 − <q, k> between a unit query and a random key; P(D ≤ s) ~ c s^a near zero."""

    name: str
    dim: int
    a: float  # half the local exponent α
    log_c: float
    tangent_dim: int | None  # number of directions around the query; None if keys are not uniform over them

    @abstractmethod
    def log_density(self, gap: Array, to_antipode: Array) -> Array:
        """Log-density of the gap 1 − <q, k> at `gap`; `to_antipode` is 2 − gap, passed to keep its accuracy."""

    @property
    def local(self) -> LocalPower:
        """Power law P(D ≤ s) ~ c s^a of the gap near zero."""
        return LocalPower(self.a, self.log_c)

    @property
    def parameters(self) -> dict[str, float]:
        """Constructor arguments of the law by name, such as dim and power."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @property
    def exponent(self) -> float:
        """The local exponent α = 2a: P(|q − k| ≤ r) ~ C r^α."""
        return 2 * self.a

    def sideways(self, gap: Array) -> Array:
        """Mean coordinate, towards the keys' mean direction and orthogonal to the query, of a key at this gap."""
        return np.zeros_like(gap)

    def cdf(self, gap: ArrayLike) -> Array:
        """Probability that the gap 1 − <q, k> is at most `gap`, accurate even for tiny ones: (...) to (...)."""
        s = np.clip(as_array("gap", gap), 0, 2)
        node, complement, weight = tanh_sinh(_NODES)
        span = np.maximum(s, 1e-200)[..., None]  # the density of an exponent a < 1 is infinite at 0
        density = np.exp(self.log_density(span * node, span * complement + (2 - span)))
        return np.asarray(s * (density @ weight))

    def quantile(self, probability: ArrayLike) -> Array:
        """Gap s with P(gap ≤ s) = u, for probabilities u of any shape."""
        lowest, correction = self._quantile_table
        log_u = np.log(np.clip(as_array("probability", probability), np.finfo(float).tiny, 1))
        leading = (log_u - self.log_c) / self.a
        return np.minimum(np.exp(leading + correction(np.maximum(log_u, lowest))), 2)

    def log_laplace(self, beta: ArrayLike) -> Array:
        """Logarithm of E e^{−βD} = e^{K(β) − β}, D the gap, at inverse temperatures β of any shape."""
        return self.tilted(beta)[0]

    def tilted(self, beta: ArrayLike) -> tuple[Array, Array, Array, Array]:
        """Log of E e^{−βD}; mean and variance of D, and mean of `sideways`, under weights e^{−βD}: as β each."""
        tilt = as_array("beta", beta)
        if tilt.size and tilt.min() < 0:
            raise InputError(f"beta is {tilt.min():.6g}; expected an inverse temperature of at least 0")
        node, complement, weight = tanh_sinh(_NODES)
        end = np.minimum(2, negligible_beyond(self.a) / np.maximum(tilt, 1e-300))[..., None]
        gap = end * node
        log_term = self.log_density(gap, end * complement + (2 - end)) - tilt[..., None] * gap
        top = log_term.max(axis=-1, keepdims=True)
        term = np.exp(log_term - top) * weight
        total = term.sum(axis=-1)
        mean = (term * gap).sum(axis=-1) / total
        variance = (term * np.square(gap - mean[..., None])).sum(axis=-1) / total
        aside = (term * self.sideways(gap)).sum(axis=-1) / total
        return np.log(total * end[..., 0]) + top[..., 0], mean, variance, aside

    @cached_property
    def _quantile_table(self) -> tuple[float, CubicHermiteSpline]:
        """Smallest log u, and a spline with exact slopes of the smooth function log s − log(u/c)/a of log u."""
        # Below the first gap the relative error of the leading term is the gap itself, or u is below 1e-270.
        first = max(1e-12, math.exp((-620 - self.log_c) / self.a))
        linear = np.linspace(max(first, 0.1), 1.9, 4000)
        gap = np.concatenate([np.geomspace(first, linear[0], 500)[:-1], linear, 2 - np.geomspace(0.1, 1e-9, 500)[1:]])
        log_cdf = np.log(self.cdf(gap))
        record = np.maximum.accumulate(log_cdf)
        keep = np.concatenate([[True], log_cdf[1:] > record[:-1] + 1e-14])  # near u = 1 rounding hides the increase
        gap, log_cdf = gap[keep], log_cdf[keep]
        slope = np.exp(log_cdf - self.log_density(gap, 2 - gap)) / gap - 1 / self.a
        correction = np.log(gap) - (log_cdf - self.log_c) / self.a
        return float(log_cdf[0]), CubicHermiteSpline(log_cdf, correction, slope)


Law: TypeAlias = GapLaw | LocalPower


def negligible_beyond(a: float) -> float:
    """Cut-off x of integrals of x^{a−1} e^{−x}: a fraction 1e-18 of the mass lies beyond x."""
    return float(special.gammainccinv(a, 1e-18))


@dataclass(frozen=True)
class PowerGap(GapLaw):
    """Gap law of keys on S^{d−1} with density ∝ |q − k|^γ, γ = `power`: D/2 ~ Beta(b + γ/2, b), b = (d−1)/2.

    γ is 0 for uniform keys and positive if keys avoid the query. The local exponent is α = d − 1 + γ.
    """

    dim: int
    power: float = 0.0

    def __post_init__(self) -> None:
        check_dim(self.dim)
        low, high = _EXPONENTS
        check_number("power", self.power, "a number", low=-LARGEST)
        if not low <= self.dim - 1 + self.power <= high:
            expected = f"an exponent d − 1 + power from {low:g} to {high:g}: power {low + 1 - self.dim:g} or more"
            raise InputError(f"power is {self.power:g} in dimension {self.dim}; expected {expected}")
        tangent_dim = self.dim - 1
        a = (tangent_dim + self.power) / 2
        # c = 1/(a B(a, b) 2^a): for γ = 0 that is 2^{(d−3)/2} Γ(d/2) / (√π Γ((d+1)/2))
        log_c = -float(special.betaln(a, tangent_dim / 2)) - a * math.log(2) - math.log(a)
        name = "power" if self.power else "uniform"
        vars(self).update(name=name, a=a, log_c=log_c, tangent_dim=tangent_dim)  # follow from the frozen fields

    def log_density(self, gap: Array, to_antipode: Array) -> Array:
        """Log-density of D: (a−1) log D + (b−1) log(2−D) − log B(a, b) − (a+b−1) log 2, with b = (d−1)/2."""
        a, b = self.a, (self.dim - 1) / 2
        norm = float(special.betaln(a, b)) + (a + b - 1) * math.log(2)
        return np.asarray(special.xlogy(a - 1, gap) + special.xlogy(b - 1, to_antipode) - norm, dtype=np.float64)

    def cdf(self, gap: ArrayLike) -> Array:
        """Probability that the gap is at most `gap` = s: the regularised incomplete beta function of s/2."""
        return np.asarray(special.betainc(self.a, (self.dim - 1) / 2, np.clip(as_array("gap", gap), 0, 2) / 2))


@dataclass(frozen=True)
class VonMisesFisherGap(GapLaw):
    """Gap law of von Mises-Fisher keys, density ∝ exp(κ<μ, k>) on S^{d−1}, for a query with <μ, q> = cosine = cos φ.

    Its density at s is that of uniform keys times exp(κ cosφ (1−s) + K_{d−1}(κ sinφ √(s(2−s))) − K_d(κ)), with
    K_d(κ) = log E e^{κ<μ,u>} for u uniform on S^{d−1}.
    """

    dim: int
    concentration: float
    cosine: float = 1.0
    name = "vmf"

    def __post_init__(self) -> None:
        check_dim(self.dim)
        check_number("concentration", self.concentration, "a concentration of at least 0")
        check_number("cosine", self.cosine, "<mean direction, query> between -1 and 1", low=-1, below=1 + 1e-15)
        even = PowerGap(self.dim)
        on_axis = abs(self.cosine) == 1 or self.concentration == 0
        log_c = even.log_c + self.concentration * self.cosine - float(radial_K(self.concentration, self.dim))
        vars(self).update(a=even.a, log_c=log_c, tangent_dim=even.tangent_dim if on_axis else None)

    def log_density(self, gap: Array, to_antipode: Array) -> Array:
        """Log-density of the gap at s = `gap`, where `to_antipode` is 2 − s."""
        sine = math.sqrt(max(0.0, 1 - self.cosine**2))
        around = radial_K(self.concentration * sine * np.sqrt(gap * to_antipode), self.dim - 1)
        along = self.concentration * self.cosine * (1 - gap)
        uniformly = PowerGap(self.dim).log_density(gap, to_antipode)
        return np.asarray(uniformly + along + around - float(radial_K(self.concentration, self.dim)))

    def sideways(self, gap: Array) -> Array:
        """Mean of a key's coordinate towards μ, orthogonal to the query: ρ A_{d−1}(κ sinφ ρ), ρ = √(s(2−s))."""
        across = self.concentration * math.sqrt(max(0.0, 1 - self.cosine**2))
        radius = np.sqrt(np.maximum(gap * (2 - gap), 0))
        return np.asarray(radius * radial_mean(across * radius, self.dim - 1))


def uniform(dim: int) -> PowerGap:
    """Distribution of the gap D = 1 − <q, k> for keys uniform on the sphere S^{d−1}, d = `dim`: a = (d−1)/2.

    >>> theory.uniform(5).exponent
    4.0
    """
    return PowerGap(dim)


def named_law(name: str, dim: int, *, concentration: float = 5.0, cosine: float = 1.0, power: float = 1.0) -> GapLaw:
    """Distribution of the gap 1 − <q, k> by its name on the command line: uniform, vmf or power."""
    if name == "vmf":
        return VonMisesFisherGap(dim, concentration, cosine)
    if name not in ("uniform", "power"):
        raise InputError(f"the law is {name!r}; expected uniform, vmf or power")
    return PowerGap(dim, power if name == "power" else 0.0)


def check_dim(dim: int) -> None:
    """Raise an `InputError` unless the dimension of the keys is an integer of at least 2."""
    wanted = "an integer of at least 2, for keys on the sphere S^(dim-1)"
    if not check_number("dim", dim, wanted, low=2).is_integer():
        raise InputError(f"dim is {dim:g}; expected {wanted}")
