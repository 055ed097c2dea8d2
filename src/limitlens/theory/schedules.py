"""Schedules of the inverse temperature β of attention for a context that grows from n₀ to n keys.

- constant: β = β₀
- log: β = β₀ ln n / ln n₀ (Chen, Lin, Polyanskiy, Rigollet 2025; SSMax, Qwen)
- yarn: β = β₀ (0.1 ln(n/n₀) + 1)² (YaRN scales queries and keys alike, hence the square)
- critical: θ(n, β) = θ(n₀, β₀), the effective number of keys (so β ~ β₀ (n/n₀)^{2/α}, α their local exponent)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError
from limitlens.theory.prediction import as_sizes
from limitlens.theory.scaling import control
from limitlens.theory.scaling.laws import GapLaw, Law
from limitlens.theory.scaling.points import KeyPoints, Points, PoissonPoints
from limitlens.theory.scaling.weights import entropy, participation


@dataclass(frozen=True)
class ScheduleStep:
    """Predicted attention over n keys under one temperature schedule: exact for a `GapLaw`, else a scaling limit."""

    n: float
    beta: float
    theta: float  # effective number of keys n E e^{−βD}, D = 1 − <q, k>
    sharing_keys: float  # number of keys that share the weight, 1/EΣw²
    entropy: float  # expected, of the softmax weights
    regime: control.Regime


def log_scale(n: ArrayLike, first: float) -> Array:
    """Score factor ln n / ln n₀, n₀ = `first`: keeps the entropy of equal scores (Chiang, Cholak, arXiv 2202.12172)."""
    return np.asarray(np.log(n) / math.log(first))


def yarn_scale(n: ArrayLike, first: float) -> Array:
    """Factor (0.1 ln(n/n₀) + 1)² on the scores of n keys, n₀ = `first`, as fitted for YaRN (arXiv 2309.00071)."""
    return np.asarray((0.1 * np.log(np.asarray(n) / first) + 1) ** 2)


def entropy_scale(n: ArrayLike, first: float, dim: int) -> Array:
    """Score factor √((1 − n^{−2/d})/(1 − n₀^{−2/d})), n₀ = `first`, d = `dim`: keeps the entropy (arXiv 2501.08570)."""
    return np.asarray(np.sqrt((1 - np.asarray(n, float) ** (-2 / dim)) / (1 - first ** (-2 / dim))))


def rules(first: float, beta: float, law: Law) -> dict[str, Callable[[float], float]]:
    """Schedules by name, each a function from the number of keys n to β, with β = `beta` at n = `first`."""
    theta = control.theta(first, beta, law)
    return {
        "constant": lambda n: beta,
        "log": lambda n: beta * float(log_scale(n, first)),
        "yarn": lambda n: beta * float(yarn_scale(n, first)),
        "critical": lambda n: control.critical_beta(n, law, theta),
    }


def compare_schedules(sizes: Sequence[float], beta: float, law: Law) -> dict[str, list[ScheduleStep]]:
    """Predict attention under every temperature schedule, by name, at context lengths `sizes`; all start with `beta`.

    >>> schedules = theory.compare_schedules([1000, 10_000], 100.0, theory.uniform(5))
    >>> {name: round(steps[-1].sharing_keys, 2) for name, steps in schedules.items()}
    {'constant': 6.73, 'log': 4.29, 'yarn': 3.6, 'critical': 1.77}
    """
    lengths = as_sizes(sizes).tolist()
    if not lengths:
        raise InputError("no context lengths were given; expected at least one")
    first = control.check_keys(lengths[0])
    control.check_beta(beta)
    if any(later < earlier for earlier, later in pairwise(lengths)):
        raise InputError(f"the context lengths {lengths} decrease; expected them to grow from the first")
    return {name: [_step(n, rule(n), law) for n in lengths] for name, rule in rules(first, beta, law).items()}


def _step(n: float, beta: float, law: Law) -> ScheduleStep:
    theta = control.theta(n, beta, law)
    points: Points = KeyPoints(law, n, beta) if isinstance(law, GapLaw) else PoissonPoints(theta, law.a)
    shared = participation(points)
    return ScheduleStep(n, beta, theta, 1 / shared, entropy(points), control.regime(shared))
