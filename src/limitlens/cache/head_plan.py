"""What one head needs: the keys its error curve asks for in a context, and what its key/value head keeps then."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from limitlens.errors import InputError
from limitlens.probing.record import HeadRecord
from limitlens.probing.regimes import Regime
from limitlens.record import to_json
from limitlens.statistics.crossing import LINE_SIZES
from limitlens.statistics.error_curve import TokensFor
from limitlens.theory.prediction import Status


@dataclass(frozen=True)
class HeadPlan:
    """What one query head needs."""

    layer: int
    head: int
    kv_head: int
    regime: Regime | None  # None of a head that was predicted
    rate: float | None
    keys: TokensFor  # to keep, its sink included; where no number is known, all of a finite context (`beyond`)
    context: int | None  # keys there are: the context, or the layer's sliding window where that is shorter
    beside_sink: bool  # every context of the head contains a sink
    lower_bound: bool  # the pool itself has not converged for this head: the true number is likely larger

    @property
    def place(self) -> tuple[int, int]:
        """Layer and head."""
        return self.layer, self.head

    @property
    def needed(self) -> float:
        """The keys as a number to rank by: one that is not known is larger than all others."""
        return math.inf if self.keys.n is None else self.keys.n

    @property
    def ratio(self) -> float | None:
        """The share of the context that is kept."""
        return None if self.keys.n is None or self.context is None else self.keys.n / self.context

    @property
    def mark(self) -> str:
        """Where the number comes from: "measured", "extrapolated" or "beyond"."""
        return "beyond" if self.keys.beyond else "extrapolated" if self.keys.extrapolated else "measured"

    @property
    def status(self) -> Status:
        """Verified within the sizes measured; a heuristic outside them, beside a sink, and for frozen heads."""
        doubtful = self.keys.extrapolated or self.beside_sink or self.lower_bound
        return Status.HEURISTIC if doubtful else Status.VERIFIED

    def document(self) -> dict[str, Any]:
        """The plan of the head as JSON; `record.from_json` reads it back."""
        keys = {"predicted": self.keys.n, **to_json(self.keys), "ratio": self.ratio}
        keys |= {"lower_bound": self.lower_bound, "status": self.status.value}
        return {**to_json(self), "remedy": self.regime and self.regime.remedy, "keys": keys}


@dataclass(frozen=True)
class SharedPlan:
    """What one key/value head needs: the largest budget among the query heads that read it, and which head that is."""

    layer: int
    kv_head: int
    keys: int | None
    context: int | None
    decided_by: int
    mark: str

    @property
    def ratio(self) -> float | None:
        """The share of the context that is kept."""
        return None if self.keys is None or self.context is None else self.keys / self.context

    def document(self) -> dict[str, Any]:
        """The plan of the key/value head as JSON."""
        return {name: getattr(self, name) for name in ("layer", "kv_head", "keys", "ratio", "decided_by", "mark")}


def plan_head(head: HeadRecord, error: float, context: int | None) -> HeadPlan:
    """The plan of a head for an error in a context, endless when None."""
    if len(head.sizes) < LINE_SIZES:
        given = f"an error curve of {len(head.sizes)} sizes was given"
        raise InputError(f"{given}; expected at least {LINE_SIZES}, so probe more")
    asked = math.inf if context is None else context
    keys, own = head.keys_for(error, asked), head.context(asked)
    there = None if math.isinf(own) else int(own)
    if keys.why:  # no number, so no key can be spared
        keys = replace(keys, n=there, interval=(there, there), beyond=True)
    rate = None if head.curve.rate is None else head.curve.rate.slope
    place = (head.layer, head.head, head.kv_head)
    return HeadPlan(*place, head.regime, rate, keys, there, head.without_sink is not None, head.error_is_lower_bound)


def shared_plans(heads: Iterable[HeadPlan]) -> tuple[SharedPlan, ...]:
    """What each key/value head needs, in the order of layers and heads."""
    place = attrgetter("layer", "kv_head")
    most = (max(group, key=attrgetter("needed")) for _, group in groupby(sorted(heads, key=place), place))
    return tuple(SharedPlan(head.layer, head.kv_head, head.keys.n, head.context, head.head, head.mark) for head in most)
