"""Estimated cost of a probe of very many tokens on a cluster, from measured rates: `python -m bench.scale`.

One driver reads the text, assigns its tokens and merges the shares; workers do the rest at the same time, so the slower
of the two determines the time. `--rate` is the tokens a second of one worker for a whole probe; for a GPU it is the
rate that `limitlens probe --device cuda` prints. The default is the rate of one core, from bench/results.
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

    workers: float  # all workers in parallel
    reading: float  # driver: tokenising
    assigning: float  # driver: assigning tokens to cells
    merging: float  # driver: merging the shares of the workers

    @property
    def hours(self) -> float:
        """Total time: the text is read before the first window runs; the rest runs in parallel."""
        return self.reading + max(self.workers, self.assigning + self.merging)


def cost(tokens: float, workers: int, rate: float, driver: dict[str, float], shares: int = 8) -> Cost:
    """Cost of a number of tokens on workers of this rate, each of which sends `shares` shares."""
    return Cost(
        workers=tokens / (workers * rate) / HOUR,
        reading=tokens / driver["read_tokens_a_second"] / HOUR,
        assigning=tokens / driver["dealt_tokens_a_second"] / HOUR,
        merging=workers * shares * driver["share_seconds"] / HOUR,
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
    rows = {"workers in parallel": made.workers, "driver, reading": made.reading, "driver, assigning": made.assigning}
    for name, hours in (rows | {"driver, merging": made.merging, "total": made.hours}).items():
        print(f"  {name:24} {hours:14,.2f} hours")
    print(f"  {'worker time':24} {given.workers * made.hours:14,.0f} worker-hours")


if __name__ == "__main__":
    main()
