"""What a probe of very many tokens costs on a cluster, counted from measured rates: `python -m bench.scale`.

One driver reads the text, deals its tokens and adds the shares; workers do the rest, and both go on at the same time,
so that the slower of the two sets the time. `--rate` is that of one worker, tokens a second of a whole probe: on a GPU
what `limitlens probe --device cuda` says of itself. Without it the rate is that of one core, from bench/results.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from bench.__main__ import RESULTS

HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    """Hours of each part of a probe on a cluster."""

    workers: float  # of all workers together, side by side
    reading: float  # of the driver: tokenising, dealing, adding the shares
    dealing: float
    adding: float

    @property
    def hours(self) -> float:
        """From the beginning to the end: text is read before the first window runs; the rest goes on together."""
        return self.reading + max(self.workers, self.dealing + self.adding)


def cost(tokens: float, workers: int, rate: float, driver: dict[str, float], shares: int = 8) -> Cost:
    """The cost of so many tokens on workers of this rate, of whom each sends so many shares."""
    return Cost(
        workers=tokens / (workers * rate) / HOUR,
        reading=tokens / driver["read_tokens_a_second"] / HOUR,
        dealing=tokens / driver["dealt_tokens_a_second"] / HOUR,
        adding=workers * shares * driver["share_seconds"] / HOUR,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e12)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rate", type=float, help="tokens a second of one worker; one core's when left out")
    given, path = parser.parse_args(), RESULTS / "cluster.json"
    if not path.exists():
        parser.error("there is no bench/results/cluster.json yet; run python -m bench cluster on a quiet machine first")
    found = json.loads(path.read_text())
    rate = found["probe_tokens_a_second"] if given.rate is None else given.rate
    made = cost(given.tokens, given.workers, rate, found["driver"])
    print(f"{given.tokens:.3g} tokens on {given.workers} workers of {rate:,.0f} tokens a second each")
    rows = {"workers, side by side": made.workers, "driver, reading": made.reading, "driver, dealing": made.dealing}
    for name, hours in (rows | {"driver, adding": made.adding, "from beginning to end": made.hours}).items():
        print(f"  {name:24} {hours:14,.2f} hours")
    print(f"  {'paid for':24} {given.workers * made.hours:14,.0f} worker-hours")


if __name__ == "__main__":
    main()
