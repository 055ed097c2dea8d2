"""Status of every prediction in one table: the code takes its statuses from here.

docs/theory.md shows the table, and names the test that confirms each row.

B = Σ^{1/2} A Σ^{1/2}, H = ‖B‖₂, mean tilt τ₀ = |Σ^{1/2} A E X|; tokens are centred if τ₀ = 0.
"""

from dataclasses import dataclass

from limitlens.theory.prediction import Prediction, Status
from limitlens.theory.spectrum import Reach

PROVED, VERIFIED, HEURISTIC, DRAWN = Status.PROVED, Status.VERIFIED, Status.HEURISTIC, Status.DRAWN
ASYMPTOTIC = Status.ASYMPTOTIC
SMALL = 1 + 1e-9  # ‖B‖_F up to which simulations in d > 1 confirm the error of the mean (docs/theory.md)
VERIFIED_CONSTANT = 0.7  # H up to which n·Var has reached its limit at n = 1e5 in d = 1
CENTRED = 1e-9  # mean tilt up to which tokens count as centred


@dataclass(frozen=True)
class Claim:
    """Formula of a prediction, and its status with the range in which it holds."""

    formula: str  # in the notation of docs/theory.md
    status: Status
    where: str  # the range of `status`
    otherwise: Status | None = None  # the status outside that range; None if no number is given there

    def at(self, holds: bool = True) -> Status:
        """Status of the prediction inside (`holds`) or outside the range in which it was proved or verified."""
        return self.status if holds or self.otherwise is None else self.otherwise


