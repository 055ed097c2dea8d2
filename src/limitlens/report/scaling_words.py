"""What the numbers of a scaling document are called, on the page and in a terminal."""

from __future__ import annotations

QUANTITIES = {
    "participation": "Σw², the share of an effective key",
    "top_weight": "largest weight",
    "inverse_top_weight": "1 / largest weight",
    "entropy": "entropy (nats)",
    "keys_holding_90": "keys that hold 90% of the mass",
    "output_gap": "output gap β(1 − <q, Γ>)",
    "output_gap_variance": "its variance",
    "output_tangential_variance": "variance across the query, × β",
}
SIDES = {
    "averaging": {
        "mean": "output along the query",
        "bias": "its bias at order 1/n",
        "radial_variance": "its variance",
        "tangential_variance": "variance across",
        "effective_sample_size": "effective sample size",
    },
    "collapse": {"one_minus_top_weight": "1 − largest weight", "nearest_distance": "distance of the nearest key"},
}
# Shorter where a terminal's column is narrow.
TERSE = {
    "participation": "Σw²",
    "top_weight": "top weight w₁",
    "inverse_top_weight": "1/w₁",
    "entropy": "entropy",
    "keys_holding_90": "keys holding 90%",
    "output_tangential_variance": "variance across, × β",
    "one_minus_top_weight": "1 − w₁",
}
