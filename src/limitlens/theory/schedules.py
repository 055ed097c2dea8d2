"""Temperature schedules for a context grown from n₀ to n keys, side by side.

    constant      β = β₀
    log           β = β₀ ln n / ln n₀               (Chen, Lin, Polyanskiy, Rigollet 2025; SSMax, Qwen)
    yarn          β = β₀ (0.1 ln(n/n₀) + 1)²        (YaRN scales queries and keys alike, hence the square)
    critical      θ(n, β) = θ(n₀, β₀)               (so β ~ β₀ (n/n₀)^{2/α}, α the local exponent of the keys)

Along each, θ, the number 1/EΣw² of keys that share the mass, and the entropy are given: exact at every n for a known
law of the keys, those of the scaling limit where only the local power law is known, as for a real head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from limitlens.errors import InputError
from limitlens.theory.scaling import control
from limitlens.theory.scaling.laws import GapLaw, Law
from limitlens.theory.scaling.points import KeyPoints, Points, PoissonPoints
from limitlens.theory.scaling.weights import entropy, participation


@dataclass(frozen=True)
class ScheduleStep:
    """Where one schedule stands at one context length."""

    n: float
    beta: float
    theta: float
    sharing_keys: float  # 1/EΣw²
    entropy: float
    regime: control.Regime


def rules(first: float, beta: float, law: Law) -> dict[str, Callable[[float], float]]:
    """β of n keys under each schedule, by its name, from β₀ = `beta` at n₀ = `first`: the formulas above."""
    reached = control.theta(first, beta, law)
    return {
        "constant": lambda n: beta,
        "log": lambda n: beta * math.log(n) / math.log(first),
        "yarn": lambda n: beta * (0.1 * math.log(n / first) + 1) ** 2,
        "critical": lambda n: control.critical_beta(n, law, reached),
    }


def compare_schedules(sizes: Sequence[float], beta: float, law: Law) -> dict[str, list[ScheduleStep]]:
    """Every schedule along growing context lengths, all starting from `beta` at the first of them.

    >>> steps = theory.compare_schedules([1000, 10_000], 100.0, theory.uniform(5))
    >>> {name: round(found[-1].sharing_keys, 2) for name, found in steps.items()}
    {'constant': 6.73, 'log': 4.29, 'yarn': 3.6, 'critical': 1.77}
    """
    if not sizes:
        raise InputError("no context lengths were given; expected at least one")
    first = control.check_keys(sizes[0])
    control.check_beta(beta)
    if any(later < earlier for earlier, later in pairwise(sizes)):
        raise InputError(f"the context lengths {list(sizes)} go down; expected them to grow from the first")
    return {name: [_step(n, rule(n), law) for n in sizes] for name, rule in rules(first, beta, law).items()}


def _step(n: float, beta: float, law: Law) -> ScheduleStep:
    reached = control.theta(n, beta, law)
    points: Points = KeyPoints(law, n, beta) if isinstance(law, GapLaw) else PoissonPoints(reached, law.a)
    shared = participation(points)
    return ScheduleStep(n, beta, reached, 1 / shared, entropy(points), control.regime(shared))
