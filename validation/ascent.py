"""Accuracy of the gradient ascent for the uniform error, against 240 random starts (docs/estimators.md)."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np

import limitlens as ll
from limitlens.attention.head import designed_head
from limitlens.errors import Array
from limitlens.experiments import uniform
from limitlens.experiments.reference import Reference
from limitlens.sampling.cells import Cells

FEW, MANY = 12, 240  # random starts: those of version 0.1, and as many as make the comparison


def run() -> dict[str, object]:
    """Share of the largest known error that the ascent finds (mean and minimum), and how often it is below 99%."""
    cube, circle = ll.Cube(8), ll.VonMisesFisher([1.0, 0.0], 5.0)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0]
    published = designed_head(cube.covariance, 0.33, spectrum="flat", seed=0)
    cases: list[tuple[str, ll.Measure, ll.Head, float, int, int]] = [
        ("cube d = 8, R = 3.5", cube.scaled(3.5 / cube.radius), published, 3.5, 2500, 40),
        ("cube d = 8, R = 2", cube.scaled(2 / cube.radius), published, 2.0, 2500, 20),
        ("vMF circle, A = 3, R = 3", circle, ll.Head(3 * np.eye(2)), 3.0, 1000, 60),
        ("vMF circle, A = 10, R = 2", circle, ll.Head(10 * np.eye(2)), 2.0, 1000, 60),
        ("sphere d = 3, A = 5, R = 3", ll.Sphere(3), ll.Head(5 * np.eye(3)), 3.0, 1000, 40),
        ("Gaussian d = 8, H = 0.3, R = √8", ll.Gaussian(np.zeros(8), 1.0), ll.Head(0.3 * turn), 8**0.5, 2500, 20),
        ("Gaussian d = 3, H = 1, R = 3", ll.Gaussian(np.zeros(3), 1.0), ll.Head(np.eye(3)), 3.0, 1000, 40),
    ]
    return {"cases": [_case(*case) for case in cases]}


def _case(name: str, law: ll.Measure, head: ll.Head, radius: float, n: int, replicates: int) -> dict[str, object]:
    reference, chunk = Reference(law, head, n, 0), range(replicates)
    found = uniform.uniform_errors(reference, Cells((n,)), chunk, radius)
    ours, missed = (part[:, 0] for part in found)
    ascent = uniform._Ascent(reference, chunk, radius)
    with patch.object(uniform, "CANDIDATES", FEW), patch.object(uniform, "AIMED", 0.0):
        with patch.object(uniform, "STEPS", 24):
            few = ascent.climb(ascent._spread(), n)[1].max(1)
        with patch.object(uniform, "CANDIDATES", MANY), patch.object(uniform, "STEPS", 48):
            many = ascent.climb(ascent._spread(), n)[1].max(1)
    best = np.maximum(np.maximum(few, many), ours)
    row: dict[str, object] = {"case": name, "n": n, "replicates": replicates, "missed": float(missed.mean())}
    row["missed_stderr"] = float(missed.std() / np.sqrt(replicates))
    told = []
    for way, value in (("12 random starts", few), ("ours", ours), ("240 random starts", many)):
        row[way] = _shares(value / best)
        told.append(f"{way}: mean {np.mean(value / best):.4f} worst {np.min(value / best):.3f}")
    told.append(f"half misses {missed.mean():.5f} ± {row['missed_stderr']:.5f}")
    print(f"{name:33} n = {n}: {'; '.join(told)}", flush=True)
    return row


def _shares(share: Array) -> dict[str, float]:
    stderr = float(share.std() / np.sqrt(len(share)))
    low = float((share < 0.99).mean())
    return {"mean": float(share.mean()), "stderr": stderr, "worst": float(share.min()), "low": low}
