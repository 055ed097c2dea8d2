"""Predictions as pure functions of NumPy arrays: rates, bounds, limit theorems. No sampling, no torch."""
