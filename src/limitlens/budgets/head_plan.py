"""What one head needs: the budget of its error curve in a context of a given length.

Where every context contains a sink, the sink is one key that is always kept, and the curve of the rest is taken at the
share that the rest has in that context,

    e(n; C) = e_rest(n) · e(C)/e_rest(C),

with e the error curve beside the sink and e_rest without it: exact at n = C, and e_rest where C dilutes the sink. The
factor is a heuristic; beyond the sizes measured it tends to 1 as the sink's share falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.budgets.budget import Budget, budget_for
from limitlens.errors import Array
from limitlens.heads.regimes import Regime
from limitlens.theory.prediction import Status


@dataclass(frozen=True)
class HeadPlan:
    """What one query head needs.

    Attributes
    ----------
    keys : Budget
        Keys to keep, its sink included.
    context : int or None
        Keys there are: the context, or the layer's sliding window where that is shorter.
    beside_sink : bool
        Every context of the head contains a sink.
    lower_bound : bool
        The head is frozen: the pool itself has not converged, and the true number is larger.
    """

    layer: int
    head: int
    kv_head: int
    regime: Regime
    rate: float | None
    keys: Budget
    context: int | None
    beside_sink: bool
    lower_bound: bool

    @property
    def ratio(self) -> float | None:
        """The share of the context that is kept."""
        return None if self.keys.tokens is None or self.context is None else self.keys.tokens / self.context

    @property
    def mark(self) -> str:
        """Where the number comes from: "measured", "extrapolated" or "beyond"."""
        return "beyond" if self.keys.beyond else "extrapolated" if self.keys.extrapolated else "measured"

    @property
    def status(self) -> Status:
        """Verified within the sizes measured; a heuristic outside them, beside a sink, and for frozen heads."""
        doubtful = self.keys.extrapolated or self.beside_sink or self.lower_bound
        return Status.HEURISTIC if doubtful else Status.VERIFIED


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


def plan_head(head: Mapping[str, Any], error: float, context: int | None) -> HeadPlan:
    """The plan of a head from its record in a probe's document."""
    sliding = head.get("sliding_window")
    own = sliding if context is None else min(context, sliding or context)
    rate = head.get("rate")
    return HeadPlan(
        layer=head["layer"],
        head=head["head"],
        kv_head=head["kv_head"],
        regime=Regime.of(head["regime"]),
        rate=None if rate is None else rate["slope"],
        keys=_budget(head, error, own),
        context=own,
        beside_sink=head.get("without_sink") is not None,
        lower_bound=bool(head.get("error_is_lower_bound", False)),
    )


def _budget(head: Mapping[str, Any], error: float, context: int | None) -> Budget:
    """Keys that a head keeps of a context, its sink included."""
    sink = head.get("sink")
    atoms = 1 if sink is not None and "first token" in sink["kind"] else 0
    rest = math.inf if context is None else max(context - atoms, 1)
    sizes, errors, stderr = curve_in(head, rest)
    if not (np.isfinite(errors).all() and np.isfinite(stderr).all()):
        return Budget(context, (context, context), extrapolated=True, beyond=True)
    budget = budget_for(sizes, errors, stderr, error, rest)
    tokens, low, high = (None if n is None else n + atoms for n in (budget.tokens, *budget.interval))
    return Budget(tokens, (low, high), budget.extrapolated, budget.beyond)


def curve_in(head: Mapping[str, Any], context: float) -> tuple[Array, Array, Array]:
    """Sizes, relative errors and standard errors of a head's curve in a context of so many tokens besides its sink."""
    names = ("relative_output_error", "relative_output_error_stderr")
    sizes = np.asarray(head["n"], dtype=float)
    beside = [np.asarray(head[name], dtype=float) for name in names]
    if head.get("without_sink") is None:
        return sizes, beside[0], beside[1]
    rest = [np.asarray(head["without_sink"][name], dtype=float) for name in names]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = beside[0] / rest[0]
    if context <= sizes[-1]:
        factor = float(np.interp(math.log(context), np.log(sizes), ratio))
    else:
        length = head["sink"]["dilution_length"]
        dilution = 1 / length if length else 0.0  # null: a sink that no context dilutes
        left = (1 + dilution * sizes[-1]) / (1 + dilution * context) if dilution else 1.0  # of the sink's share
        factor = 1 - (1 - float(ratio[-1])) * left
    return sizes, rest[0] * factor, rest[1] * factor


def shared_plans(heads: Iterable[HeadPlan]) -> tuple[SharedPlan, ...]:
    """What each key/value head needs, in the order of layers and heads."""
    groups: dict[tuple[int, int], list[HeadPlan]] = {}
    for head in heads:
        groups.setdefault((head.layer, head.kv_head), []).append(head)
    return tuple(share(group) for _, group in sorted(groups.items()))


def share(group: Sequence[HeadPlan]) -> SharedPlan:
    """The largest budget of a group; one that is not known is larger than all others."""
    most = max(group, key=lambda head: math.inf if head.keys.tokens is None else head.keys.tokens)
    return SharedPlan(most.layer, most.kv_head, most.keys.tokens, most.context, most.head, most.mark)
