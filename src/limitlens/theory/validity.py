"""When not to believe a number: intervals beyond the extremes, early slopes, tokens that win their own softmax."""

from math import log

from numpy.typing import ArrayLike

from limitlens.errors import check_number
from limitlens.measures.base import Measure
from limitlens.outcome import Outcome
from limitlens.theory.clt import plug_in_degrees
from limitlens.theory.prediction import WORDS
from limitlens.theory.spectrum import Reach

SAFE_DEGREES = 20.0  # degrees of freedom of the plug-in from which its 95% interval covers 0.93 to 0.97
FEW_DEGREES = 4.0  # observed ones below which an interval has covered less than 0.9 (one-sided laws)


class Validity(Outcome):
    """Whether a plug-in confidence interval may be believed."""

    VALID = "valid"
    DOUBTFUL = "doubtful"
    MEANINGLESS = "meaningless"


def interval_validity(measure: Measure, tilt: ArrayLike, n: float, V: ArrayLike | None = None) -> Validity:
    """Judge the 95% intervals of `clt.plug_in` at one tilt (d,) over n tokens of a law, by its worst direction [V].

    Valid needs `SAFE_DEGREES` of freedom (`clt.plug_in_degrees`). Meaningless is n ≤ e^D, D = KL(μ_2t | μ) =
    2<t, ∇K(2t)> - K(2t): the plug-in is an average under the law tilted by 2t, which n tokens cannot show (Chatterjee
    and Diaconis, 2018). For Gaussian tokens that is τ ≥ √(2 ln n)/2.

    >>> [theory.interval_validity(ll.Gaussian(0.0, 1.0), [tilt], 1000).value for tilt in (0.5, 1.0, 2.0)]
    ['valid', 'doubtful', 'meaningless']
    """
    t, count = measure.check_tilts(tilt), check_number("n", n, "more than one token", low=1, closed=False)
    if log(count) <= float(2 * t @ measure.grad_K(2 * t) - measure.K(2 * t)):
        return Validity.MEANINGLESS
    return Validity.VALID if plug_in_degrees(measure, t, count, V) >= SAFE_DEGREES else Validity.DOUBTFUL


def observed_validity(degrees: float) -> Validity:
    """Judge one interval by the degrees of freedom that its own tokens show (`clt.PlugIn.degrees`) [V].

    It cannot know of a part of the law that the tokens did not show; `interval_validity` does, where the law is known.

    >>> theory.observed_validity(30.0).value, theory.observed_validity(5.0).value
    ('valid', 'doubtful')
    """
    if not degrees >= FEW_DEGREES:
        return Validity.MEANINGLESS
    return Validity.VALID if degrees >= SAFE_DEGREES else Validity.DOUBTFUL


def warnings(reach: Reach, n: float, *, mask_self: bool = False) -> list[str]:
    """One sentence per reason not to read the slopes at n tokens as rates; empty when there is none."""
    log_n, square = log(n), reach.frobenius**2
    found = {"self": reach.self_dominates(n) and not mask_self, "early": reach.is_pre_asymptotic(n)}
    known = {"of": reach, "n": n, "log_n": log_n, "square": square, "most": log_n + square / 2}
    return [WORDS["warnings"][name].format(**known) for name, applies in found.items() if applies]
