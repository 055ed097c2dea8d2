"""Coverage of plug-in 95% intervals against their validity, over a grid of laws (docs/theory.md)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

import limitlens as ll
from limitlens.theory import Validity, interval_validity, observed_validity, plug_in

REPLICATES = 4000
WANTED = {Validity.VALID: (0.93, 0.97), Validity.DOUBTFUL: (0.0, 1.0), Validity.MEANINGLESS: (0.0, 0.9)}

GAUSSIAN = ll.Gaussian(0.0, 1.0)
GRID: list[tuple[str, ll.Measure, float, int]] = [
    *((f"two points, {1 - p:g} and {p:g}", ll.Discrete([[0.0], [1.0]], [1 - p, p]), 1.0, 1000)
      for p in (0.001, 0.003, 0.01, 0.02, 0.05)),
    *((f"three points, ±1 with {p:g} in all", ll.Discrete([[-1.0], [0.0], [1.0]], [p / 2, 1 - p, p / 2]), 0.0, 1000)
      for p in (0.005, 0.02)),
    *((".95 N(0, .25) + .05 N(0, 16)", ll.GaussianMixture([0.95, 0.05], [[0.0], [0.0]], [[[0.25]], [[16.0]]]), t, n)
      for t, n in ((0.3, 1000), (0.1, 1000), (0.1, 10_000))),
    *((".999 N(0, 1) + .001 N(6, .1)", ll.GaussianMixture([0.999, 0.001], [[0.0], [6.0]], [[[1.0]], [[0.1]]]), t, n)
      for t, n in ((0.5, 1000), (0.1, 10_000), (0.5, 30_000))),
    *(("Gaussian", GAUSSIAN, t, n) for t, n in (
        (0.0, 30), (0.3, 30), (0.5, 30), (0.3, 100), (0.5, 100), (0.5, 1000), (1.0, 1000), (1.5, 1000), (2.0, 1000),
        (3.0, 1000), (1.0, 10_000), (1.0, 30_000), (1.5, 10_000), (2.0, 10_000), (3.0, 10_000))),
    *(("sphere, d = 3", ll.Sphere(3), t, n) for t, n in ((2.0, 30), (8.0, 30), (2.0, 100), (8.0, 1000), (20.0, 1000))),
    *(("cube, d = 2", ll.Cube(2), t, n) for t, n in ((1.0, 30), (3.0, 100), (10.0, 1000))),
    *(("ball, d = 5", ll.Ball(5), t, n) for t, n in ((2.0, 100), (10.0, 1000), (30.0, 1000))),
    *(("sphere, d = 32", ll.Sphere(32), t, n) for t, n in ((3.0, 300), (8.0, 1000), (16.0, 1000))),
    *(("von Mises and Fisher, d = 2", ll.VonMisesFisher([1.0, 0.0], 5.0), t, n) for t, n in ((2.0, 100), (-8.0, 1000))),
]  # fmt: skip


def run() -> dict[str, object]:
    """Coverage of each law, and of random laws; a row says if the coverage contradicts its flag."""
    rows = [_interval(i, *of) for i, of in enumerate(GRID)]
    return {"intervals": rows, "random_laws": _random_laws()}


def _random_laws(count: int = 300, replicates: int = 1500) -> list[dict[str, object]]:
    """Coverage for random laws: discrete or Gaussian mixtures with random weights, tilts and sizes."""
    rng, rows = np.random.default_rng(7), []
    for seed in range(count):
        parts = int(rng.integers(2, 8))
        weights = np.maximum(rng.dirichlet(np.full(parts, 0.2)), 3e-4)
        weights, at = weights / weights.sum(), 2 * rng.standard_normal((parts, 1))
        points = bool(rng.random() < 0.5)
        law = ll.Discrete(at, weights) if points else ll.GaussianMixture(
            weights, at, 0.05 + rng.exponential(size=(parts, 1, 1))
        )  # fmt: skip
        t, n = 0.7 * rng.standard_normal(1), int(10 ** rng.uniform(1.5, 3.7))
        limit, generator, covered = law.grad_K(t), torch.Generator().manual_seed(seed), []
        for _ in range(replicates):
            tokens = law.sample(n, generator).numpy()
            found = plug_in(np.exp(tokens @ t - (tokens @ t).max()), tokens)
            lower, upper = found.interval()
            covered.append(lower[0] <= limit[0] <= upper[0])
        flag = interval_validity(law, t, n).value
        rows.append({"points": points, "n": n, "tilt": float(t[0]), "flag": flag, "measured": float(np.mean(covered))})
    for told in Validity:
        found = sorted(float(row["measured"]) for row in rows if row["flag"] == told.value)  # type: ignore[arg-type]
        ends = f"lowest {np.round(found[:3], 3)}, highest {np.round(found[-3:], 3)}"
        print(f"{count} random laws, {len(found)} {told.value}: coverage {ends}", flush=True)
    return rows


def _interval(seed: int, name: str, law: ll.Measure, tilt: float, n: int) -> dict[str, object]:
    t = tilt * np.eye(law.dim)[0]
    limit, generator = law.grad_K(t), torch.Generator().manual_seed(seed)
    covered, flags, normal = [], [], []
    for _ in range(REPLICATES):
        tokens = law.sample(n, generator).numpy()
        found = plug_in(np.exp(tokens @ t - (tokens @ t).max()), tokens)
        # Along the tilt, and across it once: the least of many measured coverages would be low by chance.
        lower, upper = found.interval()
        covered.append(((lower <= limit) & (limit <= upper))[:2])
        half = 1.959964 * np.sqrt(np.diagonal(found.covariance))  # of the normal interval
        normal.append((np.abs(found.output - limit) <= half)[:2])
        flags.append(observed_validity(float(found.degrees[:2].min())))
    coverage, plain = (float(np.mean(of, axis=0).min()) for of in (covered, normal))
    flag, observed = interval_validity(law, t, n), Counter(flags).most_common(1)[0][0]
    noise = float(np.sqrt(coverage * (1 - coverage) / REPLICATES))
    held = {
        way: WANTED[told][0] - 2 * noise <= coverage <= WANTED[told][1] + 2 * noise
        for way, told in (("law", flag), ("sample", observed))
    }
    shares = {told.value: flags.count(told) / REPLICATES for told in Validity}
    print(
        f"{name:34} t = {tilt:<4g} n = {n:<6} normal {plain:.3f}  student {coverage:.3f} ± {noise:.3f}  "
        f"law: {flag.value:12} sample: {observed.value:12} {shares['valid']:.2f} valid"
        + ("" if all(held.values()) else f"  DENIED {[way for way in held if not held[way]]}"),
        flush=True,
    )
    return {
        "law": name, "tilt": tilt, "n": n, "normal": plain, "measured": coverage, "stderr": noise, "flag": flag.value,
        "observed": observed.value, "observed_shares": shares, "held": held,
    }  # fmt: skip
