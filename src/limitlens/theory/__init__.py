"""Predictions as pure functions of NumPy arrays: rates, bounds, limit theorems. No sampling, no torch.

`reach` (horizons, coupling), `rates` (exponents), `constants` and `influence` (moments of the outputs), `exact` and
`curve` (finite-n error), `clt` and `validity` (confidence), `finite` and `bounds` (what holds at every n), `hardmax`,
`tails` and `heavy`, `scaling` and `schedules`; `summary` gathers them into one document.
"""
