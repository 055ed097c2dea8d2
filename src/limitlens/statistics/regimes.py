"""Regime of a head at the sizes measured: the head averages, selects among a few keys, or has frozen onto one key.

The regime follows from three numbers: the effective tokens 1/Σw² at the largest n, the exponent γ with which they grow
like n^γ over the last sizes, and the largest weight.

The limits between regimes are conventions, set where Gaussian scores of standard deviation τ change their behaviour.
Let L = √(2 ln n). For τ < L/2 the central limit theorem holds and there are n e^{−τ²} effective tokens, √n of them at
τ = L/2; for τ > L the largest score dominates. With n = 4096, L is 4.08, and γ is 0.77 at τ = 2 and 0.29 at τ = 4.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array, InputError
from limitlens.outcome import Outcome
from limitlens.statistics.bootstrap import random_stream, two_way_weights

RESAMPLES = 200
SURE = 0.9  # share of agreeing resamples below which the reason says that the regime is uncertain
GROWTH_SIZES = 3  # γ is fitted to the last sizes: small samples rarely contain the tail of the weights


class Regime(Outcome):
    """How a head spreads its attention over keys; the value of a member is the word shown in documents."""

    AVERAGING = (
        "averaging",
        "many keys share the attention mass, and more tokens add to them",
        "keep a random share of the KV entries, as large as the error curve asks for: the largest keys alone bias the "
        "average unless they hold nearly all of the mass",
    )
    SELECTIVE = (
        "selective",
        "some keys hold the attention mass, and which ones depends on the tokens seen",
        "keep the keys with the largest weights rather than random ones",
    )
    FROZEN = (
        "frozen",
        "one key holds most of the attention mass, and more tokens hardly change that",
        "keep the sink and the few largest keys: random samples miss them, and the error curve is a lower bound",
    )


@dataclass(frozen=True)
class Thresholds:
    """Effective tokens, growth exponents and largest weight that separate the regimes: conventions, not theorems."""

    averaging_power: float = 0.5  # an averaging head has at least n^power effective tokens at the largest n
    averaging_growth: float = 0.75  # smallest growth exponent γ of an averaging head's effective tokens
    frozen_weight: float = 0.5  # the largest weight of a frozen head is at least this
    frozen_growth: float = 0.3  # largest growth exponent γ of a frozen head's effective tokens

    def __post_init__(self) -> None:
        if not (0 <= self.averaging_power <= 1 and 0 < self.frozen_weight <= 1):
            given = f"averaging_power is {self.averaging_power:g} and frozen_weight {self.frozen_weight:g}"
            raise InputError(f"{given}; expected numbers in [0, 1] and in (0, 1]")
        if not self.frozen_growth <= self.averaging_growth:
            given = f"frozen_growth is {self.frozen_growth:g} and averaging_growth {self.averaging_growth:g}"
            raise InputError(f"{given}; expected the first to be no larger")


@dataclass(frozen=True)
class RegimeVerdict:
    """Regime of a head and the reason in words; `growth` is the exponent γ of its effective tokens, None for one n."""

    regime: Regime
    reason: str
    growth: float | None
    agreement: float | None = None  # share of the resamples with the same regime; None without resamples


def classify(
    effective_tokens: Array, sizes: Array, top_weight: float, thresholds: Thresholds | None = None
) -> RegimeVerdict:
    """Regime of a head, from its effective tokens 1/Σw² (J,) at sizes n (J,) and its largest weight at the last size.

    Averaging: many effective tokens, which grow about like n. Frozen: the largest weight holds most of the mass and the
    effective tokens hardly grow. Selective: everything between. All numbers are means over queries.
    """
    tokens, n = np.asarray(effective_tokens, dtype=float), np.asarray(sizes, dtype=float)
    if tokens.shape != n.shape or n.ndim != 1 or not n.size:
        raise InputError(f"effective tokens {tokens.shape} and sizes {n.shape} do not match; expected one per size")
    if not (np.isfinite(tokens).all() and (tokens > 0).all() and 0 <= top_weight <= 1 + 1e-6):
        raise InputError("expected positive effective tokens and a largest weight of at most 1; recompute them")
    slope = float(effective_growth(tokens, n))
    growth = None if math.isnan(slope) else slope
    grows = "" if growth is None else f", a number that grows like n^{growth:.2f}"
    shared = f"{tokens[-1]:.3g} of {int(n[-1]):,} tokens share the mass{grows}"
    averaging, frozen = _regimes(tokens, n, np.asarray(top_weight), thresholds or Thresholds())
    if averaging:
        return RegimeVerdict(Regime.AVERAGING, shared, growth)
    if frozen:
        held = f"one token holds {top_weight:.0%} of the mass at n = {int(n[-1]):,}"
        return RegimeVerdict(Regime.FROZEN, f"{held}, and {shared}", growth)
    return RegimeVerdict(Regime.SELECTIVE, f"{shared}, and the largest weight is {top_weight:.2g}", growth)


def resampled(
    verdict: RegimeVerdict, effective: Array, top: Array, members: Array, sizes: Array, seed: int,
    thresholds: Thresholds | None = None,
) -> RegimeVerdict:  # fmt: skip
    """The verdict on a head with the share of bootstrap resamples that agree added, and a doubt if few agree.

    Replicates and clusters of queries are resampled. Effective tokens (W, C, J) and largest weights (W, C) are sums
    over the `members` (C,) of each of C clusters in each of W replicates.
    """
    replicates, clusters = top.shape
    if clusters < 2:
        return verdict
    rows, columns = _weights(replicates, clusters, seed)
    queries = columns @ members
    tokens = rows @ effective.reshape(replicates * clusters, -1) / queries[:, None]
    averaging, frozen = _regimes(tokens, sizes, rows @ top.ravel() / queries, thresholds or Thresholds())
    drawn = dict(zip(Regime, (averaging.mean(), (~averaging & ~frozen).mean(), frozen.mean()), strict=True))
    agreement = float(drawn.pop(verdict.regime))
    if agreement >= SURE:
        return replace(verdict, agreement=agreement)
    other = max(drawn, key=drawn.__getitem__)
    doubt = f"{agreement:.0%} of the resamples agree, {drawn[other]:.0%} say {other.value}"
    return replace(verdict, agreement=agreement, reason=f"{verdict.reason}; uncertain: {doubt}")


@lru_cache(maxsize=4)
def _weights(replicates: int, clusters: int, seed: int) -> tuple[Array, Array]:
    """Bootstrap weights of (replicate, cluster) pairs and of clusters (`two_way_weights`), cached for all heads."""
    return two_way_weights(random_stream(seed, 0x4E61), replicates, clusters, RESAMPLES)


def _regimes(
    tokens: Array, sizes: Array, top: Array, limits: Thresholds
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether heads (...) are averaging, and whether frozen, by effective tokens (..., J) and largest weights (...)."""
    growth = effective_growth(tokens, sizes)
    unknown = np.isnan(growth)
    many = tokens[..., -1] >= int(sizes[-1]) ** limits.averaging_power
    averaging = np.asarray(many & (unknown | (growth >= limits.averaging_growth)))
    return averaging, ~averaging & (top >= limits.frozen_weight) & (unknown | (growth <= limits.frozen_growth))


def effective_growth(tokens: Array, sizes: Array) -> Array:
    """Exponent γ (...) of the growth n^γ of effective tokens (..., J) over the last three sizes; NaN with one size."""
    x, y = np.log(sizes[-GROWTH_SIZES:]), np.log(tokens[..., -GROWTH_SIZES:])
    x = x - x.mean()
    with np.errstate(invalid="ignore"):
        slope = np.asarray(y @ x / (x @ x))
    return np.where(np.isfinite(slope), slope, np.nan)
