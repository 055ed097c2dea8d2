"""Time of simulation by order statistics at huge n against brute force: 2,000 sets of keys at critical β, d = 5."""

from __future__ import annotations

import numpy as np

from bench.timing import seconds
from limitlens.experiments.weight_samples import sample_direct, sample_weights
from limitlens.theory import KeyPoints, critical_beta, uniform


def run() -> dict[str, object]:
    law = uniform(5)

    def ordered(n: float) -> None:
        sample_weights(KeyPoints(law, n, critical_beta(n, law)), 2000, np.random.default_rng(0), 4)

    def direct() -> None:
        sample_direct(5, 100_000, critical_beta(1e5, law), 200, np.random.default_rng(0))

    times = {"ordered_1e5": seconds(lambda: ordered(1e5)), "ordered_1e10": seconds(lambda: ordered(1e10))}
    times["direct_1e5"] = 10 * seconds(direct)  # a tenth of the sets
    ratio = times["direct_1e5"] / times["ordered_1e5"]
    print(
        f"order statistics: {times['ordered_1e5']:.2f} s at n = 1e5, {times['ordered_1e10']:.2f} s at n = 1e10; "
        f"direct at n = 1e5 {times['direct_1e5']:.0f} s, ratio {ratio:.0f}"
    )
    return {"seconds": times, "ratio": ratio}
