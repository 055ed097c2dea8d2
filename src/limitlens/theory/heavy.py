"""Attention over heavy-tailed tokens: at which tilts t = A x of a query x the infinite-token limit exists.

The weight e^{<t,X>} of Laplace tokens of scale b has a power tail of index α = 1/(b|t|). The output obeys a central
limit theorem for α > 2, converges more slowly for 1 < α < 2, and has no limit for α ≤ 1. Student tokens have none.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.outcome import Outcome
from limitlens.theory.prediction import Prediction, Status
from limitlens.theory.statuses import CLAIMS

STABLE_LAWS = "docs/theory.md; stable laws of index 1/(bt)"
POISSON_DIRICHLET = "Pitman and Yor (1997), Poisson-Dirichlet law of index 1/(bt)"
NO_RATE = Prediction("rate", 0.0, Status.PROVED, "0", "the output has no limit")
_scale = partial(check_number, "the scale", expected="a positive number", closed=False)


class Existence(Outcome):
    """Whether attention at a tilt has an infinite-token limit, and which limit law its error follows."""

    NORMAL = "limit with a central limit theorem", "the output converges like n^(-1/2) with a Gaussian error"
    STABLE = (
        "limit without a central limit theorem",
        "the output converges, more slowly than n^(-1/2), with rare large errors and no valid interval",
    )
    NONE = "no limit", "finitely many tokens keep all the weight and the output follows the extremes of the sample"


def laplace_limit(tilts: ArrayLike, scale: float) -> Array:
    """Infinite-token attention output 2b²t_i / (1 - b²t_i²) for Laplace tokens of `scale` b, at tilts |t_i| < 1/b."""
    t = as_array("tilts", tilts)
    product = (_scale(scale) * t) ** 2
    if (product >= 1).any():
        exists = f"the limit of Laplace tokens exists only below 1/b = {1 / scale:.4g}"
        raise InputError(f"a tilt has a coordinate of {np.abs(t).max():.4g}; {exists}, so scale tokens or scores down")
    return np.asarray(2 * scale**2 * t / (1 - product))


@dataclass(frozen=True)
class HeavyLaw:
    """Existence of the infinite-token limit, and predictions, for attention over heavy-tailed tokens at one tilt."""

    existence: Existence
    predictions: tuple[Prediction, ...]  # rate, participation (limit of E Σw²), growth (exponent or logarithmic slope)


def laplace_law(tilt: float, scale: float) -> HeavyLaw:
    """Predict the behaviour of attention over one-dimensional Laplace tokens of scale b at the tilt t = A x ≥ 0.

    - b t < 1/2: converges like n^{-1/2} (proved, by the central limit theorem; the other cases are verified).
    - 1/2 < b t < 1: converges like n^{-(1 - bt)} ln n, by the stable law of index 1/(bt) of the weights.
    - b t > 1: no limit; E Σw² → 1 - 1/(bt) (Poisson-Dirichlet weights) and the output grows like b ln n.
    - b t = 1: no limit; the output grows like (b/2) ln n.
    """
    product = _scale(scale) * check_number("the tilt", tilt, "a number that is zero or positive")
    if product < 1:
        rate, note = min(0.5, 1 - product), "of the output at the tilt"
        predictions = (
            Prediction("rate", rate, CLAIMS["laplace.rate"].at(product < 0.5), "min(1/2, 1−bt)", note, STABLE_LAWS),
            Prediction("participation", 0.0, Status.PROVED, "0", "the largest weight vanishes", POISSON_DIRICHLET),
            Prediction("growth", 0.0, Status.PROVED, "0", "the output converges"),
        )
        return HeavyLaw(Existence.NORMAL if product < 0.5 else Existence.STABLE, predictions)
    status, formula = CLAIMS["laplace.participation"].at(False), "1−1/(bt)"
    share = Prediction("participation", 1 - 1 / product, status, formula, "limit of E Σw²", POISSON_DIRICHLET)
    slope, formula = (float(scale), "b") if product > 1 else (float(scale) / 2, "b/2")
    growth = Prediction("growth", slope, CLAIMS["laplace.growth"].status, formula, "output per unit of ln n")
    return HeavyLaw(Existence.NONE, (NO_RATE, share, growth))


def student_law(degrees: float) -> HeavyLaw:
    """Student tokens have no attention limit at tilts but zero: one token, of order n^{1/ν}, takes all the weight."""
    freedom = check_number("degrees", degrees, "0.1 degrees of freedom or more", low=0.1)
    note = "limit of E Σw²: the largest token has all the weight"
    share = Prediction("participation", 1.0, CLAIMS["student"].status, "1", note)
    growth = Prediction("growth", 1.0 / freedom, CLAIMS["student"].status, "1/ν", "exponent of n in the output")
    return HeavyLaw(Existence.NONE, (NO_RATE, share, growth))
