"""Constants of the n^{-1/2} law of the moments, which exist for Gaussian tokens while H < 1 [V].

The linearised mean error is an average of influences h(X_i) (`token_influence`); its variance is finite
exactly when every singular value of B = Σ^{1/2} A Σ^{1/2} is below 1. Convergence is slow near 1: at H = 0.9 and
n = 1e5 the measured variance is still 0.87 (mean) and 0.56 (covariance) of the constant. So it is beyond d = 1 where
‖B‖_F is large: there the constants are a limit that no sample reaches, and only heuristic at a given n.
"""

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, as_array, check_number
from limitlens.theory.spectrum import square_root, whitened

_WHY = "below 1, because from 1 on the moments have no n^(-1/2) constant: use the sharp law instead"
_below_one = partial(check_number, "the horizon", expected=_WHY, below=1.0)


def mean_error_covariance(covariance: ArrayLike, A: ArrayLike, V: ArrayLike | None = None) -> Array:
    """V Σ^{1/2} [C + B + Bᵀ + (I-C²)^{-1} det(I-C²)^{-1/2}] Σ^{1/2} Vᵀ, C = BBᵀ: the limit of n · Cov(mean error).

    In d = 1 it is H² + 2 s H + (1-H⁴)^{-3/2}, s the sign of A.

    >>> theory.mean_error_covariance([[1.0]], [[0.5]]).round(4).tolist()
    [[2.3516]]
    """
    root, B = square_root(covariance), whitened(covariance, A)
    _below_one(float(np.linalg.norm(B, 2)))
    C = B @ B.T
    gap = np.eye(len(C)) - C @ C
    core = C + B + B.T + np.linalg.inv(gap) * np.exp(-float(np.linalg.slogdet(gap)[1]) / 2)
    outer = root if V is None else as_array("V", V, ndim=2) @ root
    return np.asarray(outer @ core @ outer.T)


def covariance_error_variance_1d(horizon: float) -> float:
    """d = 1: n · Var(variance of the outputs) → 10 H⁴ + 4 H⁴ (2 + H⁴) (1-H⁴)^{-5/2}; the sign of A is irrelevant.

    >>> round(theory.covariance_error_variance_1d(0.5), 4)
    1.2309
    """
    h4 = _below_one(abs(horizon)) ** 4
    return 10.0 * h4 + 4.0 * h4 * (2.0 + h4) * float((1.0 - h4) ** -2.5)
