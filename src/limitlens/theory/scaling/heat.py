"""Evolution of a token density f through layers of attention: to first order in 1/β, the heat equation backwards.

With values equal to keys, weights exp(−β|x−y|²/2) move a token at x to T(x) = x + (1/β) ∇log(f ∗ N(0, I/β)). To first
order this is f_t = −Δf at time t = layers/β, so that tokens N(0, Σ) get the covariance Σ − 2tI. On the sphere S^{d−1}
the output is projected back, and a density of the polar angle is a sum Σ c_l G_l(cos θ) of modes, Legendre polynomials
in dimension d with G_l(1) = 1. One layer multiplies a small mode l by 1 + l(l+d−2)/(β A_d(β)) λ_l/λ_0, where λ_l/λ_0 =
I_{d/2−1+l}(β)/I_{d/2−1}(β) = Π_{j<l} A_{d+2j}(β) (Funk-Hecke). For l = 1 it is 1 + (d−1)/β.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from limitlens.errors import Array, InputError, as_array, check_covariance, check_number
from limitlens.measures.radial import radial_mean
from limitlens.theory.scaling.control import averaging, check_beta, check_keys
from limitlens.theory.scaling.laws import check_dim, uniform


def heat_growth(degree: int, dim: int) -> float:
    """Growth rate l(l+d−2) of the degree-l mode c_l e^{rate·t} of a token density, by the backward heat equation."""
    return float(degree * (degree + dim - 2))


def mode_growth(degree: int, beta: float, dim: int) -> float:
    """Factor 1 + l(l+d−2)/(β A_d(β)) λ_l/λ_0 by which one layer multiplies a small degree-l mode of a token density."""
    check_dim(dim)
    ratios = _multipliers(check_beta(beta), dim, degree)
    return 1 + heat_growth(degree, dim) * float(ratios[degree] / ratios[1]) / beta


@dataclass(frozen=True)
class ZonalFlow:
    """Exact evolution of a token density Σ c_l G_l(cos θ) on the sphere S^{d−1} through layers of attention at β.

    G_l are Legendre polynomials in dimension d. Those above `degree` are dropped, since rounding grows like e^{l²t}.
    """

    dim: int
    beta: float
    degree: int

    def __post_init__(self) -> None:
        check_dim(self.dim)
        check_beta(self.beta)
        check_number("degree", self.degree, "at least one mode", low=1)

    def layers(self, coefficients: ArrayLike, count: int) -> Array:
        """Coefficients c_1, c_2, … of the token density after 0 to `count` layers: (modes,) to (count + 1, degree)."""
        start = as_array("coefficients", coefficients, ndim=1)
        if not 0 < start.size <= self.degree:
            raise InputError(f"{start.size} coefficients were given; expected between 1 and the degree {self.degree}")
        path = np.zeros((count + 1, self.degree))
        path[0, : start.size] = start
        for layer in range(count + 1):
            if layer > 0:
                path[layer] = self._push(path[layer - 1])
            lowest = self._density(path[layer]).min()
            if lowest < 0:
                grown = f"but the backward heat equation has diverged by layer {layer}; use fewer modes than "
                remedy = f"{grown}{self.degree} or fewer layers" if layer else "so use smaller coefficients"
                raise InputError(f"the density falls to {lowest:.3g}; expected 1 + Σ c_l G_l ≥ 0, {remedy}")
        return path

    def displacement(self, coefficients: Array, t: Array) -> Array:
        """Change in one layer of the polar angle θ of tokens at t = cos θ (points,): angles (points,)."""
        degrees = np.arange(self.degree + 1)
        multiplier, derivative = self._kernel
        full = np.concatenate([[1.0], coefficients])
        # In dimension d, G_l' is l(l+d−2)/(d−1) times G_{l−1} in dimension d + 2.
        slopes = (full * multiplier * degrees * (degrees + self.dim - 2) / (self.dim - 1))[1:]
        tangential = -np.sqrt(1 - t * t) * (slopes @ _legendre(t, self.dim + 2, self.degree - 1)) / self.beta
        return np.asarray(np.arctan2(tangential, (full * derivative) @ _legendre(t, self.dim, self.degree)))

    def _push(self, coefficients: Array) -> Array:
        """Coefficients of the token density after one layer x → T(x): c_l' = N_l ∫ G_l(T x) f(x) dσ(x)."""
        t, weight, _ = self._nodes
        moved = np.cos(np.arccos(t) + self.displacement(coefficients, t))
        images = _legendre(moved, self.dim, self.degree)
        degrees = np.arange(1.0, self.degree + 1)
        # N_l, the number of independent harmonics: ∫ G_l² dσ = 1/N_l; 2 on the circle
        many = (2 * degrees + self.dim - 2) / degrees * special.binom(degrees + self.dim - 3, degrees - 1)
        return np.asarray(many * (images[1:] @ (weight * self._density(coefficients))))

    def _density(self, coefficients: Array) -> Array:
        return np.asarray(1 + coefficients @ self._nodes[2][1:])

    @cached_property
    def _kernel(self) -> tuple[Array, Array]:
        """Multipliers λ_l/λ_0 of the modes and derivatives λ_l'(β)/λ_0 = λ_{l+1}/λ_0 + (l/β) λ_l/λ_0: (degree + 1,)."""
        ratios = _multipliers(self.beta, self.dim, self.degree + 1)
        return ratios[:-1], ratios[1:] + np.arange(self.degree + 1) / self.beta * ratios[:-1]

    @cached_property
    def _nodes(self) -> tuple[Array, Array, Array]:
        """Quadrature nodes t = cos θ, weights, and values (degree + 1, nodes) of the modes G_l at the nodes."""
        t, weight = _sphere_nodes(self.dim, 4 * self.degree + 64)
        return t, weight, _legendre(t, self.dim, self.degree)


