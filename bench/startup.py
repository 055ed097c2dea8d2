"""Time of `limitlens theory` with start-up, relative to an interpreter that only imports NumPy."""

from __future__ import annotations

import subprocess
import sys

from bench.timing import alternate

QUESTION = "--measure gaussian --dim 1 --horizon 1.5 --n 30000 --json"


def run() -> dict[str, object]:
    def call(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    ask = f"from limitlens.cli import main; main('theory {QUESTION}'.split())"
    times = alternate(7, theory=lambda: call("-c", ask), numpy=lambda: call("-c", "import numpy"))
    ratio = times["theory"] / times["numpy"]
    print(f"limitlens theory {times['theory']:.2f} s, import numpy {times['numpy']:.2f} s, ratio {ratio:.1f}")
    return {"seconds": times, "ratio": ratio, "wanted_seconds": 2}
