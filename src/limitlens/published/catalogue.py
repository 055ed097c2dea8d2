"""The catalogue of published experiments (catalogue.json): parameters, claims, and where each of them stands.

A claim is a number or a bound that a paper proves, prints or draws. What only a figure shows is not read off it: there
is no number then, and the claim says so.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from limitlens.errors import InputError
from limitlens.record import from_json

SURE = 3.0  # standard errors within which two numbers agree: a page holds several pairs of them


@dataclass(frozen=True)
class Number:
    """A number that was found here, beside those of the publication."""

    value: float
    stderr: float | None = None  # None where nothing was sampled
    published: float | None = None  # by the published formula at the parameters of this run
    as_published: float | None = None  # by the definitions of the published code
    as_published_stderr: float | None = None


@dataclass(frozen=True)
class Claim:
    """What was published of one number."""

    says: str  # the number, in words
    where: str  # where the published one stands, or that there is none
    published: float | None = None  # None where there is none, or where the run computes it from a formula
    test: Literal["equal", "at least", "at most", "below"] = "equal"  # below: by more than the errors
    within: float = 0.0  # relative difference that is allowed beside the standard error, and told
    why: str = ""  # why ours differs, where it does

    def verdict(self, number: Number) -> tuple[float | None, str]:
        """The published number, and whether ours agrees with it, or why not."""
        theirs = self.published if number.published is None else number.published
        if theirs is None or math.isnan(number.value):
            return theirs, "no number to compare" if theirs is None else "not known at these sizes"
        gap, errors = number.value - theirs, SURE * (number.stderr or 0.0)
        beyond = {"equal": abs(gap), "at least": -gap, "at most": gap, "below": gap + 2 * errors}[self.test]
        if beyond <= errors:
            return theirs, "agrees within errors" if beyond > 0 else "agrees"
        if beyond <= errors + self.within * abs(theirs):
            return theirs, f"agrees within {100 * self.within:g}%"
        return theirs, f"differs: {self.why}" if self.why else "differs"


@dataclass(frozen=True)
class Experiment:
    """A published experiment."""

    title: str
    shows: str  # what it is about, in one sentence
    source: str  # the paper
    minutes: float  # of processor time that the full size takes, about
    expect: str  # what a reader should see
    published: Mapping[str, Any]  # the parameters of the publication,
    full: Mapping[str, Any]  # ours,
    quick: Mapping[str, Any]  # and what changes for a quick look
    deviations: tuple[str, ...]  # how ours differs from the publication on purpose
    figure: Mapping[str, Any]
    claims: Mapping[str, Claim]


@cache
def catalogue() -> dict[str, Experiment]:
    """Every experiment by name."""
    text = (resources.files("limitlens.published") / "catalogue.json").read_text(encoding="utf-8")
    return {name: from_json(Experiment, entry) for name, entry in json.loads(text).items()}


def named(name: str) -> Experiment:
    """The experiment of a name."""
    if name not in catalogue():
        raise InputError(f"there is no experiment {name!r}; expected one of {', '.join(catalogue())}")
    return catalogue()[name]
