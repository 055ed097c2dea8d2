"""When not to believe a number: intervals beyond the extremes, early slopes, tokens that win their own softmax."""

from __future__ import annotations

from math import log, sqrt

from limitlens.errors import InputError, check_number
from limitlens.outcome import Outcome
from limitlens.theory.spectrum import Reach

SAFE_TILT = 0.2  # largest τ/√(2 ln n) at which the plug-in 95% interval keeps a coverage of 0.93 (Gaussian tokens)
SAFE_SHAPE = 0.25  # largest Pareto shape k̂ of the weights without a warning (0.29 on average where coverage is 0.92)
BROKEN_SHAPE = 0.7  # Pareto shape k̂ above which the interval is meaningless
BROKEN_TILT = 0.5  # τ/√(2 ln n) above which the error at a Gaussian tilt stops following n^(-1/2)


class Validity(Outcome):
    """Whether a plug-in confidence interval may be believed."""

    VALID = ("valid", "the interval covers about as often as it says")
    DOUBTFUL = (
        "doubtful",
        "the interval is too short: a 95% interval may cover less than 93% of the time",
        "use more tokens, or read the interval as a lower bound of the uncertainty",
    )
    MEANINGLESS = (
        "meaningless",
        "a few tokens carry the output and tokens not yet seen would carry it elsewhere",
        "do not use the interval; use many more tokens or a higher temperature",
    )


def tilt_ratio(tilt: float, n: float) -> float:
    """τ/√(2 ln n): how far into the sample's own extremes a query of tilt τ reaches."""
    if not tilt >= 0:  # it may be infinite
        raise InputError(f"the tilt is {tilt}; expected a length that is zero or positive")
    return float(tilt) / sqrt(2 * log(check_number("n", n, "more than one token", low=1, closed=False)))


def interval_validity(n: float, *, tilt: float | None = None, pareto_k: float | None = None) -> Validity:
    """Judge the plug-in interval of one query from its tilt, from the Pareto shape of its weights, or from both.

    The worse of the two judgements counts. The effective sample size observed, 1/Σw², takes no part: it looks healthy
    exactly when the tokens that matter have not been seen. The tilt τ is the standard deviation of the query's scores
    over the tokens, `pareto_k` the shape k̂ of its weights (`limitlens.statistics.tails.pareto_shape`).
    """
    if tilt is None and pareto_k is None:
        raise InputError("neither tilt nor pareto_k was given; expected at least one of them")
    by_tilt = [] if tilt is None else [(tilt_ratio(tilt, n), SAFE_TILT, BROKEN_TILT)]
    by_shape = [] if pareto_k is None else [(pareto_k, SAFE_SHAPE, BROKEN_SHAPE)]
    # 0 for valid, 1 for doubtful, 2 for meaningless
    levels = [int(not value < safe) + int(value >= broken) for value, safe, broken in by_tilt + by_shape]
    return list(Validity)[max(levels)]


def is_pre_asymptotic(reach: Reach, n: float) -> bool:
    """Whether n is too small for the exponents to show: they need ln n well above ‖B‖_F² [V]."""
    return log(n) < reach.frobenius**2


def self_dominates(reach: Reach, n: float) -> bool:
    """Whether a token wins its own softmax: tr B > ln n + ‖B‖_F²/2 [V]."""
    return reach.trace > log(n) + reach.frobenius**2 / 2


def warnings(reach: Reach, n: float, *, mask_self: bool = False) -> list[str]:
    """One sentence per reason not to read the slopes at n tokens as rates; empty when there is none."""
    messages = []
    if self_dominates(reach, n) and not mask_self:
        messages.append(
            f"each token wins its own softmax at n = {n:.3g}, because its score with itself, about tr B = "
            f"{reach.trace:.3g}, exceeds ln n + ‖B‖_F²/2 = {log(n) + reach.frobenius**2 / 2:.3g}; outputs copy their "
            "queries and slopes mean nothing, so pass mask_self=True to leave the token out"
        )
    if is_pre_asymptotic(reach, n):
        messages.append(
            f"pre-asymptotic at n = {n:.3g}: ln n = {log(n):.3g} is below ‖B‖_F² = {reach.frobenius**2:.3g}, so the "
            "local slope is not yet the exponent"
        )
    return messages
