"""Variance proxies: the matrices that theorems on sub-Gaussian tokens use in place of the covariance.

S is a variance proxy of X if K(t) - <E X, t> ≤ ½ tᵀSt for every tilt t. The covariance can be far too small:
.99 N(0, .5) + .01 N(0, 50) has the variance 0.995 and the smallest proxy 50.
"""

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array
from limitlens.measures.base import Measure
from limitlens.measures.cube import Cube
from limitlens.measures.gaussian import Gaussian
from limitlens.measures.mixture import GaussianMixture
from limitlens.measures.sphere import Ball, Sphere
from limitlens.theory.spectrum import Reach, reach

# Laws whose covariance is a variance proxy. On the sphere E e^{r u₁} = Σ_k (r²/4)^k / (k! (d/2)_k) ≤ e^{r²/(2d)}, since
# (d/2)_k ≥ (d/2)^k; balls and cubes follow from it.
STRICT = (Gaussian, Sphere, Ball, Cube)


def variance_proxy(law: Measure) -> Array | None:
    """A variance proxy S (d, d) of a law, or None if none is known [P].

    It is the covariance for `STRICT` laws; for a Gaussian mixture an upper bound of its covariances plus D²/4, D the
    largest distance between two means; for a bounded law the square of its radius R. A variable in an interval of
    length D, or 2R, has the proxy D²/4, or R² (Hoeffding).

    >>> theory.variance_proxy(ll.Sphere(2)).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    if isinstance(law, STRICT):
        return law.covariance
    if isinstance(law, GaussianMixture):
        parts = [component.covariance for component in law.components]
        same = all(np.array_equal(part, parts[0]) for part in parts)
        widest = parts[0] if same else max(float(np.linalg.eigvalsh(part)[-1]) for part in parts) * np.eye(law.dim)
        apart = max(float(np.sum((law.means - mean) ** 2, axis=1).max()) for mean in law.means)
        return np.asarray(widest + apart / 4 * np.eye(law.dim))
    return law.radius**2 * np.eye(law.dim) if np.isfinite(law.radius) else None


def proxy_reach(law: Measure, A: ArrayLike) -> Reach | None:
    """The reach of a head computed from a variance proxy instead of the covariance; None if no proxy is known."""
    proxy = variance_proxy(law)
    return None if proxy is None else reach(proxy, A)
