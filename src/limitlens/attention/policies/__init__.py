"""Choices of keys, one small file each: which keys a query keeps when it may keep only some of them."""

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, Selection, keep
from limitlens.attention.policies.knorm import Norm
from limitlens.attention.policies.oracle_topk import Top
from limitlens.attention.policies.past import Accumulated, Expected
from limitlens.attention.policies.patterns import Block, Dilated, Strided, WindowRandom
from limitlens.attention.policies.priority import Mixed
from limitlens.attention.policies.random import Random, Unweighted
from limitlens.attention.policies.recent import Recent
from limitlens.attention.policies.streaming import SinksRecent
from limitlens.errors import InputError

_ALL = (Random(), Unweighted(), Recent(), SinksRecent(), Norm(), Accumulated(), Expected(), Mixed(), Top())
POLICIES: dict[str, KeyPolicy] = {choice.name: choice for choice in _ALL}  # those that plans of a cache choose among
PATTERNS: dict[str, KeyPolicy] = {choice.name: choice for choice in (WindowRandom(), Strided(), Dilated(), Block())}


def named(name: str) -> KeyPolicy:
    """The choice of a name."""
    if name not in (known := POLICIES | PATTERNS):
        raise InputError(f"keys are chosen by {name!r}; expected one of {', '.join(known)}")
    return known[name]


__all__ = ["PATTERNS", "POLICIES", "KeyPolicy", "PolicyInput", "Selection", "keep", "named"]
