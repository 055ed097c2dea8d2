"""The exponent with which attention over n sub-Gaussian tokens approaches its limit: proved, drawn and sharp.

Errors decay like n^{-β}. Two kinds of error have two exponents and must never be compared: the moments of the outputs
(mean and covariance over queries, `rate_sharp`) and the root mean square output error (`rate_sharp_output`).
"""

from dataclasses import dataclass
from functools import partial
from math import log, sqrt

from limitlens.errors import InputError, check_number
from limitlens.theory.prediction import Prediction, Status
from limitlens.theory.spectrum import Reach

_nonnegative = partial(check_number, expected="a finite number that is zero or positive")


# ‖B‖_F up to which the law of the mean error beyond d = 1 was held against simulations: measured over predicted is 0.92
# to 1.00 there for n from 300 on, and 0.45 to 0.61 at d = 16, H = 0.69, where ‖B‖_F is 2.8, for n = 300 to 10,000.
VERIFIED_FROBENIUS = 1.0
SLOPES_FROM = 1e6  # n from which local slopes were: at H = 1.5 and n = 1e4 the slope is .334 where the law says .291


def rate_proved(coupling: float) -> float:
    """Proved exponent of the moments, 1 / (2 (1 + 32 Ψ)), Ψ of a variance proxy of the tokens (`theory.proxy`) [P].

    >>> round(theory.rate_proved(1.0), 4)
    0.0152
    """
    return 1.0 / (2.0 * (1.0 + 32.0 * _nonnegative("coupling", coupling)))


def rate_drawn_coupling(coupling: float) -> float:
    """Exponent the literature draws with the coupling, 1 / (2 (1 + Ψ)).

    >>> theory.rate_drawn_coupling(1.0)
    0.25
    """
    return 1.0 / (2.0 * (1.0 + _nonnegative("coupling", coupling)))


def rate_drawn(horizon: float) -> float:
    """Exponent the literature draws with the horizon, 1 / (2 (1 + H²)): a valid bound, not the rate.

    >>> round(theory.rate_drawn(1.5), 4)
    0.1538
    """
    return 1.0 / (2.0 * (1.0 + _nonnegative("horizon", horizon) ** 2))


def rate_sharp(horizon: float) -> float:
    """Sharp exponent of both moments for Gaussian tokens, min(1/2, 1 / (1 + H²)) [V in d = 1, H beyond].

    >>> theory.rate_sharp(0.5), round(theory.rate_sharp(1.5), 4)
    (0.5, 0.3077)
    """
    return min(0.5, 1.0 / (1.0 + _nonnegative("horizon", horizon) ** 2))


def rate_sharp_output(horizon: float) -> float:
    """Exponent of the root mean square output error over the queries of one sample, min(1/2, 1 / (1 + 2 H²)) [H].

    >>> round(theory.rate_sharp_output(1.5), 4)
    0.1818
    """
    return min(0.5, 1.0 / (1.0 + 2.0 * _nonnegative("horizon", horizon) ** 2))


def rate_rms_output(horizon: float) -> float:
    """Exponent of the output error squared over queries and replicates, min(1/2, (√(1 + 4/H²) - 1) / 4) [V].

    The exact curve (`limitlens.theory.curve.output_error`) has this slope; `rate_sharp_output` is about one typical
    sample, where the rare tokens that carry the second moment are missing.

    >>> round(theory.rate_rms_output(1.5), 4)
    0.1667
    """
    h = _nonnegative("horizon", horizon)
    return 0.5 if h**2 <= 0.5 else (sqrt(1.0 + 4.0 / h**2) - 1.0) / 4.0


def rate_rms(horizon: float) -> float:
    """Exponent of the root mean square (over replicates) of the moments, min(1/2, (√(1 + 8/H²) - 1) / 4) [H].

    For H > 1 it is smaller than `rate_sharp`, which is about E|·|: rare replicates carry the second moment.

    >>> round(theory.rate_rms(1.5), 4)
    0.2836
    """
    h = _nonnegative("horizon", horizon)
    return 0.5 if h <= 1.0 else (sqrt(1.0 + 8.0 / h**2) - 1.0) / 4.0


