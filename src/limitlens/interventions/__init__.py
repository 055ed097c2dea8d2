"""Experiments that change attention in a live model: sampled keys, sparse designs, score factors, other contexts."""
