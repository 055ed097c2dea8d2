"""Time of a study relative to the published protocol, at equal standard error of the fitted rate.

The protocol draws fresh tokens for every size and replicate and attends all n queries over all n tokens with a dense
softmax; mean and covariance of the outputs are compared with those of the limit. d = 50, covariance 0.1 I, 12 sizes
1,000..30,000, random projections with entries of variance 1/d (small horizon), 1/4 and 1 (horizon above 1).

limitlens nests the sizes, so its points are correlated; its standard errors come from resampling whole replicates. The
sizes of the protocol are independent, so its standard errors come from the scatter at each size. Times, of all
processors, are scaled to the same standard error, which falls like 1/√replicates on both sides. The error of a ratio
comes from resampling the replicates of both sides.

Counts: the protocol computes 1.95e9 scores a replicate, a study 30,000 for each query, 250 times fewer at 256 queries.
Nested sizes need 2.7 times the replicates. At a small horizon control variates remove most of the scatter, which more
than compensates; above H = 1 they remove nothing, and more queries are needed. There the ratio is bounded: in 50
dimensions every query's tilt is near ‖B‖_F = 5 > √(2 ln n), so errors of single queries are as large as the outputs and
nearly independent (no linear map of the tokens explains more than a fifth of them), and none is rarer or larger than
the others, so stratified or weighted queries gain nothing. The square of their mean is at most 1/250 of theirs, so q
queries leave noise of 480/q of it at n = 30,000, and the variance of a slope is up to (1 + 480/q)² times that of all
queries. `limits` prints an upper bound on the gain of each remedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

import limitlens as ll
from limitlens.errors import Array
from limitlens.sampling.cells import parse_sizes

DIM, SIZES = 50, parse_sizes("1000:30000:12")
PLAIN_REPLICATES, OUR_REPLICATES, RESAMPLES = 10, 100, 1000
SCALES = {"variance 1/d": DIM**-0.5, "variance 1/4": 0.5, "variance 1": 1.0}


def random_head(scale: float) -> ll.Head:
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((DIM, DIM)) for _ in range(3))
    return ll.Head.from_projections(scale * q, scale * k, v / DIM**0.5)


def plain_outputs(n: int, A: torch.Tensor, V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Outputs of n fresh tokens over themselves, dense, float32: (n, d). At n = 30,000 it needs 7.2 GB."""
    tokens = 0.1**0.5 * torch.randn(n, DIM, generator=generator)
    return torch.softmax((tokens @ A.T) @ tokens.T, -1) @ (tokens @ V.T)


def line_weights() -> Array:
    """Weights w (sizes,) such that −w·y is the rate fitted to log errors y (sizes,)."""
    x = np.log(SIZES)
    return np.asarray((x - x.mean()) / np.square(x - x.mean()).sum())


