"""Choices of keys, one small file each: which keys a query keeps when it may keep only some of them."""

from limitlens.keys.random import Random
from limitlens.keys.recent import Recent
from limitlens.keys.sight import Choice, Sight, keep
from limitlens.keys.top import Top

CHOICES: dict[str, Choice] = {choice.name: choice for choice in (Random(), Recent(), Top())}

__all__ = ["CHOICES", "Choice", "Sight", "keep"]