@dataclass(frozen=True)
class SharpLaw:
    """The sharp law n^{-exponent} (ln n)^{log_power} of a moment error, up to its constant."""

    exponent: float
    log_power: float

    def local_rate(self, n: float) -> float:
        """Local slope -d ln(error) / d ln n = exponent - log_power / ln n at a finite n > 1."""
        return self.exponent - self.log_power / log(check_number("n", n, "more than one token", low=1, closed=False))


def sharp_law(horizon: float, moment: str = "mean", multiplicity: int = 1) -> SharpLaw:
    """Sharp law of a moment error for Gaussian tokens, its logarithms included [V in d = 1, H beyond].

    The mean error is n^{-1/2} for H < 1, n^{-1/2} (ln n)^{3/4} at H = 1 and (√ln n / n)^{1/(1+H²)} above; from H = 1 on
    the covariance has an extra √ln n. Where the top singular value of B occurs m times (`multiplicity`), as in a flat
    spectrum, the power of ln n in the mean is (α+m-2)/(2α) above, α = 1 + 1/H², and (m+2)/4 at H = 1.

    >>> law = theory.sharp_law(1.5)
    >>> round(law.exponent, 4), round(law.log_power, 4)
    (0.3077, 0.1538)
    """
    if moment not in ("mean", "covariance"):
        raise InputError(f"moment is {moment!r}; expected 'mean' or 'covariance'")
    m = check_number("multiplicity", multiplicity, "how often the top singular value occurs, at least once", low=1)
    exponent = rate_sharp(horizon)
    if horizon < 1.0:
        return SharpLaw(exponent, 0.0)
    index = 1 + 1 / horizon**2
    log_power = (m + 2) / 4 if horizon == 1.0 else (index + m - 2) / (2 * index)
    return SharpLaw(exponent, log_power + (0.5 if moment == "covariance" else 0.0))


def moments_verified(reach: Reach) -> bool:
    """Whether the laws of the moments of Gaussian tokens were held against simulations: d = 1, or a small ‖B‖_F."""
    return reach.dim == 1 or reach.frobenius <= VERIFIED_FROBENIUS + 1e-9


def predictions(
    reach: Reach, *, gaussian: bool = True, compact: bool = False, proxy_coupling: float | None = None
) -> list[Prediction]:
    """Every exponent predicted for a head of the given reach, each with its standing.

    What is verified for `gaussian` tokens is only heuristic for other laws; for `compact` ones, which are bounded,
    every exponent is 1/2 in the end. `proxy_coupling` is the Ψ of a variance proxy of tokens that are not Gaussian:
    without one nothing is proved of them.

    >>> told = theory.predictions(theory.reach([[1.0]], [[1.5]]))
    >>> [(one.name, round(one.value, 4), one.status.value) for one in told][:2]
    [('rate_proved', 0.0068, 'proved'), ('rate_drawn_coupling', 0.1538, 'drawn')]
    """
    H, coupling, heuristic = reach.horizon, reach.coupling, Status.HEURISTIC
    known = coupling if proxy_coupling is None and gaussian else proxy_coupling
    verified = Status.VERIFIED if gaussian else heuristic
    way = "" if known == coupling else "not proved" if known is None else "by a proxy"
    of = partial(Prediction.of, proxy=known, verified=VERIFIED_FROBENIUS, frobenius=reach.frobenius)
    proved, sharp = rate_proved(coupling if known is None else known), "beyond d = 1" if reach.dim > 1 else ""
    found = [
        of("rate_proved", proved, heuristic if known is None else Status.PROVED, way),
        of("rate_drawn_coupling", rate_drawn_coupling(coupling), Status.DRAWN),
        of("rate_drawn", rate_drawn(H), Status.DRAWN),
        of("rate_sharp", rate_sharp(H), verified if moments_verified(reach) else heuristic, sharp),
        of("rate_sharp_output", rate_sharp_output(H), heuristic),
        of("rate_rms_output", rate_rms_output(H), verified),
        of("rate_rms", rate_rms(H), heuristic),
    ]
    return [*found, of("rate_compact", 0.5, Status.PROVED)] if compact else found
