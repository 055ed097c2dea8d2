"""Attention: heads (`head`, `design`), both sides of a comparison (`attend`), the mergeable `state`, its `kernels`.

Import from the modules: heads are NumPy and load without torch, so that theory can use them.
"""
