"""Tokens with heavier tails than sub-Gaussian: where the infinite-token limit exists, and what replaces it beyond.

The weight e^{<t,X>} of a token decides. For Laplace tokens it has a power tail of index α = 1/(b|t|), so attention
passes through three laws as the tilt grows: central limit (α > 2), a limit approached at a stable rate (1 < α < 2), and
no limit (α ≤ 1), where finitely many tokens share the weight. For Student tokens every tilt is beyond the last.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.outcome import Outcome
from limitlens.theory.prediction import Prediction, Status

NO_RATE = Prediction.of("rate", 0.0, Status.PROVED, "no limit")
_scale = partial(check_number, "the scale", expected="a positive number", closed=False)


class Existence(Outcome):
    """What attention over infinitely many tokens is at a tilt."""

    NORMAL = ("limit with a central limit theorem", "the output converges like n^(-1/2) with a Gaussian error")
    STABLE = (
        "limit without a central limit theorem",
        "the output converges, more slowly than n^(-1/2), with rare large errors and no valid interval",
    )
    NONE = ("no limit", "finitely many tokens keep all the weight and the output follows the extremes of the sample")


def laplace_K(tilts: ArrayLike, scale: float) -> Array:
    """K(t) = -Σ_i log(1 - b² t_i²) of independent Laplace coordinates of scale b; +inf where some |t_i| ≥ 1/b.

    Tilts (..., d) to values (...); a coordinate has variance 2 b².

    >>> theory.laplace_K([[0.5], [2.0]], scale=1.0).round(4).tolist()
    [0.2877, inf]
    """
    product = (_scale(scale) * as_array("tilts", tilts)) ** 2
    inside = (product < 1).all(-1)
    terms = -np.log1p(-np.where(product < 1, product, 0.0))
    return np.where(inside, terms.sum(-1), np.inf)


def laplace_limit(tilts: ArrayLike, scale: float) -> Array:
    """Γ = ∇K(t), coordinates 2b² t_i / (1 - b² t_i²), where every |t_i| < 1/b: (..., d) to (..., d).

    >>> theory.laplace_limit([[0.5]], scale=1.0).round(4).tolist()
    [[1.3333]]
    """
    t = as_array("tilts", tilts)
    product = (_scale(scale) * t) ** 2
    if (product >= 1).any():
        raise InputError(
            f"a tilt has a coordinate of {np.abs(t).max():.4g}; the limit of Laplace tokens exists only below "
            f"1/b = {1 / scale:.4g}, so scale the tokens or the scores down"
        )
    return np.asarray(2 * scale**2 * t / (1 - product))


@dataclass(frozen=True)
class HeavyLaw:
    """What attention over heavy-tailed tokens does at one tilt."""

    existence: Existence
    predictions: tuple[Prediction, ...]  # rate, participation (limit of E Σw²), growth (exponent or logarithmic slope)


def laplace_law(tilt: float, scale: float) -> HeavyLaw:
    """Attention over one-dimensional Laplace tokens of scale b at the tilt t ≥ 0.

    - b t < 1/2: rate n^{-1/2}.
    - 1/2 < b t < 1: rate n^{-(1 - bt)} ln n, from the stable law of index α = 1/(bt) of the weights.
    - b t > 1: no limit; E Σw² → 1 - 1/(bt) (Poisson-Dirichlet weights) and the output grows like b ln n.
    - b t = 1: no limit either; every height up to b ln n carries as much weight, so the output grows like (b/2) ln n.

    >>> theory.laplace_law(0.4, 1.0).existence.value, theory.laplace_law(2.0, 1.0).existence.value
    ('limit with a central limit theorem', 'no limit')
    """
    product = _scale(scale) * check_number("the tilt", tilt, "a number that is zero or positive")
    if product < 1:
        rate = Prediction.of("rate", min(0.5, 1 - product), Status.VERIFIED)
        none = (Prediction.of(name, 0.0, Status.PROVED) for name in ("participation", "growth"))
        return HeavyLaw(Existence.NORMAL if product < 0.5 else Existence.STABLE, (rate, *none))
    share = Prediction.of("participation", 1 - 1 / product, Status.VERIFIED, "no limit")
    slope, way = (float(scale), "no limit") if product > 1 else (float(scale) / 2, "at bt = 1")
    return HeavyLaw(Existence.NONE, (NO_RATE, share, Prediction.of("growth", slope, Status.VERIFIED, way)))


def student_law(degrees: float) -> HeavyLaw:
    """Attention over Student tokens with ν degrees of freedom, at any tilt but zero: no limit, hardmax in disguise.

    K(t) is infinite for t ≠ 0. The largest token is of order n^{1/ν} and leads the second by as much, so its weight
    tends to 1 and the output grows like n^{1/ν}.

    >>> theory.student_law(3.0).existence.value
    'no limit'
    """
    freedom = check_number("degrees", degrees, "0.1 degrees of freedom or more", low=0.1)
    known = {"participation": 1.0, "growth": 1.0 / freedom}
    found = [Prediction.of(name, value, Status.VERIFIED, "student") for name, value in known.items()]
    return HeavyLaw(Existence.NONE, (NO_RATE, *found))
