"""The critical temperature: one query among n keys at inverse temperature β, predicted beside measured.

`scaling_limits` (average, select or collapse), `schedules` of a growing context, `real_keys`, the backward `heat` flow.
"""
