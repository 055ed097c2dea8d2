"""Exponents β of the decay n^{-β} of attention's error over n tokens, each with its status.

They depend on the horizon H or the coupling Ψ of a head (`spectrum.Reach`). The error of the outputs' mean and
covariance and the root mean square error of outputs have different exponents.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, check_number
from limitlens.measures import Ball, Cube, Gaussian, GaussianMixture, Measure, Sphere
from limitlens.theory.prediction import BOHBOT, Prediction, Status, check_nonnegative
from limitlens.theory.spectrum import Reach, reach

VERIFIED_FROBENIUS = 1.0  # largest ‖B‖_F at which simulations in d > 1 confirm the error of the mean (docs/theory.md)
SLOPES_FROM = 1e6  # smallest n at which simulations confirm local slopes: at H = 1.5, n = 1e4 it is .334, the law .291
WEAK = 0.02  # horizon up to which the relative output error falls as the horizon grows (d = 1 to 64, n = 100 to 1e5)
# Laws whose covariance is a variance proxy. On the sphere E e^{r u₁} ≤ e^{r²/(2d)}; balls and cubes follow from it.
STRICTLY_SUBGAUSSIAN = (Gaussian, Sphere, Ball, Cube)


def rate_proved(coupling: float) -> float:
    """Proved exponent β = 1 / (2 (1 + 32 Ψ)) of the error n^{-β} of the outputs' mean and covariance.

    Ψ is the `coupling` of a variance proxy of the tokens (arXiv 2512.10656).

    >>> round(theory.rate_proved(1.0), 4)
    0.0152
    """
    return 1.0 / (2.0 * (1.0 + 32.0 * check_nonnegative("coupling", coupling)))


def rate_drawn_coupling(coupling: float) -> float:
    """Exponent 1 / (2 (1 + Ψ)) in n, Ψ the `coupling`, that arXiv 2512.10656 draws beside its measured errors."""
    return 1.0 / (2.0 * (1.0 + check_nonnegative("coupling", coupling)))


def rate_drawn(horizon: float) -> float:
    """Exponent 1 / (2 (1 + H²)) in n, H the `horizon`, that arXiv 2512.10656 draws; a lower bound of the true one."""
    return 1.0 / (2.0 * (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp(horizon: float) -> float:
    """Exponent min(1/2, 1 / (1 + H²)) in n of the error of the outputs' mean and covariance, for Gaussian tokens.

    H = ‖B‖₂ with B = Σ^{1/2} A Σ^{1/2}. Verified in d = 1 and for ‖B‖_F ≤ 1, heuristic otherwise.

    >>> theory.rate_sharp(0.5), round(theory.rate_sharp(1.5), 4)
    (0.5, 0.3077)
    """
    return min(0.5, 1.0 / (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp_output(horizon: float) -> float:
    """Exponent min(1/2, 1 / (1 + 2 H²)) in n of the root mean square output error over one sample (heuristic)."""
    return min(0.5, 1.0 / (1.0 + 2.0 * check_nonnegative("horizon", horizon) ** 2))


def rate_rms_output(horizon: float) -> float:
    """Exponent min(1/2, (√(1+4/H²) - 1)/4) in n of the output error, root mean square over many samples (verified)."""
    h = check_nonnegative("horizon", horizon)
    return 0.5 if h**2 <= 0.5 else (sqrt(1.0 + 4.0 / h**2) - 1.0) / 4.0


def rate_rms(horizon: float) -> float:
    """Exponent min(1/2, (√(1+8/H²) - 1)/4) in n of the error of the mean output, root mean square (heuristic)."""
    h = check_nonnegative("horizon", horizon)
    return 0.5 if h <= 1.0 else (sqrt(1.0 + 8.0 / h**2) - 1.0) / 4.0


@dataclass(frozen=True)
class SharpLaw:
    """Predicted error n^{-exponent} (ln n)^{log_power} of the outputs' mean or covariance, up to a constant factor."""

    exponent: float
    log_power: float

    def local_rate(self, n: float) -> float:
        """Slope -d ln(error) / d ln n = exponent - log_power / ln n of the predicted error curve at n > 1 tokens."""
        return self.exponent - self.log_power / log(check_number("n", n, "more than one token", low=1, closed=False))


def sharp_law(horizon: float, moment: str = "mean", multiplicity: int = 1) -> SharpLaw:
    """Predict the decay n^{-exponent} (ln n)^{log_power} of the outputs' mean or covariance error, Gaussian tokens.

    `exponent` is `rate_sharp`. For the mean, `log_power` is 0 for H < 1, (m+2)/4 at H = 1 and (α+m-2)/(2α) for H > 1.
    Here α = 1 + 1/H², and m = `multiplicity` counts the largest singular values of Σ^{1/2} A Σ^{1/2}. The covariance
    has 1/2 more from H = 1 on. Verified in d = 1 from n = 1e6 on, heuristic otherwise.
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


def moments_verified(of: Reach) -> bool:
    """Whether simulations confirm the predicted error of the outputs' mean and covariance: d = 1, or ‖B‖_F ≤ 1."""
    return of.dim == 1 or of.frobenius <= VERIFIED_FROBENIUS + 1e-9


