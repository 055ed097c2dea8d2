"""Exponents β of the decay n^{-β} of attention's error over n sub-Gaussian tokens: proved, drawn and sharp.

Two kinds of error have different exponents and must not be compared: the error of the moments of the outputs (mean and
covariance over queries, `rate_sharp`) and the root mean square output error (`rate_sharp_output`).
"""

from dataclasses import dataclass
from math import log, sqrt

from limitlens.errors import InputError, check_number
from limitlens.theory._inputs import check_nonnegative
from limitlens.theory.prediction import BOHBOT, Prediction, Status
from limitlens.theory.spectrum import Reach

# Largest ‖B‖_F at which simulations in d > 1 confirm the law of the mean error: measured over predicted is 0.92 to 1.00
# there for n from 300 on, and 0.45 to 0.61 at d = 16, H = 0.69, where ‖B‖_F is 2.8, for n = 300 to 10,000.
VERIFIED_FROBENIUS = 1.0
# Smallest n at which simulations confirm local slopes: at H = 1.5, n = 1e4 the slope is .334 and the law says .291.
SLOPES_FROM = 1e6


def rate_proved(coupling: float) -> float:
    """Proved exponent of the moments, 1 / (2 (1 + 32 Ψ)), with Ψ of a variance proxy of the tokens [P].

    >>> round(theory.rate_proved(1.0), 4)
    0.0152
    """
    return 1.0 / (2.0 * (1.0 + 32.0 * check_nonnegative("coupling", coupling)))


def rate_drawn_coupling(coupling: float) -> float:
    """Exponent that the literature draws from the coupling Ψ, 1 / (2 (1 + Ψ)).

    >>> theory.rate_drawn_coupling(1.0)
    0.25
    """
    return 1.0 / (2.0 * (1.0 + check_nonnegative("coupling", coupling)))


