"""Attention: heads, the mergeable state, and the kernels that make it."""

from limitlens.attention.attend import attend, attend_state, limit
from limitlens.attention.head import Head
from limitlens.attention.state import Detail, State, merge_all

__all__ = ["Detail", "Head", "State", "attend", "attend_state", "limit", "merge_all"]
