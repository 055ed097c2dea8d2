"""Mutations for validation/mutations.py: source file, tests that should notice, and pairs of old and new text.

Tests are files, each followed by the names of its tests (without them: all). A third text is the reason why a mutation
survives.
"""

TABLE: list[tuple[str, str, list[tuple[str, ...]]]] = [
    ("statistics/bootstrap.py", "statistics/test_bootstrap.py", [
        ("by_replicate / max(replicates - 1, 1) / replicates", "by_replicate / max(replicates - 1, 1)"),
        ("2 * count / np.fmax(kurtosis - 1, 1)", "count / np.fmax(kurtosis - 1, 1)"),
        ("math.sqrt(count / max(count - 1, 1))", "math.sqrt(max(count - 1, 1) / count)"),
        ("np.square(np.add(over_replicates, over_clusters))", "np.square(np.subtract(over_replicates, over_clusters))"),
        ("special.stdtrit(freedom, upper) / special", "special.ndtri(upper) / special"),
    ]),
    ("statistics/critical_factor.py", "statistics/test_critical_factor.py "
     "test_each_row_is_solved_and_ties_are_infinite test_the_median_of_a_head_is_that_of_its_rows "
     "test_a_head_has_the_median_of_its_rows_with_an_error_that_covers", [
        ("((total + 1) // 2, total // 2 + 1)", "(total // 2, total // 2 + 1)"),
        ("factor * logs[1:, -1].std(0, ddof=1)", "logs[1:, -1].std(0, ddof=1)"),
        ("- padding >= KEYS) & (count > KEYS)", "- padding > KEYS) & (count > KEYS)"),
    ]),
    ("statistics/documents.py", "interventions/test_temper.py test_estimates_are_means_over_documents_of_differences "
     "interventions/test_depth.py test_standard_errors_are_those_of_documents", [
        ("difference.std(ddof=1)", "difference.std(ddof=0)"),
        ("(without_each.shape[axis] - 1) * without_each", "without_each.shape[axis] * without_each"),
        ("(total - one) / (count - 1)", "(total - one) / count"),
    ]),
    ("statistics/documents.py", "test_comparison.py", [
        ("(len(p_values) - rank) * p_values", "len(p_values) * p_values"),
        ("2 * special.stdtr(freedom", "special.stdtr(freedom"),
    ]),
    ("statistics/error_curve.py", "statistics/test_error_curve.py statistics/test_bootstrap.py", [
        ("self.error_moments.mean(0) / self.finite_population_correction**self.moment",
         "self.error_moments.mean(0) / self.finite_population_correction"),
        ("0.5 * np.log1p(-(inside ** (2 * beta)))", "0.5 * np.log1p(-(inside**beta))"),
        ("half = 1.96 * self.stderr", "half = 1.645 * self.stderr"),
        ("self.farthest / math.exp(x[-1])", "self.farthest / x[-1]"),
        ("widening * (logs[:, 1:] - logs[:, :1])", "(logs[:, 1:] - logs[:, :1])"),
        ("logs[0].mean() + slopes[0] * x.mean()", "logs[0].mean() - slopes[0] * x.mean()"),
    ]),
    ("statistics/error_curve.py", "statistics/test_fit.py test_local_slopes_see_a_bend", [
        ("return -np.diff(logs) / step", "return np.diff(logs) / step"),
    ]),
    ("statistics/estimators.py", "statistics/test_estimators.py test_sums_of_an_affine_image_are_those_of_the_image "
     "test_controls_have_expectation_zero_for_any_mean_covariance_and_reach "
     "test_each_row_is_corrected_by_the_fit_to_the_other_rows "
     "test_the_noise_of_few_queries_is_the_variance_of_their_means test_noise_that_is_known_leaves_less_scatter "
     "test_denoised_rows_carry_the_scatter_of_their_correction test_denoised_means_are_those_without_noise", [
        ("u[:, j] / (u[:, j] - u[:, i])", "u[:, j] / (u[:, j] + u[:, i])"),
        ("sigma @ C.T @ sigma", "sigma @ C @ sigma"),
        ("+ 2 * cross.square() + 4 * cross * square", "+ 2 * cross.square()"),
        ("residual / np.maximum(1 - leverage, 1e-9)", "residual / np.maximum(1 + leverage, 1e-9)"),
    ]),
    ("statistics/estimators.py", "experiments/test_study.py test_all_queries_reproduce_the_definition "
     "test_two_halves_measure_the_noise_of_the_queries "
     "test_few_queries_are_unbiased_for_the_squared_error_and_cheaper_than_no_control_variate", [
        ("Y_mean - G_mean + limit_mean - mean", "Y_mean - mean"),
        ("(Y_spread - G_spread) * ((n - 1) / n)", "(Y_spread - G_spread)"),
        ("correction = 1 - q / n", "correction = 1 + q / n"),
    ]),
    ("statistics/estimators.py", "probing/test_layer.py test_squares_are_those_of_pairs_from_different_windows "
     "test_query_noise_adds_nothing_on_average_and_its_scatter_is_known", [
        ("2 * shares - shares.mean(-1, keepdim=True)", "shares"),
        ("add_(DD, alpha=0.5)", "add_(DD, alpha=1.0)"),
    ]),
    ("statistics/regimes.py", "statistics/test_regimes.py statistics/test_bootstrap.py test_a_regime_has_a_certainty", [
        ("growth <= FROZEN_GROWTH", "growth >= FROZEN_GROWTH"),
        ("** AVERAGING_POWER", "* AVERAGING_POWER"),
        ("queries = columns @ members", "queries = members.sum() + 0 * (columns @ members)"),
    ]),
    ("statistics/tails.py", "statistics/test_tails.py test_generalised_pareto_fit_recovers_shape_and_scale "
     "test_pareto_shape_of_weights test_verdicts test_gaussian_tokens_are_rarely_called_heavy_tailed "
     "test_laplace_tokens_in_many_dimensions_are_not_called_sub_gaussian test_log_moment_curve_of_laplace_is_its_own "
     "test_standard_errors_of_log_moments_are_the_scatter_of_whole_samples", [
        ("min(0.2 * n, 3.0 * np.sqrt(n))", "min(0.2 * n, 1.0 * np.sqrt(n))"),
        ("[0] + 5.0) / (m + 10.0)", "[0] + 10.0) / (m + 10.0)"),
        ("np.sqrt(8 * gaussian / n)", "np.sqrt(2 * gaussian / n)"),
        ("(b * cube - slope) - b * second)", "(b * cube - slope) + b * second)"),
        ("(1.0 + max(shape, 0.0)) / float(np.sqrt(tail))", "(1.0 + max(shape, 0.0)) / float(tail)"),
    ]),
    ("statistics/tokens_for.py", "statistics/test_tokens_for.py test_a_budget_solves_the_error_in_its_context "
     "test_few_keys_are_extrapolated_downwards test_a_curve_that_rises_again_is_not_trusted "
     "test_budgets_beyond_the_prediction_are_the_whole_context_or_none statistics/test_error_curve.py", [
        ("0.5 * np.log1p(-np.exp(np.minimum(x - end, 0.0)))", "np.log1p(-np.exp(np.minimum(x - end, 0.0)))"),
        ("math.ceil(round(bounded, 6))", "math.floor(round(bounded, 6))"),
        ("x[-1] + math.log(reach)", "x[-1] + reach"),
    ]),
    ("theory/bounds.py", "theory/test_clt.py test_uniform_constants test_bounds_at_their_ends "
     "test_finite_bounds_hold_and_state_their_smallest_useful_n", [
        ("return _exp(2 * self.log_constant)", "return _exp(self.log_constant)"),
        ("np.sqrt(2 / np.pi) * (k % 2 == 0)", "np.sqrt(2 / np.pi) * (k % 2 == 1)"),
        ("/ (2 * (1 + self.chi_squared))", "/ (1 + self.chi_squared)"),
        ("* measure.radius + limit", "* measure.radius"),
    ]),
    ("theory/clt.py", "theory/test_clt.py test_gaussian_closed_form_and_values "
     "test_plug_in_covariance_is_the_sum_over_tokens test_the_degrees_of_a_law_are_those_its_samples_show "
     "test_observed_validity_uses_the_sample_alone test_validity_flags_agree_with_the_measured_coverage", [
        ("kurtosis - 1 / n", "kurtosis + 1 / n"),
        ("6 * middle * shift**2", "3 * middle * shift**2"),
        ("np.exp(cost[1] + 2 * cost[0])", "np.exp(cost[1] + cost[0])"),
        ("float(2 * t @ measure.grad_K(2 * t)", "float(t @ measure.grad_K(2 * t)"),
        ("(1 + level) / 2)", "level)"),
    ]),
    ("theory/curve.py", "theory/test_curve.py test_three_pieces_at_their_own_tilts "
     "test_limits_of_the_exact_error test_values_along_and_across_the_tilt_may_be_correlated "
     "test_pointwise_error_with_the_query_among_the_tokens test_pointwise_error_matches_simulation", [
        ("a2 + 2 * pull * a1", "a2 + pull * a1"),
        ("two_out = others * (others - 1)", "two_out = others * others"),
        ("square += 2 * np.sum(value_rest * value_along", "square += np.sum(value_rest * value_along"),
        ("np.exp(-((L - tau) ** 2) / 2)", "np.exp(-((L - tau) ** 2))"),
    ]),
    ("theory/exact_bootstrap.py", "theory/test_exact_bootstrap.py "
     "test_one_and_two_tokens_are_the_mean_over_all_samples "
     "test_with_replacement_it_is_the_infinite_replicate_bootstrap "
     "test_without_replacement_it_is_what_a_probe_measures", [
        ("(alone + (size - 1) * pairs)", "(alone + size * pairs)"),
        ("(along_left - lam * far * b1_left)", "(along_left + lam * far * b1_left)"),
        ("variance = share * (1 - share)", "variance = share"),
        ("STEP / (1 - n[:, None] / tokens)", "STEP"),
    ]),
    ("theory/weight_nodes.py", "theory/test_exact_bootstrap.py test_many_gaussian_tokens_have_the_gaussian_law "
     "test_one_and_two_tokens_are_the_mean_over_all_samples "
     "test_with_replacement_it_is_the_infinite_replicate_bootstrap", [
        ("1 / np.expm1(GAP)", "1 / GAP",
         "below noise: squared errors move by 0.4%, and stay within the 0.3% to which the grid is accurate"),
        ("xp.where(log_s < 0, lost, 1 + lost)", "xp.where(log_s < 0, 1 + lost, lost)"),
    ]),
    ("theory/hardmax.py", "theory/test_hardmax.py test_expected_maximum_of_few_normals "
     "test_laws_against_the_published_measurements", [
        ("(2.0 / pi) * expected**2 / n", "(1.0 / pi) * expected**2 / n"),
    ]),
    ("theory/heavy.py", "statistics/test_tails.py test_three_laws_of_laplace_tokens", [
        ('"participation", 1 - 1 / product', '"participation", 1 / product'),
    ]),
    ("theory/token_influence.py", "theory/test_rates.py "
     "test_constants_are_the_variances_of_the_influence_functions "
     "test_matrix_constant_agrees_with_its_trace_and_with_one_dimension "
     "test_matrix_constant_is_the_covariance_of_the_vector_influence test_expected_absolute_mean_of_known_laws", [
        ("10.0 * h4 + 4.0 * h4", "8.0 * h4 + 4.0 * h4"),
        ("core = C + B + B.T", "core = C + B - B.T"),
    ]),
    ("theory/spectrum.py", "theory/test_rates.py test_two_ways_to_the_same_reach "
     "test_reach_of_a_line_and_of_a_scaled_plane test_a_token_wins_its_own_softmax_exactly_when_predicted "
     "test_pre_asymptotic_slopes_are_not_the_exponent", [
        ("threshold = log(n) + self.frobenius**2 / 2", "threshold = log(n) - self.frobenius**2 / 2"),
    ]),
    ("theory/schedules.py", "interventions/test_temper.py test_schedules_begin_at_one_and_reach_what_they_say", [
        ("(0.1 * np.log(np.asarray(n) / first) + 1) ** 2", "(0.1 * np.log(np.asarray(n) / first) + 1)"),
    ]),
    ("theory/scaling/control.py", "theory/test_scaling_weights.py "
     "test_averaging_formulas_are_the_limit_of_the_exact_ones test_collapse_formula "
     "test_nearest_distance_is_that_of_order_statistics", [
        ("variance_2 + (mean - mean_2) ** 2", "variance_2 - (mean - mean_2) ** 2"),
        ("(2 * mean_2 - variance_2 - mean_2**2)", "(2 * mean_2 + variance_2 - mean_2**2)"),
        ("inverse = 1 / (2 * local.a)", "inverse = 1 / local.a"),
    ]),
    ("theory/scaling/points.py", "theory/test_scaling_weights.py test_weights_sum_to_one test_two_keys_exactly", [
        ("np.prod(1 - np.arange(chosen)", "np.prod(1 + np.arange(chosen)"),
    ]),
    ("theory/scaling/laws.py", "theory/test_scaling_laws.py test_constants_of_the_sphere test_control_parameter "
     "test_von_mises_fisher_agrees_with_its_measure", [
        ("- a * math.log(2) - math.log(a)", "- a * math.log(2)"),
    ]),
    ("probing/layer.py", "probing/test_layer.py test_errors_are_those_of_merged_states "
     "probing/test_probe.py test_curves_and_reference_are_those_of_dense_attention", [
        ("np.sqrt(1 - self.counts / self.pool)", "1 - self.counts / self.pool"),
        ("rest = (1 - here).float()", "rest = here.float()"),
    ]),
    ("probing/diagnostics.py", "probing/test_probe.py test_details_are_those_of_dense_attention", [
        ("torch.stack((peak, 2 * peak))", "torch.stack((peak, peak))"),
        ("entropy = mass.log() - torch", "entropy = mass.log() + torch"),
    ]),
    ("probing/diagnostics.py", "probing/test_probe.py test_geometry_is_that_of_the_pooled_queries_and_keys "
     "test_one_sided_horizon_and_coupling_come_from_weights_and_hidden_states", [
        ('"coupling": top * one_sided**2', '"coupling": top * one_sided'),
        ("(part[place] * abs(own.scale) for part", "(part[place] for part"),
    ]),
    ("probing/collect.py", "probing/test_probe.py test_geometry_is_that_of_the_pooled_queries_and_keys", [
        ("self.products / self.count - mean", "self.products / self.count + mean"),
    ]),
    ("probing/pilot.py", "statistics/test_regimes.py", [
        ("expit(log_length - np.log(", "expit(log_length + np.log("),
    ]),
    ("probing/pilot.py", "probing/test_probe.py test_the_sink_is_measured_against_the_rest", [
        ("sink_share(window - 1, log_length)", "sink_share(window, log_length)"),
    ]),
    ("probing/record.py", "cache/test_budgets.py", [
        ("(1 + dilution * n[-1]) / (1 + dilution * context)", "(1 + dilution * context) / (1 + dilution * n[-1])"),
        ("rest = max(self.context(context) - atoms, 1)", "rest = max(self.context(context) + atoms, 1)"),
        ("return 1 - (1 - float(ratio[-1])) * left", "return float(ratio[-1]) * left"),
    ]),
    ("probing/record.py", "report/test_report.py test_the_share_kept_is_that_of_the_neediest_heads", [
        ("max(kept for kept, _ in group)", "min(kept for kept, _ in group)"),
    ]),
    ("cache/budgets.py", "cache/test_budgets.py", [
        ("math.sqrt(1 - n / rest)", "math.sqrt(1 + n / rest)"),
        ("n = size - atoms", "n = size"),
        ("np.quantile(errors, (0.5, 0.9))", "np.quantile(errors, (0.9, 0.5))"),
        ("(errors <= error).mean()", "(errors > error).mean()"),
        ("np.arange(count) != row", "np.arange(count) == row"),
        ("/ (keys.size * check.context + beside)", "/ (len(keys) * check.context + beside)"),
    ]),
    ("cache/budgets.py", "cache/test_plan.py test_allocations_keep_to_the_total_and_fisher_weights_cost_least "
     "test_a_dent_in_a_cost_is_bridged", [
        ("len(sizes))) / widths", "len(sizes)))"),
        ("middle).sum() <= total", "middle).sum() >= total"),
        ("total // int(np.prod(shape))", "total // len(shape)"),
    ]),
    ("cache/budgets.py", "cache/test_plan.py test_fisher_costs_predict_the_divergence_of_a_perturbed_head", [
        (".mean(-1).mean(0) / 2", ".mean(-1).mean(0)"),
    ]),
    ("cache/cut.py", "cache/test_budgets.py "
     "test_the_total_of_a_policy_is_over_query_heads_with_a_jackknife_over_windows "
     "cache/test_plan.py test_keys_below_a_level "
     "test_curves_are_dense_attention_over_what_was_kept test_all_keys_make_no_error", [
        ("(low - level) / (low - high)", "(level - high) / (low - high)"),
        ("np.ceil(np.where(start >= last", "np.floor(np.where(start >= last"),
        ("np.sqrt(self.squared_error.mean(0)", "(self.squared_error.mean(0)"),
        ("square().sum(-1).mean(0)", "square().sum(-1).sum(0)"),
        ("linspace(context, call.key.shape[2] - 1, QUERIES", "linspace(context, call.key.shape[2] - 2, QUERIES"),
    ]),
    ("interventions/depth.py", "interventions/test_depth.py test_errors_are_those_of_a_run_by_hand "
     "test_layers_that_neither_amplify_nor_interfere_add_in_squares", [
        ("logs.exp() * (logs - other_logs)", "other_logs.exp() * (logs - other_logs)"),
        ("(states - mean).mT @ (states - mean) / len(states)", "states.mT @ states / len(states)"),
    ]),
    ("interventions/sampled_keys.py", "interventions/test_depth.py "
     "test_queries_of_a_decoder_keep_themselves_and_the_first_and_weigh_the_others", [
        ("ratio.clamp_min(1).log()", "-ratio.clamp_min(1).log()"),
    ]),
    ("interventions/stability.py", "interventions/test_stability.py test_measures_are_those_of_pairs_of_contexts "
     "test_the_lower_end_is_that_of_students_interval", [
        ("(weights.shape[-1] - 1) / 2", "weights.shape[-1] / 2"),
        ("(len(self.found) - 1, 0.975)", "(len(self.found) - 1, 0.95)"),
        ('low = rows["overlap"] - width', 'low = rows["overlap"] + width'),
    ]),
    ("interventions/designs.py", "interventions/test_designs.py "
     "test_fluctuations_of_equal_scores_are_the_variance_of_documents "
     "test_means_without_one_query_leave_out_its_document test_random_keys_are_those_of_the_probe", [
        ("(1 + share[..., 1:, :].square().sum(-1))", "(1 - share[..., 1:, :].square().sum(-1))"),
        ("1 + np.arange(count)]) / (count - 1)", "1 + np.arange(count)]) / count"),
        ('np.log(squares["fluctuation"]) / 2', 'np.log(squares["fluctuation"])'),
    ]),
    ("interventions/downstream.py", "interventions/test_downstream.py test_the_head_is_the_minimum_of_its_loss "
     "test_the_horizon_of_a_document_is_that_of_its_scores test_margins_are_relative_to_those_with_all_keys", [
        ("(shrinkage * weights).sum() / 2", "(shrinkage * weights).sum()",
         "nearly equivalent: only steps of the minimiser use the value, and it ends where the right gradient is zero"),
        ("weights[-1] -= centre @ weights[:-1]", "weights[-1] += centre @ weights[:-1]"),
        ("np.sqrt(change / full_square)", "change / full_square"),
    ]),
    ("interventions/planting.py", "interventions/test_temper.py test_planted_passages_are_repeated "
     "test_estimates_are_means_over_documents_of_differences", [
        ("earliest = trained + 2 * length", "earliest = 2 * length"),
        ("[tail - max(trained // 2, length)]", "[tail - 2 * trained]"),
    ]),
    ("interventions/temper_fit.py", "interventions/test_temper.py test_schedules_begin_at_one_and_reach_what_they_say "
     "test_the_loss_of_a_fit_weighs_plain_text_and_retrieval test_what_a_fit_feels_is_the_derivative_of_its_loss", [
        ("(squared_gradient / max(len(taken), 1)).sqrt()", "squared_gradient / max(len(taken), 1)"),
        ("(1 - weight) * plain + weight * far", "weight * plain + (1 - weight) * far"),
    ]),
    ("interventions/reader.py", "interventions/test_temper.py "
     "test_a_reader_has_the_loss_of_the_model_and_truncation_sees_no_further", [
        ("self.nll(ids[stop - window : stop])", "self.nll(ids[max(stop - 2 * window, 0) : stop])"),
    ]),
]  # fmt: skip
