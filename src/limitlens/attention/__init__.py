"""Attention: heads (`head`, `design`), what they output (`attend`, `limit`), their `scores`, `state` and `kernels`.

Import from the modules: heads are NumPy and load without torch, so that theory can use them.
"""
