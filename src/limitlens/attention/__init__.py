"""Attention: heads (`head`, `design`), outputs (`attend`, `limit`), `scores`, mergeable `state`, and `kernels`.

Import from the modules: heads are NumPy and load without torch, so that theory can use them.
"""