def rate_drawn(horizon: float) -> float:
    """Exponent that the literature draws from the horizon H, 1 / (2 (1 + H²)): a valid bound, not the rate.

    >>> round(theory.rate_drawn(1.5), 4)
    0.1538
    """
    return 1.0 / (2.0 * (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp(horizon: float) -> float:
    """Sharp exponent of both moments for Gaussian tokens, min(1/2, 1 / (1 + H²)) [V in d = 1, H in d > 1].

    >>> theory.rate_sharp(0.5), round(theory.rate_sharp(1.5), 4)
    (0.5, 0.3077)
    """
    return min(0.5, 1.0 / (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp_output(horizon: float) -> float:
    """Exponent of the root mean square output error over the queries of one sample, min(1/2, 1 / (1 + 2 H²)) [H].

    >>> round(theory.rate_sharp_output(1.5), 4)
    0.1818
    """
    return min(0.5, 1.0 / (1.0 + 2.0 * check_nonnegative("horizon", horizon) ** 2))


def rate_rms_output(horizon: float) -> float:
    """Exponent of the output error squared over queries and replicates, min(1/2, (√(1 + 4/H²) - 1) / 4) [V].

    The exact curve (`limitlens.theory.curve.output_error`) has this slope. `rate_sharp_output` describes one typical
    sample, which lacks the rare tokens that carry the second moment.

    >>> round(theory.rate_rms_output(1.5), 4)
    0.1667
    """
    h = check_nonnegative("horizon", horizon)
    return 0.5 if h**2 <= 0.5 else (sqrt(1.0 + 4.0 / h**2) - 1.0) / 4.0


def rate_rms(horizon: float) -> float:
    """Exponent of the root mean square over replicates of the moment errors, min(1/2, (√(1 + 8/H²) - 1) / 4) [H].

    For H > 1 it is smaller than `rate_sharp`, which describes E|·|: rare replicates carry the second moment.

    >>> round(theory.rate_rms(1.5), 4)
    0.2836
    """
    h = check_nonnegative("horizon", horizon)
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
    """Sharp law of a moment error for Gaussian tokens, with its powers of ln n [V in d = 1, H in d > 1].

    The mean error is n^{-1/2} for H < 1, n^{-1/2} (ln n)^{3/4} at H = 1 and (√ln n / n)^{1/(1+H²)} for H > 1; from
    H = 1 on the covariance has an extra √ln n. If the top singular value of B occurs m times (`multiplicity`), as in a
    flat spectrum, the power of ln n in the mean is (α+m-2)/(2α) for H > 1, α = 1 + 1/H², and (m+2)/4 at H = 1.

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
    """Whether simulations confirm the laws of the moments of Gaussian tokens at this reach: d = 1, or a small ‖B‖_F."""
    return reach.dim == 1 or reach.frobenius <= VERIFIED_FROBENIUS + 1e-9


def predictions(
    reach: Reach, *, gaussian: bool = True, compact: bool = False, proxy_coupling: float | None = None
) -> list[Prediction]:
    """Every exponent predicted for a head of the given reach, each with its status.

    What is verified for `gaussian` tokens is only heuristic for other laws. `compact` (bounded) tokens have the
    exponent 1/2 in the end. `proxy_coupling` is Ψ of a variance proxy of tokens that are not Gaussian; without one
    nothing is proved about them.

    >>> found = theory.predictions(theory.reach([[1.0]], [[1.5]]))
    >>> [(rate.name, round(rate.value, 4), rate.status.value) for rate in found][:2]
    [('rate_proved', 0.0068, 'proved'), ('rate_drawn_coupling', 0.1538, 'drawn')]
    """
    H = reach.horizon
    verified = Status.VERIFIED if gaussian else Status.HEURISTIC
    sharp_status = verified if moments_verified(reach) else Status.HEURISTIC
    moments = "error of the mean and covariance of the outputs, as E|·| over replicates"
    limits = f"; verified in d = 1 and for ‖B‖_F ≤ {VERIFIED_FROBENIUS:g}, here ‖B‖_F = {reach.frobenius:.3g}"
    sharp_note = moments + (limits if reach.dim > 1 else "")
    found = [
        _proved(reach.coupling, reach.coupling if proxy_coupling is None and gaussian else proxy_coupling, moments),
        Prediction(
            "rate_drawn_coupling", rate_drawn_coupling(reach.coupling), Status.DRAWN, "1/(2(1+Ψ))", moments, BOHBOT
        ),
        Prediction("rate_drawn", rate_drawn(H), Status.DRAWN, "1/(2(1+H²))", moments, BOHBOT),
        Prediction("rate_sharp", rate_sharp(H), sharp_status, "min(1/2, 1/(1+H²))", sharp_note),
        Prediction(
            "rate_sharp_output", rate_sharp_output(H), Status.HEURISTIC, "min(1/2, 1/(1+2H²))",
            "output error, root mean square over the queries of one sample; not comparable with the moments",
        ),
        Prediction(
            "rate_rms_output", rate_rms_output(H), verified, "min(1/2, (√(1+4/H²)−1)/4)",
            "output error, root mean square over queries and replicates",
        ),
        Prediction(
            "rate_rms", rate_rms(H), Status.HEURISTIC, "min(1/2, (√(1+8/H²)−1)/4)",
            "error of the moments, as root mean square over replicates instead of E|·|",
        ),
    ]  # fmt: skip
    if compact:
        note = "bounded tokens: every error, once n is past the constant of the uniform bound"
        found.append(Prediction("rate_compact", 0.5, Status.PROVED, "1/2", note, BOHBOT))
    return found


def _proved(coupling: float, proxy: float | None, note: str) -> Prediction:
    """The proved rate from Ψ of a variance proxy; heuristic, with Ψ of the covariance, where no proxy is known."""
    if proxy is None:
        note += "; Ψ of the covariance, which need not be a variance proxy of these tokens"
    elif proxy != coupling:
        note += f"; Ψ = {proxy:.4g} of a variance proxy of these tokens"
    status = Status.HEURISTIC if proxy is None else Status.PROVED
    return Prediction(
        "rate_proved", rate_proved(coupling if proxy is None else proxy), status, "1/(2(1+32Ψ))", note, BOHBOT
    )
