"""Predictions as pure functions of NumPy arrays: rates, bounds, limit theorems. No sampling, no torch.

`summary` gathers what is predicted for a law, a head and n. Behind it: `spectrum` (horizons, coupling), `rates`
(exponents), `token_influence` (moments of the outputs), `exact` and `curve` (error at finite n), `clt` (confidence),
`finite` and `bounds` (what holds at every n), `hardmax`, `heavy`, `scaling`, `schedules`.
Their functions are offered here, and loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitlens.theory._summary import *  # noqa: F403
    from limitlens.theory.bounds import *  # noqa: F403
    from limitlens.theory.clt import *  # noqa: F403
    from limitlens.theory.curve import *  # noqa: F403
    from limitlens.theory.exact import *  # noqa: F403
    from limitlens.theory.exact_bootstrap import *  # noqa: F403
    from limitlens.theory.finite import *  # noqa: F403
    from limitlens.theory.hardmax import *  # noqa: F403
    from limitlens.theory.heavy import *  # noqa: F403
    from limitlens.theory.prediction import *  # noqa: F403
    from limitlens.theory.proxy import *  # noqa: F403
    from limitlens.theory.rates import *  # noqa: F403
    from limitlens.theory.scaling.control import *  # noqa: F403
    from limitlens.theory.scaling.heat import *  # noqa: F403
    from limitlens.theory.scaling.laws import *  # noqa: F403
    from limitlens.theory.scaling.points import *  # noqa: F403
    from limitlens.theory.scaling.regimes import *  # noqa: F403
    from limitlens.theory.scaling.top_weight import *  # noqa: F403
    from limitlens.theory.scaling.weights import *  # noqa: F403
    from limitlens.theory.schedules import *  # noqa: F403
    from limitlens.theory.spectrum import *  # noqa: F403
    from limitlens.theory.token_influence import *  # noqa: F403

_MODULES = {
    "_summary": "Summary summary",
    "bounds": "UniformBound uniform_exponential uniform_gaussian uniform_supremum",
    "clt": "Ellipsoid Interval PlugIn asymptotic_covariance effective_sample_size ellipsoid interval "
    "Validity interval_validity observed_validity plug_in plug_in_degrees",
    "curve": "averaged_error_1d mean_error output_error query_error three_piece",
    "exact": "PointwiseError pointwise_error",
    "finite": "TiltCost tilt_cost",
    "hardmax": "hardmax_asymptotic hardmax_finite",
    "heavy": "Existence HeavyLaw laplace_K laplace_law laplace_limit student_law",
    "exact_bootstrap": "PilotErrors pilot_errors",
    "prediction": "Prediction Status",
    "proxy": "variance_proxy",
    "rates": "SharpLaw predictions rate_drawn rate_drawn_coupling rate_proved rate_rms rate_rms_output rate_sharp "
    "rate_sharp_output sharp_law",
    "scaling.control": "critical_beta critical_n regime theta",
    "scaling.heat": "ZonalFlow drift_to_noise gaussian_flow heat_growth mode_growth visible_until",
    "scaling.laws": "GapLaw LocalPower PowerGap VonMisesFisherGap named_law subsphere uniform",
    "scaling.points": "KeyPoints Points PoissonPoints",
    "scaling.regimes": "Averaging averaging collapse_deficit keys_holding nearest_distance shrinkage_expansion",
    "scaling.top_weight": "mean_inverse_top mean_top top_cdf",
    "scaling.weights": "beta_sharing entropy gap_mean gap_variance output_law participation tangential_variance",
    "schedules": "ScheduleStep compare_schedules",
    "spectrum": "Reach horizon_from_covariances mean_tilt reach reach_per_head whitened",
    "token_influence": "covariance_error_variance_1d influence mean_error_1d mean_error_covariance variance_error_1d",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'limitlens.theory' has no attribute {name!r}")
    return getattr(import_module(f"limitlens.theory.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
