"""Simulations of attention over random tokens: error studies, sweeps, hardmax, heavy tails and scaling limits."""
