"""Factors on the scores of a query at position p > n₀, beyond the trained window n₀; s = p/n₀, below it they are 1.

name       factor                                  where it comes from
constant   1
log        ln p / ln n₀                            entropy of equal scores; Chiang and Cholak, arXiv 2202.12172
yarn       (0.1 ln s + 1)²                         fitted for YaRN, arXiv 2309.00071, here with s of the query
yarn_all   (0.1 ln S + 1)², S the whole stretch    as YaRN is used: the same for all queries, those below n₀ too
entropy    √((1 − p^{−2/d}) / (1 − n₀^{−2/d}))     entropy invariance (InfoScale, arXiv 2501.08570); d: head dimension
and e^{c_h} s^{γ_h} of `models.exponents.powers`: one exponent a head, layer or model, and perhaps a constant.
"""

import math

from limitlens.arrays import Tensor
from limitlens.models.exponents import Factor


def schedules(trained: int, to: int, dim: int) -> dict[str, Factor]:
    """The schedules that are the same for all heads, by name."""

    def reach(position: Tensor) -> Tensor:
        return (position.double() + 1).clamp(min=trained)

    first = 1 - trained ** (-2 / dim)
    whole = (0.1 * math.log(to / trained) + 1) ** 2
    return {
        "constant": lambda layer, position: position.new_ones(1).double(),
        "log": lambda layer, position: reach(position).log() / math.log(trained),
        "yarn": lambda layer, position: (0.1 * (reach(position) / trained).log() + 1) ** 2,
        "yarn_all": lambda layer, position: position.new_ones(1).double() * whole,
        "entropy": lambda layer, position: ((1 - reach(position) ** (-2 / dim)) / first).sqrt(),
    }


def yarn_exponent(trained: int, to: int) -> float:
    """The γ whose power s^γ meets YaRN's factor at the end of the stretch: where fits begin."""
    whole = math.log(to / trained)
    return 2 * math.log(0.1 * whole + 1) / whole
