"""Exponents β of the decay n^{-β} of attention's error over n tokens, each with its status.

They depend on the horizon H or the coupling Ψ of a head (`spectrum.Reach`). The error of the outputs' mean and
covariance and the root mean square error of outputs have different exponents.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures import Ball, Cube, Gaussian, GaussianMixture, Measure, Sample, Sphere
from limitlens.theory import clt
from limitlens.theory.prediction import BOHBOT, Prediction, check_nonnegative
from limitlens.theory.spectrum import Reach, reach, square_root
from limitlens.theory.statuses import CENTRED, claimed, mean_verified

VERIFIED_HORIZON = 2.0  # largest H at which simulations in d = 1 confirm the exponents
SLOPES_FROM = 1e6  # smallest n at which simulations confirm local slopes: at H = 1.5, n = 1e4 it is .334, the law .291
WEAK = 0.02  # horizon up to which the relative output error falls as the horizon grows (d = 1 to 64, n = 100 to 1e5)
# Laws whose covariance is a variance proxy. On the sphere E e^{r u₁} ≤ e^{r²/(2d)}; balls and cubes follow from it.
STRICTLY_SUBGAUSSIAN = (Gaussian, Sphere, Ball, Cube)


def rate_proved(coupling: float) -> float:
    """Proved exponent β = 1 / (2 (1 + 32 Ψ)), as n → ∞, of the error n^{-β} of the outputs' mean and covariance.

    Ψ is the `coupling` of a variance proxy of the tokens, which must be centred (arXiv 2512.10656).

    >>> round(theory.rate_proved(1.0), 4)
    0.0152
    """
    return 1.0 / (2.0 * (1.0 + 32.0 * check_nonnegative("coupling", coupling)))


def rate_drawn_coupling(coupling: float) -> float:
    """Exponent 1 / (2 (1 + Ψ)) in n, Ψ the `coupling`, that arXiv 2512.10656 draws; nothing proves it."""
    return 1.0 / (2.0 * (1.0 + check_nonnegative("coupling", coupling)))


def rate_drawn(horizon: float) -> float:
    """Exponent 1 / (2 (1 + H²)) in n, H the `horizon`, that arXiv 2512.10656 draws; nothing proves it."""
    return 1.0 / (2.0 * (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp(horizon: float) -> float:
    """Exponent min(1/2, 1 / (1 + H²)) in n of the error of the outputs' mean and covariance, for Gaussian tokens.

    H = ‖B‖₂ with B = Σ^{1/2} A Σ^{1/2}. Verified for centred tokens in d = 1 to H = 2, and in d > 1 only for
    ‖B‖_F ≤ 1, where it is 1/2. The slow exponents, H > 1, are heuristic in every d > 1.

    >>> theory.rate_sharp(0.5), round(theory.rate_sharp(1.5), 4)
    (0.5, 0.3077)
    """
    return min(0.5, 1.0 / (1.0 + check_nonnegative("horizon", horizon) ** 2))


def rate_sharp_output(horizon: float) -> float:
    """Exponent min(1/2, 1 / (1 + 2 H²)) in n of the root mean square output error over one sample (heuristic)."""
    return min(0.5, 1.0 / (1.0 + 2.0 * check_nonnegative("horizon", horizon) ** 2))


def rate_rms_output(horizon: float) -> float:
    """Exponent min(1/2, (√(1+4/H²) - 1)/4) in n of the output error, root mean square over many samples (d = 1)."""
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


def variance_proxy(law: Measure) -> Array | None:
    """Variance proxy S of a token distribution: log E exp<t, X> - <E X, t> ≤ ½ tᵀSt for every t (proved).

    S (d, d) is the covariance for `STRICTLY_SUBGAUSSIAN` laws; for a Gaussian mixture an upper bound of the covariances
    plus D²/4, D the largest distance of two means (of two components: plus δδᵀ/4, δ the difference of their means); for
    another law of radius R, R² (Hoeffding). None if unknown.
    """
    if isinstance(law, STRICTLY_SUBGAUSSIAN):
        return law.covariance
    if isinstance(law, GaussianMixture):
        parts = [component.covariance for component in law.components]
        same = all(np.array_equal(part, parts[0]) for part in parts)
        widest = parts[0] if same else max(float(np.linalg.eigvalsh(part)[-1]) for part in parts) * np.eye(law.dim)
        if len(law.means) == 2:  # Hoeffding for <t, mean of the component>, whose range is |<t, difference>|
            return np.asarray(widest + np.outer(*[law.means[1] - law.means[0]] * 2) / 4)
        apart = max(float(np.sum((law.means - mean) ** 2, axis=1).max()) for mean in law.means)
        return np.asarray(widest + apart / 4 * np.eye(law.dim))
    return law.radius**2 * np.eye(law.dim) if np.isfinite(law.radius) else None


def tail_horizon(law: Measure, A: ArrayLike) -> float:
    """Horizon that decides exponents as n → ∞: ‖Σ^{1/2} A Σ^{1/2}‖₂, of a mixture with its components' covariances.

    The means of a mixture change K(2t) − 2K(t), the logarithm of n times the variance, by bounded terms only. Exponents
    are therefore those of the components (keys Σ_i, queries Σ_j) with the largest ‖Σ_i^{1/2} A Σ_j^{1/2}‖₂ (heuristic).
    """
    score = as_array("A", A, ndim=2)
    parts = law.components if isinstance(law, GaussianMixture) else (law,)
    roots = [square_root(part.covariance) for part in parts]
    return max(float(np.linalg.norm(key @ score @ query, 2)) for key in roots for query in roots)


def proxy_reach(law: Measure, A: ArrayLike) -> Reach | None:
    """Horizon and coupling of a head with score matrix A from a variance proxy of the tokens; None if none is known."""
    proxy = variance_proxy(law)
    return None if proxy is None else reach(proxy, A)


def reached_from(law: Measure, A: ArrayLike) -> float | None:
    """Tokens n from which bounded tokens show their rate 1/2, about (heuristic); None for unbounded tokens.

    n = e^D, D the largest `clt.log_tokens_needed` of a query |x| ≤ R along the top singular direction of the score
    matrix A. Local slopes are then 0.4 or more (spheres, d = 3 to 50). A `Sample` of N tokens needs at most N.
    """
    if not np.isfinite(law.radius):
        return None
    left, values, _ = np.linalg.svd(as_array("A", A, ndim=2))
    needed = max(clt.log_tokens_needed(law, sign * law.radius * values[0] * left[:, 0]) for sign in (1, -1))
    if isinstance(law, Sample):
        needed = min(needed, log(len(law.tokens)))
    return float(np.exp(min(max(needed, 0.0), 700.0)))


def reached_words(law: Measure, start: float, n: float) -> str:
    """Sentence on the rate 1/2 of bounded tokens: from which n on (`start`) it shows, and whether n tokens show it."""
    words = f"reached from about n = {start:.2g} on" + ("" if n >= start else ", not reached here")
    empirical = "a statement about the empirical law of the sample, not about the law that it was drawn from"
    return f"{words}; {empirical}" if isinstance(law, Sample) else words


def predictions(
    of: Reach, *, gaussian: bool = True, compact: bool = False, proxy_coupling: float | None = None,
    tail: float | None = None,
) -> list[Prediction]:  # fmt: skip
    """All predicted exponents in n of attention's error, each with its status, for a head with the given horizons.

    Formulas verified for `gaussian` tokens are heuristic for others, for which `rate_proved` needs the coupling of a
    variance proxy (`proxy_coupling`), and the sharp rates the `tail_horizon` (`tail`). `rate_proved` is left out if the
    tokens are not centred (`of.mean_tilt`), and for bounded tokens (`compact`), which have the exponent 1/2 in the end.
    `statuses.CLAIMS` has all ranges.

    >>> found = theory.predictions(theory.reach([[1.0]], [[1.5]]))
    >>> [(rate.name, round(rate.value, 4), rate.status.value) for rate in found][:2]
    [('rate_proved', 0.0068, 'proved'), ('rate_drawn_coupling', 0.1538, 'drawn')]
    """
    H, proxy = of.horizon, of.coupling if proxy_coupling is None and gaussian else proxy_coupling
    T = H if tail is None else tail
    known = gaussian and of.mean_tilt <= CENTRED
    in_line = known and of.dim == 1 and VERIFIED_HORIZON >= H
    moments = proved_note = "error of the mean and covariance of the outputs, as E|·| over replicates"
    if proxy is None:
        proved_note += "; Ψ of the covariance, which need not be a variance proxy of these tokens"
    else:
        other = "" if proxy == of.coupling else f"; Ψ = {proxy:.4g} of a variance proxy of these tokens"
        proved_note += f"; at least this, as n → ∞{other}"
    limits = f"; in d > 1 verified only for ‖B‖_F ≤ 1, where it is 1/2; here ‖B‖_F = {of.frobenius:.3g}"
    one_sample = "output error, root mean square over the queries of one sample; not comparable with the moments"
    all_samples = "output error, root mean square over queries and replicates"
    squared = "error of the moments, as root mean square over replicates instead of E|·|"
    sharp = known and mean_verified(of, VERIFIED_HORIZON)
    found = [
        claimed("rate_drawn_coupling", rate_drawn_coupling(of.coupling), moments, reference=BOHBOT),
        claimed("rate_drawn", rate_drawn(H), moments, reference=BOHBOT),
        claimed("rate_sharp", rate_sharp(T), moments + (limits if of.dim > 1 else ""), holds=sharp),
        claimed("rate_sharp_output", rate_sharp_output(T), one_sample),
        claimed("rate_rms_output", rate_rms_output(T), all_samples, holds=in_line),
        claimed("rate_rms", rate_rms(T), squared),
    ]
    if compact:
        return [claimed("rate_compact", 0.5, "every error of bounded tokens, as n → ∞", reference=BOHBOT), *found]
    if of.mean_tilt > CENTRED:
        return found
    rate = rate_proved(of.coupling if proxy is None else proxy)
    return [claimed("rate_proved", rate, proved_note, holds=proxy is not None, reference=BOHBOT), *found]
