"""Peak memory of code in a fresh process, on Linux."""

from __future__ import annotations

import subprocess
import sys

# The high-water mark of the process itself: that of getrusage starts from what the parent held when it was forked.
REPORT = """
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024)
"""


def peaks(code: str, sizes: tuple[int, int], unit: str = "tokens") -> tuple[dict[int, float], float]:
    """Peak resident memory in MiB of `code` for two sizes, passed as sys.argv[1], and the ratio of the two."""
    found = {}
    for size in sizes:
        command = [sys.executable, "-c", code + REPORT, str(size)]
        found[size] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"{size:>10,} {unit}: peak {found[size]:.0f} MiB", flush=True)
    ratio = found[sizes[1]] / found[sizes[0]]
    print(f"ratio {ratio:.3f}", flush=True)
    return found, ratio
