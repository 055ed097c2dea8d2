"""Dependence of consecutive tokens: variance of batch means, a spectral estimate, and a test for a plateau of n·Var(n).

The influence of tokens is given as sums over consecutive blocks of each of R contexts, for several queries. A context
has k blocks of b tokens. n·Var(n) is estimated from batches of n = b, 2b, 4b, ..., kb tokens (batch means), and its
limit σ²τ also from the covariances between blocks with Bartlett's weights (spectral density at frequency 0). Both have
jackknife errors over contexts. If n·Var(n) still grows at the largest n there is no τ: long memory up to that n.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from limitlens.arrays import Tensor, library, to_numpy
from limitlens.errors import Array
from limitlens.statistics.bootstrap import ENDS
from limitlens.statistics.documents import jackknife

PLATEAU, LONG = "plateau", "long memory"
LAST = 4  # sizes, in factors of two, over which n·Var(n) must be flat
STEEP = 0.1  # exponent of n with which n·Var(n) may grow on a plateau, since it comes near its limit from below


@dataclass(frozen=True, eq=False)
class Memory:
    """How the influence of consecutive tokens is correlated: autocorrelation time, and whether there is one."""

    verdict: str  # `PLATEAU` or `LONG`
    growth: float  # exponent of n with which n·Var(n) grows over the last sizes
    growth_stderr: float
    time: float  # n·Var(n)/σ² at the largest n: the autocorrelation time τ on a plateau, else a lower bound
    low: float  # ends of the 95% interval of `time`
    high: float
    spectral: float  # the same by Bartlett's estimate, within less than a context

    def document(self) -> dict[str, object]:
        """The autocorrelation time as JSON shows it: no value, but a lower bound, where the memory is long."""
        flat = self.verdict == PLATEAU
        known = {"value": self.time if flat else None, "interval": (self.low, self.high) if flat else (None, None)}
        more = {"spectral": self.spectral if flat else None, "at_least": None if flat else self.time}
        return {**known, **more, "memory": self.verdict, "growth": self.growth, "growth_stderr": self.growth_stderr}


def block_products(sums: Array | Tensor) -> Array:
    """Products (R, k, k) of the sums (queries, R, k, v) of two blocks of a context, summed over queries and values.

    The mean over contexts is removed for each query and block, since the law of a token may depend on its distance.
    """
    count = sums.shape[1]
    centred = (sums - sums.mean(1, keepdims=True)) * math.sqrt(count / max(count - 1, 1))  # type: ignore[call-overload]
    return to_numpy(library(sums).einsum("qrbv,qrcv->rbc", centred, centred))[0]


def batch_variances(products: Array) -> tuple[Array, Array]:
    """n·Var(n) of batches of 1, 2, 4, ... blocks, and covariances at lags 0, 1, ... blocks, per block, of each context.

    `products` are those of `block_products`; both results, (R, ·), add the squares over queries.
    """
    count, blocks = products.shape[:2]
    variances = []
    for size in 2 ** np.arange(int(math.log2(blocks)) + 1):
        whole = blocks - blocks % size
        parts = products[:, :whole, :whole].reshape(count, whole // size, size, whole // size, size).sum((2, 4))
        variances.append(np.trace(parts, axis1=1, axis2=2) / whole)
    lags = [np.trace(products, lag, axis1=1, axis2=2) / blocks for lag in range(blocks)]
    return np.stack(variances, 1), np.stack(lags, 1)


def memory(products: Array, squares: Array) -> Memory:
    """Memory of one head from the products of its blocks (R, k, k), and sums of squares (queries, R).

    `squares` are sums over all tokens of a context of |h|²; their mean is the variance of independent tokens.
    """
    blocks = products.shape[1]
    variances, lags = batch_variances(products)
    single = squares.sum(0) / blocks  # per block, like the variances
    reach = max(blocks // 2, 1)
    bartlett = lags[:, 0] + 2 * (lags[:, 1:reach] * (1 - np.arange(1, reach) / reach)).sum(1)
    rows = np.column_stack((variances, single, bartlett))
    last = min(LAST, variances.shape[1])
    x = np.log(2.0) * (np.arange(last) - (last - 1) / 2)

    def statistics(mean: Array) -> Array:
        logs = np.log(np.maximum(mean, np.finfo(float).tiny))
        flat = logs[: variances.shape[1]]
        return np.array([flat[-last:] @ x / max(x @ x, 1e-9), flat[-1] - logs[-2], logs[-1] - logs[-2]])

    count = len(rows)
    growth, time, spectral = statistics(rows.mean(0)).tolist()
    errors = jackknife(np.stack([statistics(np.delete(rows, r, 0).mean(0)) for r in range(count)]), 0)
    width = float(special.stdtrit(max(count - 1, 1), ENDS[1]))
    grows = growth > STEEP and growth > width * errors[0]
    low, high = (math.exp(time + sign * width * errors[1]) for sign in (-1, 1))
    verdict = LONG if grows else PLATEAU
    return Memory(verdict, growth, float(errors[0]), math.exp(time), low, high, math.exp(spectral))
