"""Remedies for a study at far reach, each tried alone: what it does to time at equal standard error of a slope.

The case is the last one of `protocol`: d = 50, horizon 1.68, 12 nested sizes 1,000..30,000. Slopes are those of root
mean squares, freed of query noise. A gain is the variance of a slope times the processor seconds it took, before over
after; its error comes from resampling replicates, paired where both have the same.

- `shrunk`: the control of the queries is κΓ in place of Γ, with κ the regression of the outputs on their limits from
  replicates of its own: one number a size, so nothing is biased.
- `popular`: tokens that many queries see carry the error of the mean. With σ² the variance of a token's scores over
  queries and h = e^{0.1 (σ² − Eσ²)} V x, odd in x, |Σ h|² − Σ |h|² has expectation 0, exactly: a control variate.
- `fewer`: as few queries as make variance times time least.
- `overlap`: 64 blocks of tokens a replicate and its queries' own; any 8 of the blocks with those are a sample of the
  right size, and errors are averaged over many samples that overlap. Tokens cost 8 times as much, samples nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.protocol import DIM, SCALES, SIZES, line_weights, random_head
from limitlens.attention.kernels import cpu
from limitlens.curves.controls import controlled
from limitlens.errors import Array

NAMES = ("mean", "covariance")
REPLICATES, PILOT, QUERIES, FEWER = 160, 4, 992, 608
BLOCKS, TAKEN, SAMPLES, POOLED, POOLED_QUERIES = 64, 8, 128, 32, 512
RESAMPLES = 1000


class Case:
    """Tokens and the parts of the head, float32; Γ(x) = slope x."""

    def __init__(self) -> None:
        head = random_head(SCALES["variance 1"])
        self.A, self.V = (torch.tensor(matrix, dtype=torch.float32) for matrix in (head.A, head.V))
        self.slope = 0.1 * self.V @ self.A
        self.limit = (0.1 * self.slope @ self.slope.T).double()
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, *shape: int) -> Tensor:
        """So many fresh ones, (*shape, d)."""
        return 0.1**0.5 * torch.randn(*shape, DIM, generator=self.generator)

    def squares(self, Y: Tensor, G: Tensor, first: Tensor, second: Tensor, n: int, k: float) -> tuple[Tensor, Tensor]:
        """Squared errors (s,) of both moments without query noise, from Y (s, q, v), G (q, v) and sums of Γ."""
        q, G, m = Y.shape[1], k * G, k * first / n
        D = Y - G
        centre, Gc = D.mean(1), G - G.mean(0)
        Dc, left = D - centre[:, None], 1 - q / n
        square, cross = Dc.square().sum(-1), (Gc * Dc).sum(-1)
        half = Gc.T @ Dc + Dc.mT @ Dc / 2
        own = half + half.mT
        spread = (own * ((n - 1) / n / (q - 1))).double() + k**2 * second / n - m[:, :, None] * m[:, None] - self.limit
        single = 2 * Gc.square().sum(-1) * square + 2 * cross.square() + 4 * cross * square + square.square()
        noise = (single.mean(-1) - (own / q).square().sum((-1, -2))) * left / (q - 1)
        mean = (centre + m).double().square().sum(-1) - square.mean(-1) * left / (q - 1)
        return mean, spread.square().sum((-1, -2)) - noise


def merged(lse: Tensor, output: Tensor, more: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, more[0])
    return total, torch.lerp(output, more[1], torch.exp(more[0] - total)[..., None])


def nested(case: Case, queries: int, shrink: Array) -> tuple[Array, Array, Array]:
    """One plain replicate: squares (2, kinds, sizes) for each row of `shrink`, the control of `popular`, and κ."""
    X = case.tokens(SIZES[-1])
    values, limits, query = X @ case.V.T, X @ case.slope.T, X[:queries] @ case.A.T
    sigma = 0.1 * (X @ case.A).square().sum(1)
    popular = torch.exp(0.1 * (sigma - 0.01 * case.A.square().sum()))[:, None] * values
    lse, output = torch.full((queries,), -torch.inf), torch.zeros(queries, DIM)
    first, second, start = torch.zeros(DIM), torch.zeros(DIM, DIM), 0
    total, own = torch.zeros(DIM), 0.0
    squares, control, kappa = np.zeros((2, len(shrink), len(SIZES))), np.zeros(len(SIZES)), np.zeros(len(SIZES))
    for j, n in enumerate(SIZES):
        lse, output = merged(lse, output, cpu.attend(query[None], X[None, start:n], values[None, start:n]))
        lse, output, new, start = lse.view(-1), output.view(-1, DIM), slice(start, n), n
        first, second = first + limits[new].sum(0), second + limits[new].T @ limits[new]
        total, own = total + popular[new].sum(0), own + float(popular[new].square().sum())
        q = min(queries, n)
        Y, G = output[None, :q], limits[:q]
        for i, k in enumerate(shrink[:, j]):
            squares[:, i, j] = [float(part) for part in case.squares(Y, G, first[None], second[None].double(), n, k)]
        control[j] = (float(total.square().sum()) - own) / n**2
        kappa[j] = float((Y[0] * G).sum() / G.square().sum())
    return squares, control, kappa


def overlapping(case: Case, kappa: Array) -> Array:
    """One replicate of blocks: squares (2, sizes), averaged over samples. The covariance takes disjoint ones alone."""
    most, apart = POOLED_QUERIES, BLOCKS // TAKEN
    chooser = np.random.default_rng(0)
    lse, output = torch.full((BLOCKS + 1, most), -torch.inf), torch.zeros(BLOCKS + 1, most, DIM)
    first, second = torch.zeros(BLOCKS + 1, DIM), torch.zeros(BLOCKS + 1, DIM, DIM)
    home = case.tokens(most + 2 * TAKEN)
    query, squares = home[:most] @ case.A.T, np.zeros((2, len(SIZES)))
    had, length = 0, 0
    for j, n in enumerate(SIZES):
        q = min(most, n // 4)
        own = max(q, had)
        own += (n - own) % TAKEN
        block = case.tokens(BLOCKS, (n - own) // TAKEN - length)
        for where, X in ((slice(0, 1), home[None, had:own]), (slice(1, None), block)):
            if X.shape[1]:
                more = cpu.attend(query.expand(len(X), -1, -1), X, X @ case.V.T)
                lse[where], output[where] = merged(lse[where], output[where], more)
                limits = X @ case.slope.T
                first[where], second[where] = first[where] + limits.sum(1), second[where] + limits.mT @ limits
        had, length = own, (n - own) // TAKEN
        chosen = torch.zeros(SAMPLES, BLOCKS + 1)
        chosen[:, 0] = 1
        for s in range(0, SAMPLES, apart):
            order = chooser.permutation(BLOCKS).reshape(apart, TAKEN)
            chosen[torch.arange(s, s + apart)[:, None], torch.from_numpy(1 + order)] = 1
        weight = torch.exp(lse[:, :q] - lse[:, :q].amax(0))
        share = chosen[:, :, None] * weight / (chosen @ weight)[:, None]
        G, k = home[:q] @ case.slope.T, float(kappa[j])
        means = (share.flatten(1) @ output[:, :q].flatten(0, 1)) / q - k * G.mean(0) + k * (chosen @ first) / n
        Y = torch.einsum("sbq,bqv->sqv", share[:apart], output[:, :q])
        sums = chosen[:apart] @ first, (chosen[:apart] @ second.flatten(1)).view(apart, DIM, DIM).double()
        mean, spread = case.squares(Y, G, *sums, n, k)
        noise = means[:apart].double().square().sum(-1).mean() - mean.mean()  # what `squares` took out
        squares[:, j] = float(means.double().square().sum(-1).mean() - noise), float(spread.mean())
    return squares


def variance(rows: Array) -> float:
    """Variance of the slope of one replicate, from squares (replicates, sizes)."""
    return float((rows / rows.mean(0) / 2 @ line_weights()).var(ddof=1))


def gain(before: tuple[Array, float], after: tuple[Array, float], paired: bool) -> tuple[float, float]:
    """Variance times seconds, before over after, and its standard error."""
    generator, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        first = generator.integers(len(before[0]), size=len(before[0]))
        second = first if paired else generator.integers(len(after[0]), size=len(after[0]))
        found.append(variance(before[0][first]) / variance(after[0][second]))
    times = before[1] / after[1]
    return variance(before[0]) / variance(after[0]) * times, float(np.std(found)) * times


def timed(work: Callable[[], Array], count: int) -> tuple[Array, float]:
    """What so many replicates give, stacked, and processor seconds of one of them."""
    started = time.process_time()
    found = np.stack([work() for _ in range(count)])
    return found, (time.process_time() - started) / count


def run() -> dict[str, object]:
    torch.set_num_threads(1)
    case, one = Case(), np.ones((1, len(SIZES)))
    kappa = np.mean([nested(case, QUERIES, one)[2] for _ in range(PILOT)], 0)
    both = np.stack((one[0], kappa))
    controls: list[Array] = []

    def plain() -> Array:
        squares, control, _ = nested(case, QUERIES, both)
        controls.append(control)
        return squares

    rows, _ = timed(plain, REPLICATES)
    _, seconds = timed(lambda: nested(case, QUERIES, one)[0], REPLICATES // 8)
    fewer, fewer_seconds = timed(lambda: nested(case, FEWER, one)[0], REPLICATES)
    pooled, pooled_seconds = timed(lambda: overlapping(case, kappa), POOLED)
    told: dict[str, dict[str, tuple[float, float]]] = {}
    for i, name in enumerate(NAMES):
        base = rows[:, i, 0]
        known = controlled(base, np.stack(controls)[:, :, None])
        told[name] = {
            "shrunk": gain((base, 1.0), (rows[:, i, 1], 1.0), paired=True),
            "popular": gain((base, 1.0), (known, 1.0), paired=True),
            "fewer": gain((base, seconds), (fewer[:, i, 0], fewer_seconds), paired=False),
            "overlap": gain((base, seconds), (pooled[:, i], pooled_seconds), paired=False),
        }
        print(
            f"{name}: " + ", ".join(f"{what} {value:.2f} ± {error:.2f}" for what, (value, error) in told[name].items())
        )
    took = {"plain": seconds, "fewer": fewer_seconds, "overlap": pooled_seconds}
    print("seconds a replicate: " + ", ".join(f"{what} {value:.3f}" for what, value in took.items()))
    return {"gains": told, "seconds": took, "kappa": kappa.tolist(), "queries": QUERIES, "replicates": REPLICATES}
