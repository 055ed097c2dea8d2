"""The exponent with which attention over n sub-Gaussian tokens approaches its limit: proved, drawn and sharp.

Errors decay like n^{-β}. Two kinds of error have two exponents and must never be compared: the moments of the outputs
(mean and covariance over queries, `rate_sharp`) and the root mean square output error (`rate_sharp_output`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log, sqrt

from limitlens.errors import InputError, check_number
from limitlens.theory.prediction import BOHBOT, DERIVED, Prediction, Status
from limitlens.theory.spectrum import Reach

_nonnegative = partial(check_number, expected="a finite number that is zero or positive")


def rate_proved(coupling: float) -> float:
    """Proved exponent of the moments, 1 / (2 (1 + 32 Ψ)), for sub-Gaussian tokens [P]."""
    return 1.0 / (2.0 * (1.0 + 32.0 * _nonnegative("coupling", coupling)))


def rate_drawn_coupling(coupling: float) -> float:
    """Exponent the literature draws with the coupling, 1 / (2 (1 + Ψ))."""
    return 1.0 / (2.0 * (1.0 + _nonnegative("coupling", coupling)))


def rate_drawn(horizon: float) -> float:
    """Exponent the literature draws with the horizon, 1 / (2 (1 + H²)): a valid bound, not the rate."""
    return 1.0 / (2.0 * (1.0 + _nonnegative("horizon", horizon) ** 2))


def rate_sharp(horizon: float) -> float:
    """Sharp exponent of both moments for Gaussian tokens, min(1/2, 1 / (1 + H²)), in any dimension [V]."""
    return min(0.5, 1.0 / (1.0 + _nonnegative("horizon", horizon) ** 2))


def rate_sharp_output(horizon: float) -> float:
    """Exponent of the root mean square output error over the queries of one sample, min(1/2, 1 / (1 + 2 H²)) [H]."""
    return min(0.5, 1.0 / (1.0 + 2.0 * _nonnegative("horizon", horizon) ** 2))


def rate_rms_output(horizon: float) -> float:
    """Exponent of the output error squared over queries and replicates, min(1/2, (√(1 + 4/H²) - 1) / 4) [V].

    The exact curve (`limitlens.theory.curve.output_error`) has this slope; `rate_sharp_output` is about one typical
    sample, where the rare tokens that carry the second moment are missing.
    """
    h = _nonnegative("horizon", horizon)
    return 0.5 if h**2 <= 0.5 else (sqrt(1.0 + 4.0 / h**2) - 1.0) / 4.0


def rate_rms(horizon: float) -> float:
    """Exponent of the root mean square (over replicates) of the moments, min(1/2, (√(1 + 8/H²) - 1) / 4) [H].

    For H > 1 it is smaller than `rate_sharp`, which is about E|·|: rare replicates carry the second moment.
    """
    h = _nonnegative("horizon", horizon)
    return 0.5 if h <= 1.0 else (sqrt(1.0 + 8.0 / h**2) - 1.0) / 4.0


@dataclass(frozen=True)
class SharpLaw:
    """The sharp law n^{-exponent} (ln n)^{log_power} of a moment error, up to its constant [V]."""

    exponent: float
    log_power: float

    def local_rate(self, n: float) -> float:
        """Local slope -d ln(error) / d ln n = exponent - log_power / ln n at a finite n > 1."""
        return self.exponent - self.log_power / log(check_number("n", n, "more than one token", low=1, closed=False))


def sharp_law(horizon: float, moment: str = "mean") -> SharpLaw:
    """Sharp law of a moment error for Gaussian tokens, its logarithms included.

    The mean error is n^{-1/2} for H < 1, n^{-1/2} (ln n)^{3/4} at H = 1 and (√ln n / n)^{1/(1+H²)} above; from H = 1 on
    the covariance has an extra √ln n.
    """
    if moment not in ("mean", "covariance"):
        raise InputError(f"moment is {moment!r}; expected 'mean' or 'covariance'")
    exponent = rate_sharp(horizon)
    if horizon < 1.0:
        return SharpLaw(exponent, 0.0)
    log_power = 0.75 if horizon == 1.0 else exponent / 2.0
    return SharpLaw(exponent, log_power + (0.5 if moment == "covariance" else 0.0))


def predictions(reach: Reach, *, gaussian: bool = True, compact: bool = False) -> list[Prediction]:
    """Every exponent predicted for a head of the given reach, each with its standing.

    What is verified for `gaussian` tokens is only heuristic for other laws; for `compact` ones, which are bounded,
    every exponent is 1/2 in the end.
    """
    H, coupling = reach.horizon, reach.coupling
    verified = Status.VERIFIED if gaussian else Status.HEURISTIC
    moments = "error of the mean and covariance of the outputs, as E|·| over replicates"
    single = "output error, root mean square over the queries of one sample; not comparable with the moments"
    whole = "output error, root mean square over queries and replicates"
    again = "moments again, as root mean square over replicates instead of E|·|"
    rms, rms_output = "min(1/2, (√(1+8/H²)−1)/4)", "min(1/2, (√(1+4/H²)−1)/4)"
    table = [
        ("rate_proved", rate_proved(coupling), Status.PROVED, "1/(2(1+32Ψ))", BOHBOT, moments),
        ("rate_drawn_coupling", rate_drawn_coupling(coupling), Status.DRAWN, "1/(2(1+Ψ))", BOHBOT, moments),
        ("rate_drawn", rate_drawn(H), Status.DRAWN, "1/(2(1+H²))", BOHBOT, moments),
        ("rate_sharp", rate_sharp(H), verified, "min(1/2, 1/(1+H²))", DERIVED, moments),
        ("rate_sharp_output", rate_sharp_output(H), Status.HEURISTIC, "min(1/2, 1/(1+2H²))", DERIVED, single),
        ("rate_rms_output", rate_rms_output(H), verified, rms_output, DERIVED, whole),
        ("rate_rms", rate_rms(H), Status.HEURISTIC, rms, DERIVED, again),
    ]
    if compact:
        note = "bounded tokens: every error, once n is past the constant of the uniform bound"
        table.append(("rate_compact", 0.5, Status.PROVED, "1/2", BOHBOT, note))
    return [Prediction(*row) for row in table]
