"""The local exponent of keys around a query, by maximum likelihood on the nearest distances.

If P(|q − k| ≤ r) = C r^α up to the k-th nearest distance r_k, then given r_k the logarithms log(r_k/r_j), j < k, are
independent exponential numbers of rate α (Hill; Levina and Bickel). With S their sum,

    α̂ = (k − 2)/S is unbiased,   α̂/√(k − 3) its standard error,   and α S ~ Gamma(k − 1) gives an exact interval.

The constant follows from r_k alone, C = k/(n r_k^α), hence the critical inverse temperature of the head. Each key must
be an independent draw: the uncertainty does not know about repeated or correlated keys.

A query outside the keys' support, as those of real heads are, has no local exponent: distances then start at some
r₀ > 0, and α̂ may exceed the dimension. So its r_k is ranked among those of keys to their own neighbours (`support`).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.scaling.control import check_keys, check_theta
from limitlens.theory.scaling.laws import LocalPower

FEWEST_NEIGHBOURS = 5
REFERENCES = 64  # keys whose own neighbours say how far is usual
OUTSIDE = 1 / REFERENCES  # a query is outside their support below this: none of them has neighbours as far away
_COINCIDENT = 1e-6  # the query itself among the keys, up to the rounding of float32
_ON_SPHERE = 1e-4  # float32 and half-precision unit vectors pass, raw keys do not


@dataclass(frozen=True)
class LocalExponent:
    """P(|q − k| ≤ r) ~ C r^α near one query."""

    exponent: float  # α
    stderr: float
    interval: tuple[float, float]  # 95%, exact when the power law is
    neighbours: int  # the number k of nearest keys used
    radius: float  # the distance r_k of the farthest of them
    n: int  # the number of keys

    @property
    def local(self) -> LocalPower:
        """The law of the gap D = |q − k|²/2 near zero: a = α/2 and log c with c = (k/n) (r_k²/2)^{−a}."""
        a = self.exponent / 2
        return LocalPower(a, math.log(self.neighbours / self.n) - a * math.log(self.radius**2 / 2))

    def critical_beta(self, n: float | None = None, theta: float = 1.0) -> tuple[float, float]:
        """β at which n keys (those of the sample by default) have θ, and its relative standard error.

        log β = [log(n k/(n₀ θ)) + log Γ(a+1)]/a − log(r_k²/2). Given the law, α̂ and r_k are independent, so their
        contributions to the variance add up.
        """
        keys, a = check_keys(self.n if n is None else n), self.exponent / 2
        content = math.log(keys * self.neighbours / (self.n * check_theta(theta))) + math.lgamma(a + 1)
        slope = (float(special.digamma(a + 1)) - content / a) / a
        variance = (slope * self.stderr / 2) ** 2 + float(special.polygamma(1, self.neighbours)) / a**2
        return math.exp(content / a) / (self.radius**2 / 2), math.sqrt(variance)


def local_exponent(distances: ArrayLike, neighbours: int | None = None) -> LocalExponent:
    """Estimate α from the distances |q − k| (n,) of one query to all keys, in any order, the query itself left out.

    `neighbours` is the number k of nearest keys to use, √n when left out. More of them lower the variance α²/(k − 3),
    and let in keys too far away for the power law to hold.
    """
    values = as_array("distances", distances, ndim=1)
    n = values.size
    count = usual_count(n) if neighbours is None else neighbours
    if count < FEWEST_NEIGHBOURS:
        raise InputError(f"neighbours is {count}; expected at least {FEWEST_NEIGHBOURS} to have a standard error")
    if count > n:
        raise InputError(f"{n} keys were given; expected at least the {count} neighbours asked for, so give more keys")
    nearest = np.sort(np.partition(values, count - 1)[:count])
    if nearest[0] <= 0:
        told = "expected positive distances, so leave the query itself out"
        raise InputError(f"the smallest distance is {nearest[0]:g}; {told}")
    total = float(np.log(nearest[-1] / nearest[:-1]).sum())
    if total == 0:
        raise InputError(f"the {count} nearest distances are all equal; expected a spread, so use more neighbours")
    exponent = (count - 2) / total
    low, high = (special.gammaincinv(count - 1, [0.025, 0.975]) / total).tolist()
    return LocalExponent(exponent, exponent / math.sqrt(count - 3), (low, high), count, float(nearest[-1]), n)


def support(radii: ArrayLike, keys: Array, neighbours: int | None = None) -> Array:
    """How usual it is for keys (n, d) to have their k-th neighbour at least so far away: radii (q,) to (q,).

    (1 + #{reference keys whose r_k is at least r})/(1 + their number): were the query one more key, this would be at
    most p with probability p. Below `OUTSIDE` the query lies outside the keys' support, as far as n keys can tell.
    """
    count, n = usual_count(len(keys)) if neighbours is None else neighbours, len(keys)
    chosen = keys[references(n)]
    square = np.square(keys).sum(1) + np.square(chosen).sum(1)[:, None] - 2 * chosen @ keys.T
    own = np.sqrt(np.maximum(np.partition(square, min(count, n - 1), axis=1)[:, min(count, n - 1)], 0))  # 0: itself
    return np.asarray((1 + (own >= np.asarray(radii)[:, None]).sum(1)) / (1 + len(own)))


def usual_count(n: int) -> int:
    """Neighbours of n keys to use."""
    return max(20, round(math.sqrt(n)))


def references(n: int) -> NDArray[np.int64]:
    """Which of n keys say how far is usual, (at most `REFERENCES`,): some at random, the same ones every time."""
    return np.random.default_rng(0).permutation(n)[:REFERENCES]


def query_distances(query: ArrayLike, keys: ArrayLike, normalise: bool = False) -> Array:
    """Distances |q − k| between a unit query (d,) and unit keys (n, d), of shape (n,); keys at the query are left out.

    With `normalise`, query and keys of any length are first projected onto the sphere.
    """
    vectors, centre = as_array("keys", keys, ndim=2), as_array("query", query, ndim=1)
    if centre.size != vectors.shape[1]:
        raise InputError(f"the query has dimension {centre.size} and the keys {vectors.shape[1]}; expected the same")
    centre, vectors = on_sphere("the query", centre, normalise), on_sphere("a key", vectors, normalise)
    distances: Array = np.sqrt(np.square(vectors - centre).sum(axis=1))
    return distances[distances > _COINCIDENT]


def on_sphere(name: str, vectors: Array, normalise: bool) -> Array:
    """Vectors (..., d) of length 1: normalised, or else checked."""
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    if normalise:
        if (lengths == 0).any():
            raise InputError(f"{name} is zero; expected non-zero vectors, so leave it out")
        return np.asarray(vectors / lengths)
    worst = lengths.ravel()[np.abs(lengths - 1).argmax()]
    if abs(worst - 1) > _ON_SPHERE:
        raise InputError(f"{name} has length {worst:.6g}; expected unit vectors on the sphere, so normalise them")
    return vectors
