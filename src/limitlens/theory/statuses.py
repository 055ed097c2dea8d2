"""Status of every prediction in one table: the code takes its statuses from here, and docs/theory.md shows the table.

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
    """Formula of a prediction, its status with the range in which it holds, and the test that confirms it."""

    formula: str  # in the notation of docs/theory.md
    status: Status
    where: str  # the range of `status`
    test: str  # file::test, without the test_ of the file
    otherwise: Status | None = None  # the status outside that range; None if no number is given there

    def at(self, holds: bool = True) -> Status:
        """Status of the prediction inside (`holds`) or outside the range in which it was proved or verified."""
        return self.status if holds or self.otherwise is None else self.otherwise


CLAIMS = {
    "rate_proved": Claim(
        "1/(2(1+32Ψ))", PROVED,
        "as n → ∞, centred tokens with a known variance proxy; left out for bounded tokens (`rate_compact` says more)",
        "rates::test_the_proved_rate_of_a_mixture_is_not_that_of_its_covariance", HEURISTIC,
    ),
    "rate_drawn_coupling": Claim(
        "1/(2(1+Ψ))", DRAWN, "a line in figures of [1]; no bound", "rates::test_exponents_at_the_published_example"
    ),
    "rate_drawn": Claim(
        "1/(2(1+H²))", DRAWN, "a line in figures of [1]; no bound", "rates::test_exponents_at_the_published_example"
    ),
    "rate_sharp": Claim(
        "min(1/2, 1/(1+H²))", VERIFIED,
        "centred Gaussian tokens: d = 1 and H ≤ 2; in d > 1 only where ‖B‖_F ≤ 1, where it is 1/2",
        "rates::test_sharp_exponent_in_simulation", HEURISTIC,
    ),
    "rate_sharp_output": Claim("min(1/2, 1/(1+2H²))", HEURISTIC, "Gaussian tokens", "–"),
    "rate_rms_output": Claim(
        "min(1/2, (√(1+4/H²)−1)/4)", VERIFIED, "centred Gaussian tokens, d = 1, H ≤ 2",
        "curve::test_exact_curve_has_the_rms_output_exponent", HEURISTIC,
    ),
    "rate_rms": Claim("min(1/2, (√(1+8/H²)−1)/4)", HEURISTIC, "Gaussian tokens", "–"),
    "rate_compact": Claim(
        "1/2", PROVED, "as n → ∞, bounded tokens; at the n in use only from about `reached_from` on (heuristic)",
        "rates::test_bounded_tokens_reach_their_rate_where_it_is_said",
    ),
    "local_rates": Claim(
        "n^(−exponent) (ln n)^log_power", VERIFIED, "centred Gaussian tokens, d = 1, H ≤ 2, n ≥ 1e6",
        "rates::test_sharp_law_has_the_local_slopes_of_the_influence_law", HEURISTIC,
    ),
    "constants.mean": Claim(
        "tr of n·Cov(mean output)", VERIFIED,
        "Gaussian tokens, as n → ∞: centred, with d = 1 and H ≤ 0.7 or ‖B‖_F ≤ 1; d = 1, H ≤ 0.5, τ₀ ≤ 1",
        "rates::test_constant_of_tokens_that_are_not_centred", HEURISTIC,
    ),
    "constants.covariance": Claim(
        "n·Var(variance of the outputs)", VERIFIED, "centred Gaussian tokens, as n → ∞, d = 1, H ≤ 0.7",
        "rates::test_constants_match_simulated_variances_at_1e5", HEURISTIC,
    ),
    "curve.mean": Claim(
        "E|error of the mean output|", VERIFIED,
        "centred Gaussian tokens: d = 1, H ≤ 1, n ≥ 1e3 (within 8%); ‖B‖_F ≤ 1 (within 10%)",
        "rates::test_influence_predicts_the_mean_error_as_closely_as_is_said", HEURISTIC,
    ),
    "curve.covariance": Claim(
        "E|error of the variance of the outputs|", HEURISTIC, "centred Gaussian tokens, d = 1",
        "rates::test_constants_are_the_variances_of_the_influence_functions",
    ),
    "curve.output": Claim(
        "root mean square over queries and samples", VERIFIED, "Gaussian tokens of any mean, every n",
        "curve::test_output_error_matches_simulation",
    ),
    "curve.averaged": Claim(
        "E|Γ_n − Γ| averaged over queries, three pieces", VERIFIED,
        "centred Gaussian tokens, d = 1, H ≤ 3 (within 25%)",
        "curve::test_three_piece_law_within_a_quarter_of_the_averaged_error", HEURISTIC,
    ),
    "effective_sample_size": Claim(
        "n e^{2K(t)−K(2t)}", PROVED, "where K(2t) is finite", "clt::test_gaussian_closed_form_and_values"
    ),
    "rms_error": Claim(
        "√(tr(V S Vᵀ)/n)", PROVED, "as n → ∞, where K(2t) is finite",
        "clt::test_asymptotic_covariance_matches_simulation",
    ),
    "rms_error_exact": Claim(
        "mean square error at one query, an integral", VERIFIED, "Gaussian tokens of any mean, every n",
        "curve::test_pointwise_error_matches_simulation",
    ),
    "rms_error_bound": Claim(
        "(√(tr S) + Rχ)/√n", PROVED, "bounded tokens, every n",
        "clt::test_finite_bounds_hold_and_state_their_smallest_useful_n",
    ),
    "deviation": Claim(
        "tr S/(nε²(1−δ)²) + exp(−nδ²/(2(1+χ²)))", PROVED, "every n, where K(2t) is finite",
        "clt::test_finite_bounds_hold_and_state_their_smallest_useful_n",
    ),
    "interval": Claim(
        "degrees of freedom and KL(μ_2t | μ)", VERIFIED, "where K(4t) is finite; else unknown",
        "clt::test_validity_flags_agree_with_the_measured_coverage",
    ),
    "plug_in": Claim(
        "Γ_n, Σuuᵀ with u = w(v−Γ_n), Student's interval", PROVED, "as n → ∞, where K(2t) is finite",
        "clt::test_plug_in_covariance_is_the_sum_over_tokens",
    ),
    "uniform_exponential": Claim(
        "exp(R²‖S^{1/2}A‖₂²), S a variance proxy", HEURISTIC, "the order of the constant of [1], not a bound",
        "clt::test_uniform_constants",
    ),
    "uniform_gaussian": Claim(
        "max over |x| ≤ R of √tr(V S Vᵀ), S = e^{τ²}(Σ + ΣAxxᵀAᵀΣ)", PROVED,
        "as n → ∞, Gaussian tokens, worst single query",
        "clt::test_uniform_gaussian_constant_is_the_largest_on_the_sphere",
    ),
    "uniform_supremum": Claim(
        "‖VΣ^{1/2}‖₂ Σ_k k ρ^{k−1}(√k E|g| + √(2/π)1[k even])/√k!, ρ = R‖Σ^{1/2}A‖₂", PROVED,
        "as n → ∞, Gaussian tokens",
        "clt::test_the_bound_of_the_largest_error_holds_for_the_limiting_field",
    ),
    "dependent.error": Claim(
        "n⁻² ΣΣ Cov(h_i, h_j) + |bias|²", VERIFIED, "equal weights: AR(1), topics, repeated tokens, n = 30 and 400",
        "dependent::test_covariances_give_the_error_of_consecutive_tokens", HEURISTIC,
    ),
    "dependent.blocks": Claim(
        "exact law of n tokens, with blocks W_b = Σw, Σwv/W_b as tokens", PROVED, "independent blocks, every n",
        "dependent::test_blocks_as_units_are_the_exact_law_of_blocks", HEURISTIC,
    ),
    "dependent.time": Claim(
        "σ²τ/n with a plateau of n·Var(n), else long memory", VERIFIED, "16 contexts of 1,600 tokens: AR(1), topics",
        "dependence::test_ar1_has_a_plateau_and_its_time", HEURISTIC,
    ),
    "dependent.documents": Claim(
        "Cov(first, last quarter) stays as n grows", VERIFIED, "documents as random effects, independent tokens",
        "dependence::test_the_part_between_documents_survives", HEURISTIC,
    ),
    "hardmax.asymptotic": Claim(
        "ln(4) σ/(2√(2 ln n))", PROVED, "as n → ∞, tokens N(0, σ²) of mean 0",
        "hardmax::test_laws_against_the_published_measurements",
    ),
    "hardmax.finite": Claim(
        "σ√(I² + (2/π)E[max]²/n), I = ∫Φⁿ(1−Φⁿ)", VERIFIED, "tokens N(0, σ²) of mean 0, n ≥ 1,000",
        "hardmax::test_exact_simulation_meets_the_published_values_and_the_finite_law", HEURISTIC,
    ),
    "hardmax.isotropic": Claim(
        "E|N(0, ((d² E[ρ C(ρ)] + E|y|²/n)/d) V Σ Vᵀ)|, of order (ln n)^(−(d+1)/4)", VERIFIED,
        "tokens N(0, Σ), 2 ≤ d ≤ 5, equal singular values of B, n ≥ 1,000 (within 7%); the order as n → ∞: heuristic",
        "hardmax::test_the_law_in_several_dimensions_meets_simulation", HEURISTIC,
    ),
    "laplace.rate": Claim(
        "min(1/2, 1−bt)", PROVED, "bt < 1/2 (central limit theorem); otherwise: 1/2 ≤ bt < 1",
        "tails::test_normal_rate_of_laplace_tokens_at_small_tilts", VERIFIED,
    ),
    "laplace.participation": Claim(
        "max(0, 1−1/(bt))", PROVED, "bt < 1 (it vanishes); otherwise: bt ≥ 1",
        "tails::test_attention_beyond_the_limit_of_laplace_tokens",
        VERIFIED,
    ),
    "laplace.growth": Claim(
        "b, or b/2 at bt = 1", VERIFIED, "bt ≥ 1",
        "tails::test_laplace_tokens_at_the_end_of_the_limit_grow_half_as_fast",
    ),
    "critical_weights": Claim(
        "e^{−x_j}/Σe^{−x_i}, x a Poisson process", VERIFIED, "random keys on the sphere ([scaling](scaling.md))",
        "weight_samples::test_limit_sampler_has_the_exact_expectations",
    ),
    "student": Claim(
        "participation 1, growth n^{1/ν}", VERIFIED, "Student tokens, any t ≠ 0",
        "tails::test_the_largest_weight_of_student_tokens_tends_to_one",
    ),
    "certificate.quantile": Claim(
        "Σλ · F_{1−δ}(f, ν), f = (Σλ)²/Σλ²", ASYMPTOTIC, "large samples; within 8% of Σλχ² for 0.05 ≤ δ ≤ 0.2",
        "certificates::test_the_quantile_of_other_eigenvalues_is_that_of_a_simulation",
    ),
    "certificate.size": Claim(
        "n₀/(1 + n₀/R), n₀ = quantile/(ε|Γ|)²", ASYMPTOTIC, "uniform samples of a tail of R keys",
        "certificates::test_a_uniform_sample_of_the_stated_size_keeps_its_promise",
    ),
    "certificate.bernstein": Claim(
        "bL/3 + √((bL/3)² + 2VL), L = ln(4/δ)", PROVED, "every sample size, with a bound b on unread scores",
        "certificates::test_the_proved_radius_holds_where_the_normal_one_fails",
    ),
    "certificate.reads": Claim(
        "c/(1 + c/N), c = q τ spread/ε²", HEURISTIC, "keys sampled by predicted weight ([certify](certify.md))",
        "certificates::test_predicted_reads",
    ),
}  # fmt: skip


def claimed(name: str, value: float, note: str = "", *, holds: bool = True, **more: str) -> Prediction:
    """Prediction `name` with this value and the formula and status of `CLAIMS`; `holds` as in `Claim.at`."""
    return Prediction(name, value, CLAIMS[name].at(holds), CLAIMS[name].formula, note, **more)


def mean_verified(of: Reach, up_to: float = 1.0) -> bool:
    """Whether simulations confirm the error of the mean of centred tokens: d = 1 and H ≤ `up_to`, or ‖B‖_F ≤ 1."""
    return of.mean_tilt <= CENTRED and ((of.dim == 1 and of.horizon <= up_to) or of.frobenius <= SMALL)


def status_table() -> str:
    """Markdown table of `CLAIMS`, which docs/theory.md includes."""
    rows = ["| prediction | formula | status | range of this status | otherwise | test |", "| --- " * 6 + "|"]
    for name, claim in CLAIMS.items():
        formula = claim.formula.replace("|", "\\|")
        where, otherwise = claim.where.replace("|", "\\|"), claim.otherwise.value if claim.otherwise else "–"
        test = claim.test if claim.test == "–" else f"`{claim.test}`"
        rows.append(f"| `{name}` | {formula} | {claim.status.value} | {where} | {otherwise} | {test} |")
    return "\n".join(rows)
