"""Several comparisons at once: how likely chance alone would show what each of them shows."""

from collections.abc import Sequence

from scipy import special


def chance(difference: float, stderr: float, freedom: float) -> float:
    """The probability that chance alone gives a difference as large on either side, by Student's law."""
    if not stderr > 0:
        return float(difference == 0)
    return float(2 * special.stdtr(freedom, -abs(difference) / stderr))


def holm(chances: Sequence[float]) -> list[float]:
    """Probabilities such that chance puts any one of them below a level at most so often (Holm 1979: proved).

    The k-th smallest of m is multiplied by m − k + 1, and is at least as large as those before it.
    """
    found, highest = [0.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        found[place] = highest = max(highest, min(1.0, (len(chances) - rank) * chances[place]))
    return found
