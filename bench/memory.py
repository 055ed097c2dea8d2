"""Peak memory in fresh processes: of a study at 100 thousand and at 10 million tokens, and of runs with a memory limit.

`python -m bench.memory` measures only the runs with a memory limit.
"""

from __future__ import annotations

from bench.peaks import peaks

CODE = """
import sys
import numpy as np
import limitlens as ll
size = int(sys.argv[1])
law, head = ll.Gaussian(np.zeros(8), 1.0), ll.designed_head(np.eye(8), 1.0)
ll.study(law, head, [size // 100, size // 10, size], replicates=2, queries=64)
"""


# Under a bound, in bytes: what each would take without one is more.
BOUNDED = {
    "study of 64 dimensions": (
        """
import sys
import numpy as np
import limitlens as ll
law, head = ll.Gaussian(np.zeros(64), 1.0), ll.designed_head(np.eye(64), 1.0)
ll.study(law, head, [1000, 20_000], replicates=8, queries=512, memory=int(sys.argv[1]))
""",
        (360_000_000, 10**12),
    ),
    "probe of minilm": (
        """
import sys
import limitlens as ll
ll.probe("minilm", "stdlib-docs", 20_000, sizes="64:1024:5", replicates=4, memory=int(sys.argv[1]))
""",
        (1_050_000_000, 10**12),
    ),
}


def bounded() -> dict[str, object]:
    """Peak memory with and without a memory limit, in MiB, and the peak as a share of the limit."""
    found = {}
    for name, (code, bounds) in BOUNDED.items():
        print(name, flush=True)
        peak, _ = peaks(code, bounds, "bytes")
        found[name] = {"peak_mib": peak, "of_bound": peak[bounds[0]] * 2**20 / bounds[0], "wanted": 1.15}
        print(f"{found[name]['of_bound']:.3f} of the bound", flush=True)
    return found


def run() -> dict[str, object]:
    found, ratio = peaks(CODE, (100_000, 10_000_000))
    return {"peak_mib": found, "ratio": ratio, "wanted": 1.1, "bounded": bounded()}


if __name__ == "__main__":
    bounded()
