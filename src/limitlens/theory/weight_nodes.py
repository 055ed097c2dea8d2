"""Grid of softmax weights (nodes) and quadrature points s at which `exact_bootstrap` evaluates e^{−sW}.

Both are stored as logarithms, and sums at a node are relative to its weight, so that no range of weights overflows. M
is the number of tokens, m of queries; `xp` is NumPy or torch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array

STEP = 0.8  # step of log s: the trapezoidal rule is within 3e-4 of that with a step of 0.1
GAP = 0.125  # spacing of the logarithms of the nodes: squared errors are within 3e-3
SMALLEST_S = 0.02  # the first point s is this over the largest n; the integrand is negligible below
WIDE_RANGE = 100.0  # range of the nodes from which on `close_gaps` is applied
MAX_GAP = 30.0  # a token e^30 times heavier than the next one is the whole output of every sample that contains it
MAX_RANGE = 400.0  # log-weights further below the largest are raised to this after closing gaps, which bounds the cost
MAX_EXPONENT = 300.0  # largest logarithm of s and of s W: e^{−sW} is zero there
RARE = 1e-8  # probability that no token of the smallest sample is heavier than 3/s, at the last s

# The lightest tokens share a node: below the FAINT_SHARE quantile of the weights, less FAINT_MARGIN as a logarithm,
# e^{−sW} is linear in W to 1e-5. SUBSAMPLE tokens locate that quantile, if at least MIN_FAINT of them are below it.
FAINT_SHARE, FAINT_MARGIN = 0.1, 1.5
SUBSAMPLE, MIN_FAINT = 512, 16


def close_gaps(logs: NDArray[Any], atom: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Log-weights (M, m), and of `atom` (m,), with gaps between neighbours cut to `MAX_GAP`; error M e^{−MAX_GAP}."""
    rows = logs if atom is None else np.vstack((logs, atom))
    order = np.argsort(-rows, axis=0)
    falling = np.take_along_axis(rows, order, 0)
    gaps = np.subtract(falling[:-1], falling[1:], where=np.isfinite(falling[1:]), out=np.zeros_like(falling[1:]))
    closed = np.vstack((falling[:1], falling[:1] - np.minimum(gaps, MAX_GAP).cumsum(0)))
    closed[~np.isfinite(falling)] = -np.inf
    result = np.empty_like(rows)
    np.put_along_axis(result, order, closed, 0)
    result -= result[: len(logs)].max(0)
    tokens = result[: len(logs)]
    np.maximum(tokens, -MAX_RANGE, out=tokens, where=np.isfinite(tokens))
    return tokens, None if atom is None else result[-1]


def nodes(low: float, high: float) -> tuple[Array, float]:
    """Log-weights (K,) of the grid: −∞ for hidden tokens, then `low` to `high`; and the value a GAP below the first."""
    first = np.floor(low / GAP) * GAP
    return np.concatenate(([-np.inf], first + GAP * np.arange(int((high - first) / GAP) + 3))), float(first - GAP)


def lightest_share(n: Array) -> float:
    """Fraction p such that the smallest sample holds only tokens of the lightest fraction p with probability `RARE`."""
    return float(RARE ** (1 / n.min()))


def points(n: Array, lightest: float) -> Array:
    """Logarithms (S,) of the quadrature points s for sizes n; `lightest` is the log-weight at `lightest_share`."""
    start = np.log(SMALLEST_S / n.max())
    return np.arange(start, max(start + 12, np.log(3) - lightest) + STEP, STEP)


def scaled_weights(xp: Any, log_s: Any, node: Any) -> tuple[Any, Any]:
    """Products s W of points `log_s` (S, 1) and grid weights (K,), and s times `unit_logs` weights: both (S, K)."""
    relative = xp.exp((log_s + unit_logs(xp, node)).clip(None, MAX_EXPONENT))
    return xp.where(xp.isfinite(node), relative, xp.zeros_like(relative)), relative


def unit_logs(xp: Any, node: Any) -> Any:
    """Log-weights (K,) that sums at each grid weight are relative to: its own, and for the first that of the second."""
    return xp.concatenate((node[1:2], node[1:]))


def powers(xp: Any, log_s: Any, node: Any) -> tuple[Any, Any]:
    """Factors s W e and s² W² e of the integrand, e = e^{−sW}, at points `log_s` (S, 1) and grid weights (K,): (S, K).

    For s < 1 the first uses e − 1 in place of e, which leaves sums of centred values unchanged and cancels less.
    """
    at, relative = scaled_weights(xp, log_s, node)
    lost = xp.expm1(-at)
    return relative * xp.where(log_s < 0, lost, 1 + lost), relative * at * (1 + lost)


def lowest_log(logs: Array, n: Array) -> float:
    """Log-weight at which the grid begins, for log-weights `logs` (M, m) and sizes n; lighter tokens share one node."""
    low = logs.min()
    low = low if np.isfinite(low) else logs[np.isfinite(logs)].min()
    some = logs[:: max(1, len(logs) // SUBSAMPLE)]
    faint = int(min(lightest_share(n), FAINT_SHARE) * len(some))
    if faint >= MIN_FAINT:
        low = max(low, np.partition(some, faint, 0)[faint].min() - FAINT_MARGIN)
    return float(low)


def split(logs: Array, node: Array, first: float) -> tuple[NDArray[np.int64], Array, Array]:
    """Index of the grid weight w below each token (M, m), its weight W/w, and its share in the next grid weight.

    The share is (W/w − 1)/(e^GAP − 1) between w and w e^GAP, and W/w between 0 and w. `logs` is overwritten.
    """
    index = np.maximum((logs - first) * (1 / GAP), 0).astype(np.int64)
    logs -= unit_logs(np, node).astype(logs.dtype).take(index)
    ratio = np.exp(logs, out=logs)
    upper = ratio - (index > 0)
    upper *= np.where(index > 0, 1 / np.expm1(GAP), 1).astype(logs.dtype)
    return index, ratio, np.maximum(upper, 0, out=upper)
