"""Peak memory of a study at 100 thousand and at 10 million tokens, each in a fresh process."""

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


def run() -> dict[str, object]:
    found, ratio = peaks(CODE, (100_000, 10_000_000))
    return {"peak_mib": found, "ratio": ratio, "wanted": 1.1}
