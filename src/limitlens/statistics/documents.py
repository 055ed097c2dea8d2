"""Means over documents, with standard errors from the variation between documents, and p-values of differences."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from limitlens.errors import Array
from limitlens.estimate import Estimate

Statistic = Callable[[Array], Array]  # a function of means over documents


def paired_mean(values: Array, baseline: Array | None = None) -> Estimate:
    """Mean over documents of values (n,), or of their differences to a baseline (n,); standard error NaN if n = 1."""
    difference = values if baseline is None else values - baseline
    stderr = float(difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else float("nan")
    return Estimate(float(difference.mean()), stderr)


def over_documents(statistic: Statistic, values: Array) -> tuple[Array, Array]:
    """Apply `statistic` to the means over documents of values (documents, ...); returns it and its jackknife error."""
    count = len(values)
    total = values.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0/0, an error relative to nothing, is NaN
        without_each = np.stack([statistic((total - one) / (count - 1)) for one in values])
        return statistic(total / count), jackknife(without_each, 0)


def jackknife(without_each: Array, axis: int) -> Array:
    """Jackknife standard error of a statistic, from its n values along `axis`, each computed without one document."""
    return np.asarray(np.sqrt((without_each.shape[axis] - 1) * without_each.var(axis)))


def p_value(difference: float, stderr: float, freedom: float) -> float:
    """Two-sided p-value by Student's t of a difference whose standard error has `freedom` degrees of freedom."""
    if not stderr > 0:
        return float(difference == 0)
    return float(2 * special.stdtr(freedom, -abs(difference) / stderr))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979), which bound the probability of any false rejection among all tests (proved)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        adjusted[place] = highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
    return adjusted
