"""Multiple testing: p-values of differences, and Holm's correction for several comparisons at once."""

from collections.abc import Sequence

from scipy import special


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
