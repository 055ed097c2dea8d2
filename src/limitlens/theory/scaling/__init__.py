"""Scaling limits of attention from one query: where it averages, selects or collapses, and what it does to a density.

`laws`: how keys lie around the query; `control`: the scale of θ; `points`, `weights`, `top_weight`: expectations of the
ordered weights and of the output; `regimes`: the two sides of the critical scale; `heat`: the flow of a density through
layers. `limitlens.theory` offers all their functions; `limitlens.critical` measures the same quantities.
"""