def variance_proxy(law: Measure) -> Array | None:
    """Variance proxy S of a token distribution: log E exp<t, X> - <E X, t> ≤ ½ tᵀSt for every t (proved).

    S (d, d) is the covariance for `STRICTLY_SUBGAUSSIAN` laws. For a Gaussian mixture it is an upper bound of the
    covariances plus D²/4, D the largest distance between two means. For another law of bounded radius R it is R²
    (Hoeffding). None if no proxy is known.
    """
    if isinstance(law, STRICTLY_SUBGAUSSIAN):
        return law.covariance
    if isinstance(law, GaussianMixture):
        parts = [component.covariance for component in law.components]
        same = all(np.array_equal(part, parts[0]) for part in parts)
        widest = parts[0] if same else max(float(np.linalg.eigvalsh(part)[-1]) for part in parts) * np.eye(law.dim)
        apart = max(float(np.sum((law.means - mean) ** 2, axis=1).max()) for mean in law.means)
        return np.asarray(widest + apart / 4 * np.eye(law.dim))
    return law.radius**2 * np.eye(law.dim) if np.isfinite(law.radius) else None


def proxy_reach(law: Measure, A: ArrayLike) -> Reach | None:
    """Horizon and coupling of a head with score matrix A from a variance proxy of the tokens; None if none is known."""
    proxy = variance_proxy(law)
    return None if proxy is None else reach(proxy, A)


def predictions(
    of: Reach, *, gaussian: bool = True, compact: bool = False, proxy_coupling: float | None = None
) -> list[Prediction]:
    """All predicted exponents in n of attention's error, each with its status, for a head with the given horizons.

    Formulas verified for `gaussian` tokens are heuristic for others, for which `rate_proved` needs the coupling of a
    variance proxy (`proxy_coupling`). Bounded tokens (`compact`) have the exponent 1/2 in the end.

    >>> found = theory.predictions(theory.reach([[1.0]], [[1.5]]))
    >>> [(rate.name, round(rate.value, 4), rate.status.value) for rate in found][:2]
    [('rate_proved', 0.0068, 'proved'), ('rate_drawn_coupling', 0.1538, 'drawn')]
    """
    H, proxy = of.horizon, of.coupling if proxy_coupling is None and gaussian else proxy_coupling
    verified = Status.VERIFIED if gaussian else Status.HEURISTIC
    sharp_status = verified if moments_verified(of) else Status.HEURISTIC
    moments = proved_note = "error of the mean and covariance of the outputs, as E|·| over replicates"
    if proxy is None:
        proved_note += "; Ψ of the covariance, which need not be a variance proxy of these tokens"
    elif proxy != of.coupling:
        proved_note += f"; Ψ = {proxy:.4g} of a variance proxy of these tokens"
    limits = f"; verified in d = 1 and for ‖B‖_F ≤ {VERIFIED_FROBENIUS:g}, here ‖B‖_F = {of.frobenius:.3g}"
    proved = Status.HEURISTIC if proxy is None else Status.PROVED
    rate = rate_proved(of.coupling if proxy is None else proxy)
    drawn = rate_drawn_coupling(of.coupling)
    one_sample = "output error, root mean square over the queries of one sample; not comparable with the moments"
    all_samples = "output error, root mean square over queries and replicates"
    squared = "error of the moments, as root mean square over replicates instead of E|·|"
    sharp = moments + (limits if of.dim > 1 else "")
    found = [
        Prediction("rate_proved", rate, proved, "1/(2(1+32Ψ))", proved_note, BOHBOT),
        Prediction("rate_drawn_coupling", drawn, Status.DRAWN, "1/(2(1+Ψ))", moments, BOHBOT),
        Prediction("rate_drawn", rate_drawn(H), Status.DRAWN, "1/(2(1+H²))", moments, BOHBOT),
        Prediction("rate_sharp", rate_sharp(H), sharp_status, "min(1/2, 1/(1+H²))", sharp),
        Prediction("rate_sharp_output", rate_sharp_output(H), Status.HEURISTIC, "min(1/2, 1/(1+2H²))", one_sample),
        Prediction("rate_rms_output", rate_rms_output(H), verified, "min(1/2, (√(1+4/H²)−1)/4)", all_samples),
        Prediction("rate_rms", rate_rms(H), Status.HEURISTIC, "min(1/2, (√(1+8/H²)−1)/4)", squared),
    ]
    if compact:
        note = "bounded tokens: every error, once n is past the constant of the uniform bound"
        found.append(Prediction("rate_compact", 0.5, Status.PROVED, "1/2", note, BOHBOT))
    return found