def plain(head: ll.Head) -> tuple[dict[str, Array], float]:
    """Errors (replicates, sizes) of each moment by the protocol, and its processor seconds."""
    A, V = (torch.tensor(matrix, dtype=torch.float32) for matrix in (head.A, head.V))
    slope = head.V @ (0.1 * head.A)
    limit = torch.tensor(0.1 * slope @ slope.T, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    errors = {name: np.zeros((PLAIN_REPLICATES, len(SIZES))) for name in ("mean", "covariance")}
    started = time.process_time()
    for r in range(PLAIN_REPLICATES):
        for j, n in enumerate(SIZES):
            outputs = plain_outputs(n, A, V, generator)
            errors["mean"][r, j] = float(outputs.mean(0).norm())
            errors["covariance"][r, j] = float((torch.cov(outputs.T) - limit).norm())
    seconds = time.process_time() - started
    return errors, seconds


def plain_variance(found: Array) -> float:
    """Variance of the protocol's slope; its sizes are independent, and their relative scatter is pooled."""
    scatter = float((found.var(0, ddof=1) / found.mean(0) ** 2).mean())
    return scatter / len(found) * float(np.square(line_weights()).sum())


def spread_of(variance: Callable[[Array], float], rows: Array) -> Array:
    """Bootstrap resamples (RESAMPLES,) of a variance over replicates, relative to it."""
    generator, base = np.random.default_rng(0), variance(rows)
    apart = variance is plain_variance  # its sizes are independent; those of a study are nested: whole rows
    found = []
    for _ in range(RESAMPLES):
        drawn = generator.integers(len(rows), size=(len(rows), rows.shape[1] if apart else 1))
        found.append(variance(np.take_along_axis(rows, np.broadcast_to(drawn, rows.shape), 0)) / base)
    # Resampled rows have (k − 1)/k of the scatter.
    return np.asarray(found) * len(rows) / (len(rows) - 1)


def study_variance(rows: Array) -> float:
    """Variance of a study's slope from its rows |error| (replicates, sizes), to first order."""
    return float((rows / rows.mean(0) @ line_weights()).var(ddof=1)) / len(rows)


def limits(rows: Array, noise: float) -> dict[str, float]:
    """Upper bounds on the factor by which a remedy could reduce the variance of a study's slope at the same cost.

    The variance is proportional to the square of error and query noise together, of which the noise is a share `noise`
    (heuristic). `queries` removes the noise, `samples` everything but the noise. `allocation` replaces nested sizes by
    the optimal number of replicates of each: variance times tokens is then (Σ |w| s √n)², s the scatter at n.
    """
    relative, n, w = rows / rows.mean(0), np.asarray(SIZES, float), line_weights()
    apart = float((np.abs(w) * relative.std(0, ddof=1) * np.sqrt(n)).sum() ** 2)
    return {
        "queries": (1 - noise) ** -2,
        "samples": 1 / (1 - (1 - noise) ** 2),
        "allocation": float((relative @ w).var(ddof=1)) * n[-1] / apart,
    }


def single_queries(head: ll.Head, count: int = 1000, samples: int = 12) -> dict[str, float]:
    """Statistics of the errors of single queries over the largest samples, relative to their mean square.

    `square`: mean square error over mean square output. `weighted`: share of the noise left if queries are drawn with
    the best weights, |error| itself, (E|error|)²/E|error|². `explained`: share explained by the best linear map of the
    tokens, less that by chance. `mean`: square of the mean error over all tokens, less the noise of the queries.
    """
    A, V = (torch.tensor(matrix, dtype=torch.float32) for matrix in (head.A, head.V))
    slope, n, rows = 0.1 * V @ A, SIZES[-1], []
    for sample in range(samples):
        tokens = 0.1**0.5 * torch.randn(n, DIM, generator=torch.Generator().manual_seed(sample))
        query = tokens[:count]
        limits, outputs = query @ slope.T, torch.softmax((query @ A.T) @ tokens.T, -1) @ (tokens @ V.T)
        errors = outputs - limits
        squares = errors.square().sum(1)
        left = (errors - query @ torch.linalg.lstsq(query, errors).solution).square().sum() / (1 - DIM / count)
        mean = errors.mean(0) + (tokens @ slope.T).mean(0)
        weighted = squares.sqrt().mean().square() / squares.mean()
        found = (squares.mean() / outputs.square().sum(1).mean(), weighted, 1 - left / squares.sum())
        rows.append([*map(float, found), float(mean.square().sum() / squares.mean() - 1 / count)])
    names = ("square", "weighted", "explained", "mean")
    average, stderr = np.mean(rows, 0), np.std(rows, 0, ddof=1) / samples**0.5
    shown = (f"{name} {value:.4f} ± {error:.4f}" for name, value, error in zip(names, average, stderr, strict=True))
    print(f"  single queries at n = {n:,}: {', '.join(shown)}", flush=True)
    return dict(zip(names, average.tolist(), strict=True))


def against(label: str, scale: float) -> dict[str, object]:
    """Compare study and protocol on one head."""
    head = random_head(scale)
    theirs, their_seconds = plain(head)
    started = time.process_time()
    curve = ll.study(ll.Gaussian(np.zeros(DIM), 0.1), head, SIZES, replicates=OUR_REPLICATES)
    our_seconds = time.process_time() - started
    row: dict[str, object] = {
        "horizon": curve.theory["horizon"],
        "queries": curve.queries,
        "seconds": {"protocol": their_seconds, "study": our_seconds},
        "replicates": {"protocol": PLAIN_REPLICATES, "study": OUR_REPLICATES},
    }
    print(
        f"{label}: horizon {curve.theory['horizon']:.2f}; protocol {their_seconds:.0f} s for {PLAIN_REPLICATES} "
        f"replicates, study {our_seconds:.1f} s for {OUR_REPLICATES} with {curve.queries} queries"
    )
    row["single_queries"] = single_queries(head)
    for name, errors in theirs.items():
        rate, rows = curve.rate(name), np.asarray(curve.errors[name].rows)
        assert rate is not None
        slope, variance = -float(line_weights() @ np.log(errors.mean(0))), plain_variance(errors)
        ratio = their_seconds * variance / (our_seconds * rate.stderr**2)
        error = ratio * float((spread_of(plain_variance, errors) / spread_of(study_variance, rows)).std())
        noise = float(curve.query_noise[name][:, -1].mean() / (curve.replicate_errors[name][:, -1] ** 2).mean())
        most = limits(rows, noise)
        row[name] = {
            "protocol": {"slope": slope, "stderr": variance**0.5},
            "study": {"slope": rate.slope, "stderr": rate.stderr},
            "ratio": ratio,
            "ratio_stderr": error,
            "noise": noise,
            "limits": most,
        }
        print(
            f"  {name:<10} slope {slope:.3f} ± {variance**0.5:.4f} against {rate.slope:.3f} ± {rate.stderr:.4f}: "
            f"{ratio:.0f} ± {error:.0f} times less time at equal standard error; query noise is {noise:.0%} of the "
            f"squared error at n = {SIZES[-1]:,}; at most "
            + ", ".join(f"{factor:.2f} times as much by {what}" for what, factor in most.items()),
            flush=True,
        )
    return row


def run() -> dict[str, object]:
    return {"by_projection": {label: against(label, scale) for label, scale in SCALES.items()}, "wanted": 100}
