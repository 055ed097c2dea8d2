"""Means over documents with standard errors from the scatter between documents, and tests of several differences."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from limitlens.errors import Array
from limitlens.estimate import Estimate

Statistic = Callable[[Array], Array]  # a function of means over documents


def paired_mean(values: Array, baseline: Array | None = None) -> Estimate:
    """Mean over documents (n,), or mean of the paired differences to a baseline; one document has no standard error."""
    difference = values if baseline is None else values - baseline
    stderr = float(difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else float("nan")
    return Estimate(float(difference.mean()), stderr)


def over_documents(statistic: Statistic, values: Array) -> tuple[Array, Array]:
    """A function of the means of values (documents, ...) and its jackknife standard error."""
    count = len(values)
    total = values.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0/0, an error relative to nothing, is NaN
        without_each = np.stack([statistic((total - one) / (count - 1)) for one in values])
        return statistic(total / count), jackknife(without_each, 0)


def jackknife(without_each: Array, axis: int) -> Array:
    """Standard error of a number from its n values that each leave out one document: √((n − 1) · their variance)."""
    return np.asarray(np.sqrt((without_each.shape[axis] - 1) * without_each.var(axis)))


def p_value(difference: float, stderr: float, freedom: float) -> float:
    """Two-sided p-value of a difference with a standard error of so many degrees of freedom, by Student's t."""
    if not stderr > 0:
        return float(difference == 0)
    return float(2 * special.stdtr(freedom, -abs(difference) / stderr))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the probability that any true null hypothesis falls below a level is at most the level.

    The k-th smallest of m is multiplied by m − k + 1, and is at least as large as those before it (Holm 1979: proved).
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        adjusted[place] = highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
    return adjusted
