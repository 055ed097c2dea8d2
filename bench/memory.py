"""Peak memory of a study at 100 thousand and at 10 million tokens, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
import numpy as np, torch
import limitlens as ll
size = int(sys.argv[1])
curve = ll.study(ll.Gaussian(np.zeros(8), 1.0), ll.designed_head(np.eye(8), 1.0), [size // 100, size // 10, size], replicates=2,
                 queries=64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""  # noqa: E501


def peak(size: int) -> float:
    """Peak resident memory in MiB."""
    shown = subprocess.run([sys.executable, "-c", CODE, str(size)], capture_output=True, text=True, check=True)
    return float(shown.stdout)


def run() -> dict[str, object]:
    peaks = {size: peak(size) for size in (100_000, 10_000_000)}
    ratio = peaks[10_000_000] / peaks[100_000]
    for size, mebibytes in peaks.items():
        print(f"{size:>10,} tokens: peak {mebibytes:.0f} MiB")
    print(f"ratio {ratio:.3f}")
    return {"peak_mib": peaks, "ratio": ratio, "wanted": 1.1}
