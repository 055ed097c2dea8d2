"""Choices of keys, one small file each: which keys a query keeps when it may keep only some of them."""

from limitlens.errors import InputError
from limitlens.keys.mixed import Mixed
from limitlens.keys.norm import Norm
from limitlens.keys.past import Accumulated, Expected
from limitlens.keys.random import Random, Unweighted
from limitlens.keys.recent import Recent
from limitlens.keys.sight import Choice, Kept, Sight, keep
from limitlens.keys.sinks import SinksRecent
from limitlens.keys.top import Top

_ALL = (Random(), Unweighted(), Recent(), SinksRecent(), Norm(), Accumulated(), Expected(), Mixed(), Top())
CHOICES: dict[str, Choice] = {choice.name: choice for choice in _ALL}


def named(name: str) -> Choice:
    """The choice of a name."""
    if name not in CHOICES:
        raise InputError(f"keys are chosen by {name!r}; expected one of {', '.join(CHOICES)}")
    return CHOICES[name]


__all__ = ["CHOICES", "Choice", "Kept", "Sight", "keep", "named"]
