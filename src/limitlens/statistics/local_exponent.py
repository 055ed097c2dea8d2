"""Local exponent (local dimension) of the keys around a query, by maximum likelihood on the nearest distances.

If P(|q − k| ≤ r) = C r^α up to the k-th nearest distance r_k, then given r_k the logarithms log(r_k/r_j), j < k, are
independent exponential numbers of rate α (Hill; Levina and Bickel). With S their sum,

    α̂ = (k − 2)/S is unbiased,   α̂/√(k − 3) its standard error,   and α S ~ Gamma(k − 1) gives an exact interval.

The constant C = k/(n r_k^α) follows from r_k, and with it the critical inverse temperature of the head. The standard
error assumes independent keys. A query outside the keys' support, as the queries of real heads are, has no local
exponent: distances then start at some r₀ > 0, and α̂ may exceed the dimension (see `support`).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.scaling.control import check_keys, check_theta
from limitlens.theory.scaling.laws import LocalPower

REFERENCES = 64  # number of keys whose distances to their own neighbours are the reference in `support`
OUTSIDE = 1 / REFERENCES  # p-value below which a query is outside: all reference keys have nearer neighbours
_COINCIDENT = 1e-6  # a key this close is the query itself, up to the rounding of float32
_ON_SPHERE = 1e-4  # accepts float32 and half-precision unit vectors


@dataclass(frozen=True)
class LocalExponent:
    """Estimated exponent α of the number of keys near one query, P(|q − k| ≤ r) ~ C r^α."""

    exponent: float  # α
    stderr: float
    interval: tuple[float, float]  # 95%, exact if the power law holds exactly
    neighbours: int  # number k of nearest keys used
    radius: float  # distance r_k of the k-th nearest key
    n: int  # number of keys

    @property
    def local(self) -> LocalPower:
        """Fitted power law c s^a of the gap D = |q − k|²/2 near zero: a = α/2 and c = (k/n) (r_k²/2)^{−a}."""
        a = self.exponent / 2
        return LocalPower(a, math.log(self.neighbours / self.n) - a * math.log(self.radius**2 / 2))

    def critical_beta(self, n: float | None = None, theta: float = 1.0) -> tuple[float, float]:
        """Inverse temperature β at which n keys have the control parameter θ, and its relative standard error.

        log β = [log(n k/(n₀ θ)) + log Γ(a+1)]/a − log(r_k²/2), n₀ the number of keys in the sample and default of n.
        Given the law, α̂ and r_k are independent, so their contributions to the variance add.
        """
        keys, a = check_keys(self.n if n is None else n), self.exponent / 2
        content = math.log(keys * self.neighbours / (self.n * check_theta(theta))) + math.lgamma(a + 1)
        slope = (float(special.digamma(a + 1)) - content / a) / a
        variance = (slope * self.stderr / 2) ** 2 + float(special.polygamma(1, self.neighbours)) / a**2
        return math.exp(content / a) / (self.radius**2 / 2), math.sqrt(variance)


def local_exponent(distances: ArrayLike, neighbours: int | None = None) -> LocalExponent:
    """Estimate the exponent α of P(|q − k| ≤ r) ~ C r^α from distances (n,) of one query to all other keys.

    `neighbours` is the number k of nearest keys to use, √n by default: a larger k gives a lower variance α²/(k − 3),
    but keys may be too far away for the power law to hold.
    """
    values = as_array("distances", distances, ndim=1)
    n = values.size
    count = _neighbours(n, neighbours)
    if count < 5:
        raise InputError(f"neighbours is {count}; expected at least 5 to have a standard error")
    if count > n:
        raise InputError(f"{n} keys were given; expected at least {count}, the number of neighbours, so give more keys")
    nearest = np.sort(np.partition(values, count - 1)[:count])
    if nearest[0] <= 0:
        raise InputError(f"a distance is {nearest[0]:g}; expected positive distances, so leave the query itself out")
    if nearest[0] == nearest[-1]:
        raise InputError(f"the {count} nearest distances are all equal; expected a spread, so use more neighbours")
    exponent = (count - 2) / float(np.log(nearest[-1] / nearest[:-1]).sum())
    low, high = (special.gammaincinv(count - 1, [0.025, 0.975]) * (exponent / (count - 2))).tolist()
    return LocalExponent(exponent, exponent / math.sqrt(count - 3), (low, high), count, float(nearest[-1]), n)


def support(radii: ArrayLike, keys: Array, neighbours: int | None = None) -> Array:
    """P-value (q,) that queries lie within the keys (n, d): share of keys whose k-th neighbour is as far as a query's.

    `radii` (q,) are the queries' distances to their k-th nearest key. The share is a conformal p-value: for a query
    drawn like one more key it is at most p with probability p. Below `OUTSIDE` the query lies outside the support.
    """
    n = len(keys)
    count = min(_neighbours(n, neighbours), n - 1)
    chosen = keys[np.random.default_rng(0).permutation(n)[:REFERENCES]]
    square = np.square(keys).sum(1) + np.square(chosen).sum(1)[:, None] - 2 * chosen @ keys.T
    own = np.sqrt(np.maximum(np.partition(square, count, axis=1)[:, count], 0))  # neighbour 0 is the key itself
    return np.asarray((1 + (own >= np.asarray(radii)[:, None]).sum(-1)) / (1 + len(own)))


def _neighbours(n: int, neighbours: int | None) -> int:
    """Number of nearest keys used among n keys: `neighbours` if given, otherwise √n but at least 20."""
    return max(20, round(math.sqrt(n))) if neighbours is None else neighbours


def query_distances(query: ArrayLike, keys: ArrayLike, normalise: bool = False) -> Array:
    """Distances |q − k| between a unit query (d,) and unit keys (n, d), without keys that coincide with the query.

    With `normalise`, query and keys of any length are first projected onto the sphere.
    """
    vectors, centre = as_array("keys", keys, ndim=2), as_array("query", query, ndim=1)
    if centre.size != vectors.shape[1]:
        raise InputError(f"the query has dimension {centre.size} and the keys {vectors.shape[1]}; expected the same")
    centre, vectors = on_sphere("the query", centre, normalise), on_sphere("a key", vectors, normalise)
    distances: Array = np.sqrt(np.square(vectors - centre).sum(axis=1))
    return distances[distances > _COINCIDENT]


def on_sphere(name: str, vectors: Array, normalise: bool) -> Array:
    """Unit vectors (..., d): divided by their lengths if `normalise`, otherwise an `InputError` unless of length 1."""
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    if normalise:
        if (lengths == 0).any():
            raise InputError(f"{name} has length 0; expected non-zero vectors, so remove it")
        return np.asarray(vectors / lengths)
    worst = lengths.ravel()[np.abs(lengths - 1).argmax()]
    if abs(worst - 1) > _ON_SPHERE:
        raise InputError(f"{name} has length {worst:.6g}; expected unit vectors on the sphere, so normalise them")
    return vectors
