"""Choices of keys, one small file each: which keys a query keeps when it may keep only some of them."""

from limitlens.errors import InputError
from limitlens.keys.mixed import Mixed
from limitlens.keys.norm import Norm
from limitlens.keys.past import Accumulated, Expected
from limitlens.keys.patterns import Block, Dilated, Strided, WindowRandom
from limitlens.keys.random import Random, Unweighted
from limitlens.keys.recent import Recent
from limitlens.keys.sight import Choice, Kept, Sight, keep
from limitlens.keys.sinks import SinksRecent
from limitlens.keys.top import Top

_ALL = (Random(), Unweighted(), Recent(), SinksRecent(), Norm(), Accumulated(), Expected(), Mixed(), Top())
CHOICES: dict[str, Choice] = {choice.name: choice for choice in _ALL}  # those that plans of a cache choose among
PATTERNS: dict[str, Choice] = {choice.name: choice for choice in (WindowRandom(), Strided(), Dilated(), Block())}


def named(name: str) -> Choice:
    """The choice of a name."""
    if name not in (known := CHOICES | PATTERNS):
        raise InputError(f"keys are chosen by {name!r}; expected one of {', '.join(known)}")
    return known[name]


__all__ = ["CHOICES", "PATTERNS", "Choice", "Kept", "Sight", "keep", "named"]
