"""Run validations by name and keep their numbers under validation/results/: `python -m validation flags tails`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NAMED = ("flags", "tails", "ascent", "predict", "mutations")  # `make soak` runs those of validation.soak


def main() -> None:
    names = sys.argv[1:]
    unknown = [name for name in names if name not in NAMED]
    if unknown or not names:
        sys.exit(f"validation: {' '.join(unknown) or 'no name'} was given; expected some of {', '.join(NAMED)}")
    for name in names:
        print(f"== {name}", flush=True)
        result = importlib.import_module(f"validation.{name}").run()
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
