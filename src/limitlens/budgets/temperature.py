"""The inverse temperature that keeps a head as selective in a longer context as it is in a shorter one.

Pooling tokens over windows fixes their positions: n pooled tokens are not a context of n. So a schedule needs the head
probed at two window lengths L₀ < L₁. At each, the effective tokens N(L) are read off its curve at n = L: as many keys
as a window holds, with the positions of such a window. Between and beyond the two lengths N follows their power law.

Scaling the scores by b changes N by a law that a run does not record, so it is taken from Gaussian scores: with
N_G(n, τ) = E 1/Σw² for n independent scores of standard deviation τ,

    b = τ* / τ₁,    N_G(n, τ₁) = N(n),    N_G(n, τ*) = N(L₀).

This is a heuristic. Beside it stand the schedules of `theory.schedules`, all relative to the shorter window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from limitlens.errors import InputError
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.laws import LocalPower
from limitlens.theory.schedules import critical, logarithmic, yarn

FARTHEST = 10  # no factor is given past this many times the longer window
_SPREADS = np.concatenate(([0.0], np.geomspace(0.02, 40.0, 60)))
_SCORES = 1 << 21  # Gaussian scores behind the table of N_G


@dataclass(frozen=True)
class HeadTemperature:
    """What one head needs when the context grows.

    Attributes
    ----------
    effective_tokens : (float, float) or None
        N at the two window lengths.
    factor : float or None
        b, the factor on the scores that keeps the effective tokens of the shorter window.
    critical : float or None
        (n/L₀)^{2/α}, where the local exponent α of the keys is known.
    reason : str
        Why there is no factor; empty where there is one.
    """

    layer: int
    head: int
    effective_tokens: tuple[float, float] | None
    factor: float | None
    critical: float | None
    reason: str = ""


@dataclass(frozen=True)
class Temperatures:
    """Factors on the scores for a context of `context` tokens, relative to windows of `first` tokens."""

    first: int
    second: int
    context: int
    log: float
    yarn: float
    heads: tuple[HeadTemperature, ...]
    constant: float = 1.0

    @property
    def extrapolated(self) -> bool:
        """Whether the context lies outside the two window lengths."""
        return not self.first <= self.context <= self.second

    def document(self) -> dict[str, Any]:
        """The factors as JSON."""
        return {
            "windows": [self.first, self.second],
            "context": self.context,
            "extrapolated": self.extrapolated,
            "status": Status.HEURISTIC.value,
            "constant": self.constant,
            "log": self.log,
            "yarn": self.yarn,
            "heads": [asdict(head) for head in self.heads],
        }


def temperatures(run: Mapping[str, Any], second: Mapping[str, Any], context: int | None = None) -> Temperatures:
    """Factors for every head of a model that was probed at two window lengths.

    Parameters
    ----------
    run, second : documents of two probes of one model, in either order of their windows
    context : n, the longer window by default
    """
    if (run["model"], run.get("model_sha256")) != (second["model"], second.get("model_sha256")):
        raise InputError(
            f"the runs probed {run['model']!r} and {second['model']!r}; expected one model at two window lengths"
        )
    short, long = sorted((run, second), key=lambda document: int(document["window"]))
    first, last = int(short["window"]), int(long["window"])
    if first == last:
        raise InputError(
            f"both runs have windows of {first} tokens; expected two lengths, so probe again with another --window"
        )
    n = last if context is None else context
    if not first <= n <= FARTHEST * last:
        raise InputError(
            f"the context is {n:,} tokens and the windows {first:,} and {last:,}; expected a context from "
            f"{first:,} to {FARTHEST * last:,}, so probe with longer windows or leave the second run out"
        )
    others = {(head["layer"], head["head"]): head for head in long["heads"]}
    heads = tuple(_head(head, others.get((head["layer"], head["head"])), (first, last), n) for head in short["heads"])
    return Temperatures(first, last, n, logarithmic(n, first, 1.0, _ANY), yarn(n, first, 1.0, _ANY), heads)


_ANY = LocalPower(1.0, 0.0)  # schedules share a signature, and most of them ask nothing of the law


def _head(
    short: Mapping[str, Any], long: Mapping[str, Any] | None, windows: tuple[int, int], n: int
) -> HeadTemperature:
    layer, head = int(short["layer"]), int(short["head"])
    exponent = short.get("local_dimension")
    near = None if not exponent else critical(n, windows[0], 1.0, LocalPower(exponent / 2, 0.0))
    if long is None:
        return HeadTemperature(layer, head, None, None, near, "the second run did not measure this head")
    found = [effective_at(document, window) for document, window in zip((short, long), windows, strict=True)]
    if found[0] is None or found[1] is None:
        length = windows[0] if found[0] is None else windows[1]
        return HeadTemperature(
            layer, head, None, None, near, f"its run measured no samples of {length:,} tokens, as long as its windows"
        )
    before, after = found[0], found[1]
    growth = math.log(after / before) / math.log(windows[1] / windows[0])
    expected = before * (n / windows[0]) ** growth
    factor = _factor(n, expected, before)
    reason = "" if factor is not None else f"no factor on its scores makes {before:.3g} of {n:,} keys share the mass"
    return HeadTemperature(layer, head, (before, after), factor, near, reason)


def effective_at(head: Mapping[str, Any], n: float) -> float | None:
    """Effective tokens of a head in samples of n tokens, log-linear between the sizes measured; None outside them."""
    sizes, tokens = (np.asarray(head[name], dtype=float) for name in ("n", "effective_tokens"))
    if not sizes[0] <= n <= sizes[-1]:
        return None
    return float(np.exp(np.interp(math.log(n), np.log(sizes), np.log(tokens))))


@lru_cache
def _gaussian_tokens(n: int) -> tuple[float, ...]:
    """N_G(n, τ) = E 1/Σw² over n independent Gaussian scores, for every τ of `_SPREADS` from one set of draws."""
    generator = np.random.default_rng(n)
    rows = max(8, _SCORES // n)
    total = np.zeros(len(_SPREADS))
    for _ in range(rows):
        scores = generator.standard_normal(n)
        scores -= scores.max()
        for i, spread in enumerate(_SPREADS):
            weights = np.exp(spread * scores)
            total[i] += weights.sum() ** 2 / np.square(weights).sum()
    return tuple(total / rows)


def _factor(n: int, now: float, wanted: float) -> float | None:
    """b that takes the effective tokens from `now` to `wanted`; None outside what Gaussian scores can do."""
    # N_G falls with τ for every set of scores, hence also in the mean: it can be inverted by interpolation.
    x = np.log(_gaussian_tokens(n))[::-1]
    if not all(x[0] <= math.log(tokens) <= x[-1] for tokens in (now, wanted)):
        return None
    before, after = (float(np.interp(math.log(tokens), x, _SPREADS[::-1])) for tokens in (now, wanted))
    return after / before if before > 0 else None
