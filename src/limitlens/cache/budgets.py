"""Numbers behind a cache plan: curves of random keys from a probe, and errors of budgets on held-out windows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.attention.policies import POLICIES
from limitlens.cache.cut import CutCurves
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.probing.result import ProbeRun
from limitlens.statistics.documents import jackknife

BEST, RANDOM = "best", "random"  # the best policy for each head, and the policy whose curve a probe measures


@dataclass(frozen=True)
class PolicyTotal:
    """Cache share and error of the whole model under one policy; `best` chooses a policy for each head."""

    policy: str
    oracle: bool
    share: float  # of the cache that is kept
    error: Estimate  # median over query heads on the windows that check the budgets
    error_high: float  # 90% quantile over query heads
    within: float | None  # share of query heads within the target error; None for a plan without one


def probe_errors(run: ProbeRun, curves: CutCurves, without_keys: Array) -> Array:
    """Errors (layers, heads, sizes) of n random keys of the context, from the error curves of a probe.

    Of C keys beside the sink, n have the error e(n) √(1 − n/C); e is the curve of the head without its sink, times the
    factor that the sink takes. Where the curve gives no number it is that `without_keys` (layers, heads), so that such
    a head keeps all keys.
    """
    errors = np.repeat(without_keys[..., None], len(curves.sizes), -1)
    for record in run.records:
        place = curves.layers.index(record.layer), record.head
        atoms = record.sink.keys if record.sink else 0
        rest = max(record.context(curves.context) - atoms, 1)
        factor = record.sink_factor(rest)
        for j, size in enumerate(curves.sizes):
            n = size - atoms
            if n >= rest:
                errors[place][j] = 0
            elif n >= 1:
                value = factor * record.curve_without_sink.predict(n)[0] * math.sqrt(1 - n / rest)
                errors[place][j] = value if math.isfinite(value) else errors[place][j]
    return errors


def at_keys(curves: Array, sizes: Sequence[int], keys: Any) -> Array:
    """Curves (policies, ..., sizes) at numbers of keys (...), linear between sizes: (policies, ...)."""
    flat = [[np.interp(n, sizes, row) for n, row in zip(keys.ravel(), rows.reshape(-1, len(sizes)), strict=True)]
            for rows in curves]  # fmt: skip
    return np.asarray(flat).reshape(curves.shape[:-1])


def policy_total(check: CutCurves, name: str, chosen: Any, keys: Any, error: float | None) -> PolicyTotal:
    """Errors of budgets on the windows that check them; their standard error is the jackknife's over windows."""
    policies, counts = (np.repeat(part, check.full.shape[2] // check.kv_heads, 1) for part in (chosen, keys))

    def errors_of(curves: CutCurves) -> Array:
        every = at_keys(curves.error(), check.sizes, counts)
        return np.asarray(np.take_along_axis(every, policies[None], 0)[0])

    errors, count = errors_of(check), len(check.full)
    left = [check.part(np.arange(count) != row) for row in range(count)]
    medians = np.array([np.median(errors_of(curves)) for curves in left] if count > 1 else [np.nan])
    stderr = float(jackknife(medians, 0))
    middle, high = np.quantile(errors, (0.5, 0.9)).tolist()
    within = None if error is None else float((errors <= error).mean())
    oracle = name != BEST and POLICIES[name].sees_queries
    share = float(keys.mean() / check.context)
    return PolicyTotal(name, oracle, share, Estimate(middle, stderr), high, within)
