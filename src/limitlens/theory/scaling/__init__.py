"""Scaling limits of attention from one query: where it averages, selects or collapses, and what it does to a density.

`laws` says how keys lie around the query, `control` places β and n on the scale of θ, `points` and `weights` give the
expectations of the ordered weights and of the output, `top_weight` the law of the largest weight, `regimes` the two
sides of the critical scale, `heat` the flow of a density through layers. Everything is a pure function; the same
quantities are measured in `limitlens.experiments.scaling`.
"""

from limitlens.theory.scaling.control import (
    critical_beta,
    critical_beta_asymptotic,
    critical_n,
    critical_n_asymptotic,
    regime,
    theta,
    theta_asymptotic,
)
from limitlens.theory.scaling.heat import (
    ZonalFlow,
    drift_to_noise,
    gaussian_flow,
    heat_growth,
    mode_growth,
    rms_slope,
    token_noise,
    visible_until,
)
from limitlens.theory.scaling.laws import GapLaw, LocalPower, PowerGap, VonMisesFisherGap, subsphere, uniform
from limitlens.theory.scaling.points import KeyPoints, Points, PoissonPoints
from limitlens.theory.scaling.regimes import (
    Averaging,
    averaging,
    collapse_deficit,
    keys_holding,
    nearest_distance,
    shrinkage_expansion,
)
from limitlens.theory.scaling.top_weight import mean_inverse_top, mean_top, top_cdf
from limitlens.theory.scaling.weights import (
    beta_sharing,
    entropy,
    gap_mean,
    gap_variance,
    participation,
    tangential_variance,
)

__all__ = [
    "Averaging",
    "GapLaw",
    "KeyPoints",
    "LocalPower",
    "Points",
    "PoissonPoints",
    "PowerGap",
    "VonMisesFisherGap",
    "ZonalFlow",
    "averaging",
    "beta_sharing",
    "collapse_deficit",
    "critical_beta",
    "critical_beta_asymptotic",
    "critical_n",
    "critical_n_asymptotic",
    "drift_to_noise",
    "entropy",
    "gap_mean",
    "gap_variance",
    "gaussian_flow",
    "heat_growth",
    "keys_holding",
    "mean_inverse_top",
    "mean_top",
    "mode_growth",
    "nearest_distance",
    "participation",
    "regime",
    "rms_slope",
    "shrinkage_expansion",
    "subsphere",
    "tangential_variance",
    "theta",
    "theta_asymptotic",
    "token_noise",
    "top_cdf",
    "uniform",
    "visible_until",
]