CLAIMS = {
    "rate_proved": Claim(
        "1/(2(1+32Ψ))", PROVED,
        "as n → ∞, centred tokens with a known variance proxy; left out for bounded tokens (`rate_compact` says more)",
        HEURISTIC,
    ),
    "rate_drawn_coupling": Claim("1/(2(1+Ψ))", DRAWN, "a line in figures of [1]; no bound"),
    "rate_drawn": Claim("1/(2(1+H²))", DRAWN, "a line in figures of [1]; no bound"),
    "rate_sharp": Claim(
        "min(1/2, 1/(1+H²))", VERIFIED,
        "centred Gaussian tokens: d = 1 and H ≤ 2; in d > 1 only where ‖B‖_F ≤ 1, where it is 1/2", HEURISTIC,
    ),
    "rate_sharp_output": Claim("min(1/2, 1/(1+2H²))", HEURISTIC, "Gaussian tokens"),
    "rate_rms_output": Claim("min(1/2, (√(1+4/H²)−1)/4)", VERIFIED, "centred Gaussian tokens, d = 1, H ≤ 2", HEURISTIC),
    "rate_rms": Claim("min(1/2, (√(1+8/H²)−1)/4)", HEURISTIC, "Gaussian tokens"),
    "rate_compact": Claim(
        "1/2", PROVED, "as n → ∞, bounded tokens; at the n in use only from about `reached_from` on (heuristic)",
    ),
    "local_rates": Claim(
        "n^(−exponent) (ln n)^log_power", VERIFIED, "centred Gaussian tokens, d = 1, H ≤ 2, n ≥ 1e6", HEURISTIC,
    ),
    "constants.mean": Claim(
        "tr of n·Cov(mean output)", VERIFIED,
        "Gaussian tokens, as n → ∞: centred, with d = 1 and H ≤ 0.7 or ‖B‖_F ≤ 1; d = 1, H ≤ 0.5, τ₀ ≤ 1", HEURISTIC,
    ),
    "constants.covariance": Claim(
        "n·Var(variance of the outputs)", VERIFIED, "centred Gaussian tokens, as n → ∞, d = 1, H ≤ 0.7", HEURISTIC,
    ),
    "curve.mean": Claim(
        "E|error of the mean output|", VERIFIED,
        "centred Gaussian tokens: d = 1, H ≤ 1, n ≥ 1e3 (within 8%); ‖B‖_F ≤ 1 (within 10%)", HEURISTIC,
    ),
    "curve.covariance": Claim("E|error of the variance of the outputs|", HEURISTIC, "centred Gaussian tokens, d = 1"),
    "curve.output": Claim(
        "root mean square over queries and samples", VERIFIED, "Gaussian tokens of any mean, every n",
    ),
    "curve.averaged": Claim(
        "E|Γ_n − Γ| averaged over queries, three pieces", VERIFIED,
        "centred Gaussian tokens, d = 1, H ≤ 3 (within 25%)", HEURISTIC,
    ),
    "effective_sample_size": Claim("n e^{2K(t)−K(2t)}", PROVED, "where K(2t) is finite"),
    "rms_error": Claim("√(tr(V S Vᵀ)/n)", PROVED, "as n → ∞, where K(2t) is finite"),
    "rms_error_exact": Claim(
        "mean square error at one query, an integral", VERIFIED, "Gaussian tokens of any mean, every n",
    ),
    "rms_error_bound": Claim("(√(tr S) + Rχ)/√n", PROVED, "bounded tokens, every n"),
    "deviation": Claim("tr S/(nε²(1−δ)²) + exp(−nδ²/(2(1+χ²)))", PROVED, "every n, where K(2t) is finite"),
    "interval": Claim("degrees of freedom and KL(μ_2t | μ)", VERIFIED, "where K(4t) is finite; else unknown"),
    "plug_in": Claim("Γ_n, Σuuᵀ with u = w(v−Γ_n), Student's interval", PROVED, "as n → ∞, where K(2t) is finite"),
    "uniform_exponential": Claim(
        "exp(R²‖S^{1/2}A‖₂²), S a variance proxy", HEURISTIC, "the order of the constant of [1], not a bound",
    ),
    "uniform_gaussian": Claim(
        "max over |x| ≤ R of √tr(V S Vᵀ), S = e^{τ²}(Σ + ΣAxxᵀAᵀΣ)", PROVED,
        "as n → ∞, Gaussian tokens, worst single query",
    ),
    "uniform_supremum": Claim(
        "‖VΣ^{1/2}‖₂ Σ_k k ρ^{k−1}(√k E|g| + √(2/π)1[k even])/√k!, ρ = R‖Σ^{1/2}A‖₂", PROVED,
        "as n → ∞, Gaussian tokens",
    ),
    "dependent.error": Claim(
        "n⁻² ΣΣ Cov(h_i, h_j) + |bias|²", VERIFIED,
        "equal weights: AR(1), topics, repeated tokens, n = 30 and 400", HEURISTIC,
    ),
    "dependent.blocks": Claim(
        "exact law of n tokens, with blocks W_b = Σw, Σwv/W_b as tokens", PROVED,
        "independent blocks, every n", HEURISTIC,
    ),
    "dependent.time": Claim(
        "σ²τ/n with a plateau of n·Var(n), else long memory", VERIFIED,
        "16 contexts of 1,600 tokens: AR(1), topics", HEURISTIC,
    ),
    "dependent.documents": Claim(
        "Cov(first, last quarter) stays as n grows", VERIFIED,
        "documents as random effects, independent tokens", HEURISTIC,
    ),
    "hardmax.asymptotic": Claim("ln(4) σ/(2√(2 ln n))", PROVED, "as n → ∞, tokens N(0, σ²) of mean 0"),
    "hardmax.finite": Claim(
        "σ√(I² + (2/π)E[max]²/n), I = ∫Φⁿ(1−Φⁿ)", VERIFIED, "tokens N(0, σ²) of mean 0, n ≥ 1,000", HEURISTIC,
    ),
    "hardmax.isotropic": Claim(
        "E|N(0, ((d² E[ρ C(ρ)] + E|y|²/n)/d) V Σ Vᵀ)|, of order (ln n)^(−(d+1)/4)", VERIFIED,
        "tokens N(0, Σ), 2 ≤ d ≤ 5, equal singular values of B, n ≥ 1,000 (within 7%); the order as n → ∞: heuristic",
        HEURISTIC,
    ),
    "laplace.rate": Claim(
        "min(1/2, 1−bt)", PROVED, "bt < 1/2 (central limit theorem); otherwise: 1/2 ≤ bt < 1", VERIFIED,
    ),
    "laplace.participation": Claim("max(0, 1−1/(bt))", PROVED, "bt < 1 (it vanishes); otherwise: bt ≥ 1", VERIFIED),
    "laplace.growth": Claim("b, or b/2 at bt = 1", VERIFIED, "bt ≥ 1"),
    "critical_weights": Claim(
        "e^{−x_j}/Σe^{−x_i}, x a Poisson process", VERIFIED, "random keys on the sphere ([scaling](scaling.md))",
    ),
    "student": Claim("participation 1, growth n^{1/ν}", VERIFIED, "Student tokens, any t ≠ 0"),
    "certificate.quantile": Claim(
        "Σλ · F_{1−δ}(f, ν), f = (Σλ)²/Σλ²", ASYMPTOTIC, "large samples; within 8% of Σλχ² for 0.05 ≤ δ ≤ 0.2",
    ),
    "certificate.size": Claim(
        "n₀/(1 + n₀/R), n₀ = quantile/(ε|Γ|)²", ASYMPTOTIC, "uniform samples of a tail of R keys",
    ),
    "certificate.bernstein": Claim(
        "bL/3 + √((bL/3)² + 2VL), L = ln(4/δ)", PROVED, "every sample size, with a bound b on unread scores",
    ),
    "certificate.reads": Claim(
        "c/(1 + c/N), c = q τ spread/ε²", HEURISTIC, "keys sampled by predicted weight ([certify](certify.md))",
    ),
}  # fmt: skip


def claimed(name: str, value: float, note: str = "", *, holds: bool = True, **more: str) -> Prediction:
    """Prediction `name` with this value and the formula and status of `CLAIMS`; `holds` as in `Claim.at`."""
    return Prediction(name, value, CLAIMS[name].at(holds), CLAIMS[name].formula, note, **more)


def mean_verified(of: Reach, up_to: float = 1.0) -> bool:
    """Whether simulations confirm the error of the mean of centred tokens: d = 1 and H ≤ `up_to`, or ‖B‖_F ≤ 1."""
    return of.mean_tilt <= CENTRED and ((of.dim == 1 and of.horizon <= up_to) or of.frobenius <= SMALL)
