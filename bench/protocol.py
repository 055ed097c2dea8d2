"""A study against the published protocol written plainly: the same fitted slopes at the same standard error.

The protocol draws fresh tokens for every size and replicate and attends all n queries over all n tokens with a dense
softmax; mean and covariance of the outputs are compared with the limit's. d = 50, covariance 0.1 I, 12 sizes
1,000..30,000, random projections with entries of variance 1/d (short reach), 1/4 and 1 (reach beyond 1).

limitlens nests the sizes, so its points are correlated; its standard errors come from resampling whole replicates. The
protocol's sizes are independent, so theirs come from the scatter at each size. Times are scaled to the same standard
error, which falls like 1/√replicates on both sides.

Floor: the protocol forms 1.95e9 scores a replicate, a study 30,000 for each query, 250 times fewer at 256 queries.
Nested sizes need 2.7 times the replicates. Short reach more than makes up for it, since most of the scatter is known
and taken out; beyond H = 1 nothing is, and more queries are needed.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import limitlens as ll
from limitlens.sampling.cells import parse_sizes

DIM, SIZES = 50, parse_sizes("1000:30000:12")
PLAIN_REPLICATES, OUR_REPLICATES = 6, 100
SCALES = {"variance 1/d": DIM**-0.5, "variance 1/4": 0.5, "variance 1": 1.0}


def random_head(scale: float) -> ll.Head:
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((DIM, DIM)) for _ in range(3))
    return ll.Head.from_projections(scale * q, scale * k, v / DIM**0.5)


def plain_outputs(n: int, A: torch.Tensor, V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Outputs of n fresh tokens over themselves, dense, float32: (n, d). At n = 30,000 it needs 7.2 GB."""
    tokens = 0.1**0.5 * torch.randn(n, DIM, generator=generator)
    return torch.softmax((tokens @ A.T) @ tokens.T, -1) @ (tokens @ V.T)


def plain(head: ll.Head) -> tuple[dict[str, tuple[float, float]], float]:
    """Slope and standard error of each moment by the protocol, and its wall time."""
    A, V = (torch.tensor(matrix, dtype=torch.float32) for matrix in (head.A, head.V))
    slope = head.V @ (0.1 * head.A)
    limit = torch.tensor(0.1 * slope @ slope.T, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    errors = {name: np.zeros((PLAIN_REPLICATES, len(SIZES))) for name in ("mean", "covariance")}
    started = time.perf_counter()
    for r in range(PLAIN_REPLICATES):
        for j, n in enumerate(SIZES):
            outputs = plain_outputs(n, A, V, generator)
            errors["mean"][r, j] = float(outputs.mean(0).norm())
            errors["covariance"][r, j] = float((torch.cov(outputs.T) - limit).norm())
    seconds = time.perf_counter() - started
    x = np.log(SIZES)
    fits = {}
    for name, found in errors.items():
        variance = (found.var(0, ddof=1) / found.mean(0) ** 2).mean()  # about the same at every size: pool it
        stderr = float(np.sqrt(variance / PLAIN_REPLICATES / ((x - x.mean()) ** 2).sum()))
        fits[name] = (-float(np.polyfit(x, np.log(found.mean(0)), 1)[0]), stderr)
    return fits, seconds


def run() -> dict[str, object]:
    results = {}
    for label, scale in SCALES.items():
        head = random_head(scale)
        theirs, their_seconds = plain(head)
        curve = ll.study(ll.Gaussian(np.zeros(DIM), 0.1), head, SIZES, replicates=OUR_REPLICATES)
        row: dict[str, object] = {
            "horizon": curve.reach.horizon,
            "queries": curve.queries,
            "seconds": {"protocol": their_seconds, "study": curve.seconds},
            "replicates": {"protocol": PLAIN_REPLICATES, "study": OUR_REPLICATES},
        }
        print(
            f"{label}: horizon {curve.reach.horizon:.2f}; protocol {their_seconds:.0f} s for {PLAIN_REPLICATES} "
            f"replicates, study {curve.seconds:.1f} s for {OUR_REPLICATES} with {curve.queries} queries"
        )
        for name, (slope, stderr) in theirs.items():
            rate = curve.rate(name)
            assert rate is not None
            ratio = their_seconds * stderr**2 / (curve.seconds * rate.stderr**2)
            row[name] = {
                "protocol": {"slope": slope, "stderr": stderr},
                "study": {"slope": rate.slope, "stderr": rate.stderr},
                "ratio": ratio,
            }
            print(
                f"  {name:<10} slope {slope:.3f} ± {stderr:.4f} against {rate.slope:.3f} ± {rate.stderr:.4f}: "
                f"{ratio:.0f} times less time at equal standard error"
            )
        results[label] = row
    return {"by_projection": results, "wanted": 100}
