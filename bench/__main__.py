"""Run all benchmarks, or the named ones, and save their results under bench/results/."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from pathlib import Path

import torch

BENCHES = ("kernel", "memory", "startup", "scaling", "protocol", "probe", "ways")
# Run by name only: each takes a quarter of an hour.
MEASURED = ("cluster", "act", "depth", "shrink", "tails", "recall", "contexts", "certify", "certify_layer")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    names = sys.argv[1:] or BENCHES
    unknown = [name for name in names if name not in (*BENCHES, *MEASURED)]
    if unknown:
        sys.exit(f"bench: there is no {unknown[0]!r}; expected some of {', '.join((*BENCHES, *MEASURED))}")
    host = {"cores": torch.get_num_threads(), "machine": platform.machine(), "torch": torch.__version__}
    for name in names:
        print(f"== {name}", flush=True)
        result = importlib.import_module(f"bench.{name}").run()
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps({"host": host, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
