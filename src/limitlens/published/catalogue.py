"""Catalogue of published experiments (catalogue.json): their parameters, and the numbers that papers claim."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from limitlens.errors import InputError
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.record import from_json

# Parameters that make up the size of an experiment, in the order in which they are shown.
SIZES = (
    "corpus", "dim", "dims", "tokens", "documents", "test", "train", "window", "windows", "n", "beta", "sizes",
    "law_sizes", "key_sizes", "keys", "halves", "layers", "replicates", "law_replicates", "draws", "queries",
)  # fmt: skip
AGREE_STDERRS = 3.0  # standard errors within which two numbers agree, since a page compares several pairs


@dataclass(frozen=True)
class Number:
    """A number that we measured in a published experiment, with the published value of the same quantity."""

    value: Estimate  # the standard error of an exact number is NaN
    published: float | None = None  # published formula at the parameters of this run
    as_published: Estimate = UNKNOWN  # computed with the definitions of the published code


@dataclass(frozen=True)
class Claim:
    """What a paper says about one number: the published value or bound, and how to test whether ours agrees."""

    says: str  # description of the number
    where: str  # place of the published number in the paper, or that there is none
    published: float | None = None  # None if there is none outside a figure, or if a formula gives it
    test: Literal["equal", "at least", "at most", "below"] = "equal"  # below: by more than the standard errors
    within: float = 0.0  # relative difference that is allowed in addition to the standard error, and reported
    why: str = ""  # reason why ours differs
    setting: str = ""  # setting that the claim is about, where this run has another model or text

    def verdict(self, number: Number) -> tuple[float | None, str]:
        """Published value, and in words whether our `number` agrees with it."""
        theirs = self.published if number.published is None else number.published
        if theirs is None or not number.value.known:
            return theirs, "no number to compare" if theirs is None else "not known at these sizes"
        gap = number.value.value - theirs
        errors = 0.0 if math.isnan(number.value.stderr) else AGREE_STDERRS * number.value.stderr
        beyond = {"equal": abs(gap), "at least": -gap, "at most": gap, "below": gap + 2 * errors}[self.test]
        if beyond <= errors:
            outcome = "agrees within errors" if beyond > 0 else "agrees"
        elif beyond <= errors + self.within * abs(theirs):
            outcome = f"agrees within {100 * self.within:g}%"
        else:
            outcome = f"differs: {self.why}" if self.why else "differs"
        if self.setting:
            outcome = f"not comparable: the claim is about {self.setting}; here it {outcome}"
        return theirs, outcome


@dataclass(frozen=True)
class Experiment:
    """A published experiment: its paper, its parameters there and in this library, its figure and its claims."""

    title: str
    shows: str  # subject of the experiment, in one sentence
    source: str  # the paper
    minutes: float  # approximate processor time at full size
    expect: str  # the expected outcome
    published: Mapping[str, Any]  # parameters of the publication
    full: Mapping[str, Any]  # parameters here
    quick: Mapping[str, Any]  # parameters that a quick run changes
    deviations: tuple[str, ...]  # intentional differences from the publication
    figure: Mapping[str, Any]
    claims: Mapping[str, Claim]

    @property
    def model(self) -> str:
        """Model that the experiment runs on here, or that its tokens are random."""
        return str(self.full.get("model") or ", ".join([*self.full.get("heads", ()), "random tokens"]))

    @property
    def size(self) -> str:
        """Size of the experiment here: text, numbers of tokens, documents, replicates and queries."""
        return ", ".join(f"{name} {self.full[name]}" for name in SIZES if self.full.get(name) is not None)


@cache
def catalogue() -> dict[str, Experiment]:
    """All published experiments of catalogue.json, by name."""
    text = (resources.files("limitlens.published") / "catalogue.json").read_text(encoding="utf-8")
    return {name: from_json(Experiment, entry) for name, entry in json.loads(text).items()}


def named(name: str) -> Experiment:
    """The published experiment of this name; raises an `InputError` if there is none."""
    if name not in catalogue():
        raise InputError(f"there is no experiment {name!r}; expected one of {', '.join(catalogue())}")
    return catalogue()[name]
