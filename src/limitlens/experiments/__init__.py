"""Experiments on laws of tokens: study, sweeps, hardmax, heavy tails, scaling limits, schedules, heat flow."""
