"""Experiments on laws of tokens: error study, sweeps, hardmax, heavy tails, scaling limits, schedules, heat flow."""
