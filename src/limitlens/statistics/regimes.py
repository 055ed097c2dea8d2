"""Regime of a head at the sizes measured: it averages over many keys, selects a few, or is frozen onto one key.

The regime follows from the effective tokens 1/Σw² at the largest n, the exponent γ of their growth n^γ, and the largest
weight. Thresholds are conventions, set where Gaussian scores of standard deviation τ change behaviour. Let L = √(2 ln
n). For τ < L/2 there are n e^{−τ²} effective tokens, more than √n. For τ > L the largest score dominates.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array, InputError
from limitlens.outcome import Outcome
from limitlens.statistics.bootstrap import random_stream, resample_counts

RESAMPLES = 200
SURE = 0.9  # share of agreeing resamples below which the reason says that the regime is uncertain
GROWTH_SIZES = 3  # γ is fitted to the last sizes: small samples rarely contain the tail of the weights
AVERAGING_POWER = 0.5  # an averaging head has at least n^power effective tokens at the largest n
AVERAGING_GROWTH = 0.75  # smallest exponent γ of an averaging head
FROZEN_WEIGHT = 0.5  # smallest value of a frozen head's largest weight
FROZEN_GROWTH = 0.3  # largest exponent γ of a frozen head


class Regime(Outcome):
    """How a head spreads its attention: over many keys, over some that depend on the tokens, or on one key."""

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
class RegimeVerdict:
    """Regime of a head (averaging, selective or frozen) and the reason in words."""

    regime: Regime
    reason: str
    growth: float | None  # exponent γ of the growth n^γ of the effective tokens; None for one n
    agreement: float | None = None  # share of the resamples with the same regime; None without resamples


def classify(effective_tokens: Array, sizes: Array, top_weight: float) -> RegimeVerdict:
    """Classify a head as averaging, selective or frozen, from its effective tokens 1/Σw² (J,) and its largest weight.

    Effective tokens are given at `sizes` (J,), the largest weight at the last size, means over queries. They are many
    and grow about like n if a head averages. If it is frozen, one weight holds most of the mass and they hardly grow.
    """
    tokens, n = np.asarray(effective_tokens, dtype=float), np.asarray(sizes, dtype=float)
    if tokens.shape != n.shape or n.ndim != 1 or not n.size:
        raise InputError(f"effective tokens {tokens.shape} and sizes {n.shape} do not match; expected one per size")
    if not (np.isfinite(tokens).all() and (tokens > 0).all() and 0 <= top_weight <= 1 + 1e-6):
        raise InputError("expected positive effective tokens and a largest weight of at most 1; recompute them")
    slope = float(effective_growth(tokens, n))
    growth = None if math.isnan(slope) else slope
    grows = "" if growth is None else f"; effective tokens grow like n^{growth:.2f}"
    shared = f"the weights are spread over {tokens[-1]:.3g} effective tokens of {int(n[-1]):,}{grows}"
    averaging, frozen = _regimes(tokens, n, np.asarray(top_weight))
    if averaging:
        return RegimeVerdict(Regime.AVERAGING, shared, growth)
    if frozen:
        held = f"one token holds {top_weight:.0%} of the mass at n = {int(n[-1]):,}"
        return RegimeVerdict(Regime.FROZEN, f"{held}; {shared}", growth)
    return RegimeVerdict(Regime.SELECTIVE, f"{shared}; the largest weight is {top_weight:.2g}", growth)


def resampled(
    verdict: RegimeVerdict, effective: Array, top: Array, members: Array, sizes: Array, seed: int
) -> RegimeVerdict:
    """Add to a head's verdict the share of bootstrap resamples that agree, and a doubt to its reason if few do.

    Replicates and clusters of queries (windows of text) are resampled. Effective tokens (W, C, J) and largest weights
    (W, C) are sums over the queries of each cluster, `members` (C,) many, in each of W replicates.
    """
    replicates, clusters = top.shape
    if clusters < 2:
        return verdict
    rows, columns = _weights(replicates, clusters, seed)
    queries = columns @ members
    tokens = rows @ effective.reshape(replicates * clusters, -1) / queries[:, None]
    averaging, frozen = _regimes(tokens, sizes, rows @ top.ravel() / queries)
    drawn = dict(zip(Regime, (averaging.mean(), (~averaging & ~frozen).mean(), frozen.mean()), strict=True))
    agreement = float(drawn.pop(verdict.regime))
    if agreement >= SURE:
        return replace(verdict, agreement=agreement)
    other = max(drawn, key=drawn.__getitem__)
    doubt = f"{agreement:.0%} of the resamples agree, {drawn[other]:.0%} say {other.value}"
    return replace(verdict, agreement=agreement, reason=f"{verdict.reason}; uncertain: {doubt}")


@lru_cache(maxsize=4)
def _weights(replicates: int, clusters: int, seed: int) -> tuple[Array, Array]:
    """Bootstrap weights of (replicate, cluster) pairs, and of clusters, (resamples, ·) each; cached for all heads."""
    generator = random_stream(seed, 0x4E61)
    rows, columns = (resample_counts(generator, count, RESAMPLES) / count for count in (replicates, clusters))
    return (rows[:, :, None] * columns[:, None]).reshape(RESAMPLES, -1), columns


def _regimes(tokens: Array, sizes: Array, top: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether heads (...) are averaging, and whether frozen, by effective tokens (..., J) and largest weights (...)."""
    growth = effective_growth(tokens, sizes)
    unknown = np.isnan(growth)
    many = tokens[..., -1] >= int(sizes[-1]) ** AVERAGING_POWER
    averaging = np.asarray(many & (unknown | (growth >= AVERAGING_GROWTH)))
    return averaging, ~averaging & (top >= FROZEN_WEIGHT) & (unknown | (growth <= FROZEN_GROWTH))


def effective_growth(tokens: Array, sizes: Array) -> Array:
    """Exponent γ (...) of the growth n^γ of effective tokens (..., J) over the last three sizes; NaN with one size."""
    x, y = np.log(sizes[-GROWTH_SIZES:]), np.log(tokens[..., -GROWTH_SIZES:])
    x = x - x.mean()
    with np.errstate(invalid="ignore"):
        slope = np.asarray(y @ x / (x @ x))
    return np.where(np.isfinite(slope), slope, np.nan)
