"""Error of attention over n consecutive tokens: sums of covariances, blocks as units, documents as random effects.

With weights w of mean 1, the influence of the token at distance r from the query is h_r = w (v − Γ). To first order in
1/n the squared error over n consecutive tokens, apart from the squared bias |Σ E h_r|²/n², is

    n⁻² Σ_i Σ_j Cov(h_i, h_j) = (1/n) [c₀ + 2 Σ_{r<n} (1 − r/n) c_r],    c_r = Cov(h_0, h_r) of a stationary text,

which is σ²τ/n with σ² = c₀ and τ = 1 + 2 Σ c_r/c₀ only if the covariances can be summed. Blocks of b tokens are tokens
of weight W_b = Σ w and value Σ w v / W_b: where blocks are independent, the exact law of `theory.exact_bootstrap` holds
with m = n/b blocks. If documents differ, the error within a document falls with n, and the distance |Γ_d − Γ|² between
the limits of a document and of the corpus stays.
"""

import numpy as np

from limitlens.errors import Array, InputError, as_array
from limitlens.theory.exact_bootstrap import PARTS, pilot_errors


def dependent_error(covariances: Array, n: int) -> float:
    """Squared error over n consecutive tokens, without bias, from the covariances c_0, c_1, ... of their influence.

    Lags beyond the last one given have covariance 0.

    >>> round(dependent_error(np.array([1.0, 0.5]), 100), 5)
    0.0199
    """
    c = as_array("covariances", covariances, ndim=1)[:n]
    lag = np.arange(1, len(c))
    return float((c[0] + 2 * ((1 - lag / n) * c[1:]).sum()) / n)


def autocorrelation_time(covariances: Array) -> float:
    """Integrated autocorrelation time τ = 1 + 2 Σ c_r/c_0, by which n tokens are worth n/τ independent ones.

    >>> round(autocorrelation_time(0.8 ** np.arange(200)), 6)  # AR(1): (1 + ρ)/(1 − ρ)
    9.0
    """
    c = as_array("covariances", covariances, ndim=1)
    return float(1 + 2 * c[1:].sum() / c[0])


def block_errors(weights: Array, outputs: Array, sizes: Array) -> Array:
    """Expected squared error (queries, sizes) of attention over m independent blocks of tokens, m in `sizes`.

    `weights` (queries, M) are sums of e^{score} over each of M given blocks, `outputs` (queries, M, v) are attention
    over each block. Merged attention over blocks is attention to blocks with the score log W_b, so this is the exact
    law of m draws with replacement from the M blocks (proved).

    >>> rng = np.random.default_rng(0)
    >>> found = block_errors(rng.lognormal(size=(1, 40)), rng.normal(size=(1, 40, 2)), np.array([4, 16]))
    >>> found.shape, bool(found[0, 0] > found[0, 1])
    ((1, 2), True)
    """
    w, v = as_array("weights", weights, ndim=2), as_array("outputs", outputs, ndim=3)
    if v.shape[:2] != w.shape or w.shape[1] < PARTS:
        given = f"weights have shape {w.shape} and outputs {v.shape}"
        raise InputError(f"{given}; expected (queries, M) and (queries, M, v), M ≥ {PARTS}")
    with np.errstate(divide="ignore"):
        logs = np.log(w)
    found = [pilot_errors(row[None], values, sizes)[0].whole[0] for row, values in zip(logs, v, strict=True)]
    return np.stack(found)
