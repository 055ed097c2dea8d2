"""Laws of the k-th largest softmax weight and of the k-th nearest key of one query, as a limit or exact at n keys.

`PoissonPoints(theta, a)` gives the scaling limit, `KeyPoints(law, n, beta)` the exact law. Given the rescaled gap x of
the k-th nearest key, the k − 1 nearer keys and the n − k farther ones are independent. With V and Λ of `points.py`, the
Laplace transform E e^{−λ(1/w_k − k)} of the k-th largest weight w_k is therefore

    ∫ G(x, λ)^{k−1}/(k−1)! V(H(x, λ)) dΛ(x),     G(x, λ) = ∫_0^x exp(−λ(e^{x−u} − 1)) dΛ(u),
    H(x, λ) = Λ([0, x]) + ∫_x^∞ (1 − exp(−λ e^{x−u})) dΛ(u).
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.theory.scaling.laws import gauss_panels, negligible_beyond, tanh_sinh
from limitlens.theory.scaling.points import Points
from limitlens.theory.scaling.weights import check_points

Complex = NDArray[np.complex128]

_CUT_NODES, _PANEL_NODES = 101, 16
_ORDER = 12  # order of the Euler inversion: about 7 digits, with 10⁴ times the rounding error of the transform
LEAST_SPREAD = 0.06  # relative standard deviation of 1/w_k − k that the inversion resolves; at 0.046 it is off by 0.01
_PER_E_FOLD = 8  # panels in which the argument of an oscillating kernel grows by a factor e


def top_cdf(weights: ArrayLike, points: Points, rank: int = 1) -> Array:
    """Probability P(w_k ≤ t) that the k-th largest softmax weight, k = `rank`, is at most t, for `weights` t in (0, 1).

    By Euler inversion (Abate and Whitt, 2006), with an error below 1e-7, or 1e-5 for a ≤ 1/2. The law of rank 1 has a
    kink at t = 1/2, next to which (0.4 to 0.6) the inversion is off by up to 5e-4. Refused where 1/w_k varies by less
    than 6%: then the weights hardly vary, and their means say it all.

    >>> theory.top_cdf([0.15], theory.KeyPoints(theory.uniform(8), 1e5, 61.086)).round(3).tolist()
    [0.368]
    """
    check_points(points)
    _check_rank(rank, points)
    t = as_array("weights", weights)
    if t.size and not (t.min() > 0 and t.max() < 1):
        raise InputError(f"weights reach from {t.min():g} to {t.max():g}; expected weights strictly between 0 and 1")
    excess = np.maximum(1 / t - rank, 0)  # k weights of at least t have the sum kt ≤ 1, so P = 1 from t = 1/k on
    below, possible = np.ones(t.shape), excess > 1e-12
    if possible.any():
        below[possible] = 1 - _inverse_cdf(excess[possible], points, rank)
    return np.clip(below, 0, 1)


def nearest_cdf(distances: ArrayLike, points: Points, rank: int = 1) -> Array:
    """Probability that the `rank`-th nearest key is within a distance r of the query, for `distances` r (...).

    P(k-th gap ≤ s) is the regularised incomplete beta function of F(s) with parameters k and n − k + 1, at s = r²/2; in
    the scaling limit the incomplete gamma function of Λ. A distance is |q − k| for `KeyPoints`, √(2x) in the limit.

    >>> theory.nearest_cdf(0.1, theory.KeyPoints(theory.uniform(5), 10_000, 122.0)).round(4).tolist()
    0.1707
    """
    check_points(points)
    _check_rank(rank, points)
    r = as_array("distances", distances)
    count = points.cumulative(points.beta * np.minimum(np.square(r) / 2, points.edge / points.beta))
    if math.isinf(points.total):
        return np.asarray(special.gammainc(rank, count))
    return np.asarray(special.betainc(rank, points.total - rank + 1, np.clip(count / points.total, 0, 1)))


def deficit_cdf(deficits: ArrayLike, points: Points) -> Array:
    """Probability that 1 − w₁ is at most ε, for `deficits` ε, if only the two nearest keys have any weight.

    Then 1 − w₁ = 1/(1 + e^Δ), and Δ = x₂ − x₁ ≥ 0 has P(Δ ≥ δ) = ∫ V(Λ([0, x + δ])) dΛ(x): the law of the collapse,
    where the nearest key has most weight. `top_cdf` gives the law with all keys.

    >>> theory.deficit_cdf(0.01, theory.KeyPoints(theory.uniform(5), 1000, 3000.0)).round(3).tolist()
    0.928
    """
    check_points(points)
    epsilon = np.clip(as_array("deficits", deficits), 1e-300, 0.5)  # the largest of two weights is at least 1/2
    x, _, mass = _nearest(points, 1)
    within = points.cumulative(np.minimum(x[:, None] + np.log(1 / epsilon.ravel() - 1), points.edge))
    return np.asarray((mass @ points.void(within)).reshape(epsilon.shape))


def _check_rank(rank: int, points: Points) -> None:
    wanted = "a rank from 1 to the number of keys, at most 100"
    if not check_number("rank", rank, wanted, low=1, below=min(100, points.total) + 0.5).is_integer():
        raise InputError(f"rank is {rank:g}; expected {wanted}")


def _nearest(points: Points, rank: int, low: float = 1.0, high: float = 1.0) -> tuple[Array, Array, Array]:
    """Quadrature over the gap of the `rank`-th nearest key: x, Λ([0, x]) and dΛ, each (rows,).

    Kernels that are cut at x = 0 or at the antipode oscillate in x, while e^x − 1 or e^{x − antipode} is a few times v,
    for v from `low` to `high`. There the panels are narrow.
    """
    most = min(float(special.gammainccinv(rank, 1e-18)), points.total)
    count = [np.append(0, most * np.geomspace(1e-7, 1, 24))]
    if rank > 1:
        panels = math.ceil(4 * math.log(60 * high / low))
        count.append(points.cumulative(np.log1p(np.geomspace(0.05 * low, 3 * high, panels))))
    if math.isfinite(points.edge):
        beyond = np.arange(0, math.log(75 / min(low, 1)), 0.25)
        count.append(points.cumulative(np.maximum(points.edge - beyond, 0)))
    within, mass = gauss_panels(np.unique(np.minimum(np.concatenate(count), most)), _PANEL_NODES)
    return points.reach(within), within, mass


def _inverse_cdf(excess: Array, points: Points, rank: int) -> Array:
    """P(1/w_k − k ≤ v) for k = `rank` and positive v = `excess` (m,), by inversion of the Laplace transform."""
    low, high = float(excess.min()), float(excess.max())
    x, within, mass = _nearest(points, rank, low, high)
    abscissae, coefficients = _euler(_ORDER)
    # A kernel of λy, λ = s/v, oscillates while y is a few times v, and is constant or zero beyond.
    # Densities of exponents a < 1 are singular at x = 0, so panels shrink towards the nearest keys.
    least = min(1e-3 * float(points.reach(0.01)), 1e-3)
    first = np.append(0, np.geomspace(least, 1 / _PER_E_FOLD, math.ceil(-1.5 * math.log(least))))
    fine = np.arange(first[-1], max(math.log(50 / low), 0) + first[-1], first[-1])[1:]
    start = fine[-1] if fine.size else first[-1]
    end = max(0.0, math.log(abs(abscissae[-1]) / low)) + negligible_beyond(points.a)
    farther = _beside(points, x, 1, np.concatenate((first, fine, np.arange(start + 0.5, end + 0.5, 0.5))))
    growing = np.geomspace(0.02 * low, 3 * high, math.ceil(_PER_E_FOLD * math.log(150 * high / low)))
    nearer = _beside(points, x, -1, np.append(0, np.log1p(growing))) if rank > 1 else None

    def transform(rate: Complex) -> Complex:
        """E e^{−λ(1/w_k − k)} at each λ of `rate`."""
        expected = within[:, None] + farther(lambda s: -np.expm1(-np.exp(-s)[..., None] * rate))
        density = points.void(expected, rank)
        if nearer is not None:
            inner = nearer(lambda s: np.exp(-np.expm1(s)[..., None] * rate))
            density = density * inner ** (rank - 1) / math.factorial(rank - 1)
        return np.asarray(mass @ density)

    tilts: Complex = np.array([0.01, 0.02], dtype=np.complex128) / float(np.median(excess))  # small, for cumulants
    once, twice = np.log(transform(tilts).real)
    if twice - 2 * once < (LEAST_SPREAD * once) ** 2:
        given = f"1/w of rank {rank} varies by less than {LEAST_SPREAD:.0%}, because many keys share the weight"
        raise InputError(f"{given}; expected fewer effective keys, so raise beta or lower theta")
    return np.array([coefficients @ (transform(abscissae / v) / abscissae).real for v in excess])


def _beside(points: Points, x: Array, side: int, edges: Array) -> Callable[[Callable[[Array], Complex]], Complex]:
    """Integrator of a kernel of the distance s from x (rows,), over dΛ(x + `side` s): kernel to (rows, abscissae).

    All rows share the panels between `edges`. The panel in which the points of a row end (at 0, or at the antipode) has
    nodes of its own, which resolve a singular density.
    """
    s, step = gauss_panels(edges, _PANEL_NODES)
    room = x if side < 0 else points.edge - x
    whole = edges[1:] <= room[:, None]
    inside = np.repeat(whole, _PANEL_NODES, axis=1)
    u = x[:, None] + side * np.where(inside, s, 0.0)
    shared = np.where(inside, points.density(u, points.edge - u) * step, 0.0)
    last = whole.sum(axis=1)
    cut = np.flatnonzero((last < len(edges) - 1) & (room > edges[last]))
    node, complement, weight = tanh_sinh(_CUT_NODES)
    span = (room[cut] - edges[last[cut]])[:, None]
    rest, to_end = edges[last[cut]][:, None] + span * node, span * complement
    ends = (to_end, points.edge - to_end) if side < 0 else (x[cut, None] + rest, to_end)
    own = points.density(*ends) * span * weight

    def integrate(kernel: Callable[[Array], Complex]) -> Complex:
        parts = np.ascontiguousarray(kernel(s)).view(np.float64)  # real and imaginary parts, for a real product
        total = (shared @ parts).view(np.complex128)
        total[cut] += np.einsum("ij,ijk->ik", own, kernel(rest))
        return total

    return integrate


def _euler(order: int) -> tuple[Complex, Array]:
    """Abscissae s and coefficients of the inverse Laplace transform f(v) ≈ Σ coefficient · Re F(s/v)/v of F."""
    k = np.arange(2 * order + 1)
    taper = np.ones(2 * order + 1)
    taper[0] = 0.5
    taper[order + 1 :] = 1 - np.cumsum(special.comb(order, np.arange(order))) / 2**order
    abscissae = np.asarray(order * math.log(10) / 3 + 1j * math.pi * k, dtype=np.complex128)
    return abscissae, 10 ** (order / 3) * (-1.0) ** k * taper