def gaussian_flow(covariance: ArrayLike, beta: float, layers: int) -> Array:
    """Covariance (layers + 1, d, d) of tokens N(0, Σ) after layers of attention Σ ↦ MΣM, M = Σ(Σ + I/β)^{−1}."""
    values, axes = np.linalg.eigh(check_covariance("covariance", as_array("covariance", covariance, ndim=2)))
    path = [values]
    for _ in range(layers):
        path.append(path[-1] * np.square(path[-1] / (path[-1] + 1 / check_beta(beta))))
    return np.asarray(np.einsum("ij,tj,kj->tik", axes, path, axes))


def rms_slope(amplitude: float, dim: int) -> float:
    """Root mean square of |∇log f| over tokens of density f = 1 + ε cos θ, ε = `amplitude`: √(1−√(1−ε²)) for d = 2."""
    t, weight = _sphere_nodes(dim, 256)
    return math.sqrt(float(weight @ (amplitude**2 * (1 - t * t) / (1 + amplitude * t))))


def token_noise(n: float, beta: float, dim: int) -> float:
    """Standard deviation along one axis of the random part of a token's move in one layer over n keys.

    √(tangential variance)/A_d(β), about √(1/(2β n_eff)). Averaged over the tokens it is the same for every density.
    """
    limit = averaging(n, beta, uniform(dim))
    return math.sqrt(limit.tangential_variance or math.nan) / limit.mean


def drift_to_noise(n: float, beta: float, dim: int, amplitude: float) -> float:
    """Systematic over random token move in a layer, of order n^{1/2} β^{−(d+1)/4}; density 1 + `amplitude` · cos θ."""
    t, weight = _sphere_nodes(dim, 256)
    drift = ZonalFlow(dim, beta, 1).displacement(np.array([amplitude]), t)
    return math.sqrt(float(weight @ ((1 + amplitude * t) * drift**2))) / token_noise(n, beta, dim)


def visible_until(n: float, dim: int, amplitude: float) -> float:
    """Inverse temperature β up to which a layer moves tokens more than the randomness of n keys does, n large.

    β = (s² 2^{a+1} n c Γ(a+1))^{2/(d+1)}, a = (d−1)/2, s the `rms_slope` of the density 1 + `amplitude` cos θ.
    """
    law = uniform(dim)
    log_scale = math.log(check_keys(n)) + law.local.log_laplace(1.0)
    return math.exp((2 * math.log(rms_slope(amplitude, dim)) + (law.a + 1) * math.log(2) + log_scale) / (law.a + 1))


def _sphere_nodes(dim: int, count: int) -> tuple[Array, Array]:
    """Gauss quadrature for the uniform law on S^{d−1}: `count` nodes t = cos θ and weights, which sum to one."""
    power = (dim - 3) / 2
    node, weight = special.roots_jacobi(count, power, power)
    return node, weight / weight.sum()


def _multipliers(beta: float, dim: int, degree: int) -> Array:
    """Factors λ_l/λ_0 by which the kernel e^{β<x,y>} multiplies the modes l = 0, …, degree: (degree + 1,)."""
    ratios = [float(radial_mean(beta, dim + 2 * step)) for step in range(degree)]
    return np.concatenate([[1.0], np.cumprod(ratios)])


def _legendre(t: Array, dim: int, degree: int) -> Array:
    """Legendre polynomials G_l(t) in dimension d, l ≤ degree: Jacobi polynomials over their value at 1, (l, nodes)."""
    degrees, power = np.arange(degree + 1)[:, None], (dim - 3) / 2
    return np.asarray(special.eval_jacobi(degrees, power, power, t) / special.eval_jacobi(degrees, power, power, 1.0))
