"""Scaling limits of attention from one query over keys on a sphere: averaging, selection and collapse.

`laws`: distribution of the keys around the query; `control`: the parameter θ; `points`, `weights`, `top_weight`:
expectations of the ordered weights and of the output; `regimes`: the limits θ → ∞ and θ → 0; `heat`: evolution of a
density through layers. `limitlens.experiments.scaling` measures the same quantities.
"""
