"""Remedies for a study at far reach, each tried alone: what it does to time at equal standard error of a slope.

The case is the last one of `protocol`: d = 50, horizon 1.68, 12 nested sizes 1,000..30,000. Slopes are those of root
mean squares, freed of query noise. A gain is the variance of a slope times the processor seconds it took, before over
after; its error comes from resampling replicates, paired where both have the same.

- `expected`: the control of the queries is E Γ_n(x) = (1 − E Σw²) Γ(x), exact at every n (`theory.exact`), in place of
  Γ(x). What is left of a query's output has expectation 0 given the query, so strata of queries, by their tilt or along
  any direction, could take nothing more from the mean. `weighted` says what the best weights there could be, by any
  function of the query, would leave of the noise: (E√v(x))²/E v(x), v(x) the variance of the output at x.
- `popular`: tokens that many queries see carry the error of the mean. With σ² the variance of a token's scores over
  queries and h = e^{0.1 (σ² − Eσ²)} V x, odd in x, |Σ h|² − Σ |h|² has expectation 0, exactly: a control variate.
- `fewer`: as few queries as make variance times time least.
- `pooled`: a replicate's tokens lie in cells of 250. Any cells, and the tokens of as many queries as are missing, are a
  sample; every size has 8 of them, disjoint while they fit. Cells are attended once, and all samples of a size are one
  product of matrices. 512 queries at most.
- `tripled`: the same of three times the tokens, 16 samples and at most 384 queries.
- `signed`: as `pooled`, of tokens with both signs, antithetic: a cell is either x or −x in a sample, and what pairs of
  tokens add to the square of the mean cancels between samples. `signed_fewer`: at most 384 queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.protocol import DIM, SCALES, SIZES, line_weights, random_head
from limitlens.attention.kernels import cpu
from limitlens.errors import Array
from limitlens.statistics.controls import controlled
from limitlens.theory.exact import pointwise_error

NAMES = ("mean", "covariance")
REPLICATES, QUERIES, FEWER = 160, 992, 608
CELL, HOME = 250, 4  # tokens in a cell, and about the least that a sample is over its queries, whose tokens all share
LONGEST, POINTS = 12.0, 100  # whitened tilts up to which E Σw² is known, and at how many
RESAMPLES, TURNS = 1000, 12


class Pool(NamedTuple):
    """How samples share the tokens of a replicate."""

    times: int  # its tokens over those of the largest sample
    signed: bool
    queries: int
    samples: int  # of each size


POOLS = {
    "pooled": Pool(1, False, 512, 8),
    "tripled": Pool(3, False, 384, 16),
    "signed": Pool(1, True, 512, 8),
    "signed_fewer": Pool(1, True, 384, 8),
}


class Case:
    """Tokens and the parts of the head, float32; Γ(x) = slope x."""

    def __init__(self) -> None:
        head = random_head(SCALES["variance 1"])
        self.A, self.V = (torch.tensor(matrix, dtype=torch.float32) for matrix in (head.A, head.V))
        self.slope = 0.1 * self.V @ self.A
        self.limit = (0.1 * self.slope @ self.slope.T).double()
        self.generator = torch.Generator().manual_seed(0)
        self.tilts = np.linspace(0.1, LONGEST, POINTS)
        self.short = pointwise_error(self.tilts, np.asarray(SIZES, float)).across
        self.kappa = self.expected(self.tokens(QUERIES)).mean(0)

    def tokens(self, *shape: int) -> Tensor:
        """So many fresh ones, (*shape, d)."""
        return 0.1**0.5 * torch.randn(*shape, DIM, generator=self.generator)

    def expected(self, X: Tensor) -> Array:
        """The part of Γ(x) that n tokens reach on average, 1 − E Σw², at tokens (m, d) and every size: (m, sizes)."""
        tau = 0.1**0.5 * (X @ self.A.T).norm(dim=1).double().numpy()
        return np.stack([np.interp(tau, self.tilts, 1 - short) for short in self.short.T], 1)

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


def nested(case: Case, queries: int, both: bool) -> tuple[Array, Array]:
    """One plain replicate: squares (2, kinds, sizes), the second that of `expected`, and the control of `popular`."""
    X = case.tokens(SIZES[-1])
    values, limits, query = X @ case.V.T, X @ case.slope.T, X[:queries] @ case.A.T
    sigma = 0.1 * (X @ case.A).square().sum(1)
    popular = torch.exp(0.1 * (sigma - 0.01 * case.A.square().sum()))[:, None] * values
    lse, output = torch.full((queries,), -torch.inf), torch.zeros(queries, DIM)
    first, second, start = torch.zeros(DIM), torch.zeros(DIM, DIM), 0
    total, own = torch.zeros(DIM), 0.0
    squares, control = np.zeros((2, 1 + both, len(SIZES))), np.zeros(len(SIZES))
    reached = torch.from_numpy(case.expected(X)).float() if both else torch.empty(0)
    for j, n in enumerate(SIZES):
        lse, output = merged(lse, output, cpu.attend(query[None], X[None, start:n], values[None, start:n]))
        lse, output, new, start = lse.view(-1), output.view(-1, DIM), slice(start, n), n
        first, second = first + limits[new].sum(0), second + limits[new].T @ limits[new]
        total, own = total + popular[new].sum(0), own + float(popular[new].square().sum())
        q = min(queries, n)
        Y, G = output[None, :q], limits[:q]
        kinds = [(G, first, second)]
        if both:
            part = reached[:n, j, None] * limits[:n]
            kinds.append((part[:q], part.sum(0), part.T @ part))
        for i, (known, sums, products) in enumerate(kinds):
            squares[:, i, j] = [
                float(part) for part in case.squares(Y, known, sums[None], products[None].double(), n, 1.0)
            ]
        control[j] = (float(total.square().sum()) - own) / n**2
    return squares, control


def subsets(chooser: np.random.Generator, samples: int, cells: int, taken: int) -> Tensor:
    """Which cells each sample takes, (samples, cells) of 0 and 1: parts of one random order, then of another."""
    chosen, apart = torch.zeros(samples, cells), cells // taken
    for s in range(samples):
        if s % apart == 0:
            order = torch.from_numpy(chooser.permutation(cells))
        chosen[s, order[s % apart * taken : (s % apart + 1) * taken]] = 1
    return chosen


def pooled(case: Case, pool: Pool) -> Array:
    """One replicate of cells: squares (2, sizes), averaged over samples."""
    times, signed, most, samples = pool
    chooser, cells = np.random.default_rng(0), times * SIZES[-1] // CELL
    home, X = case.tokens(most), case.tokens(cells, CELL)
    query, own = home @ case.A.T, home @ case.slope.T
    seen = [cpu.attend(query.expand(cells, -1, -1), Z, Z @ case.V.T) for Z in ((X, -X) if signed else (X,))]
    lse, output = (torch.cat(parts) for parts in zip(*seen, strict=True))
    top = lse.amax(0)
    weight = torch.exp(lse - top)
    pull, limits = output.mul_(weight[..., None]), X @ case.slope.T
    first, second = limits.sum(1), (limits.mT @ limits).flatten(1)
    if signed:
        first, second = torch.cat((first, -first)), torch.cat((second, second))
    squares = np.zeros((2, len(SIZES)))
    for j, n in enumerate(SIZES):
        taken = max(-((most - n) // CELL), (n - n // HOME) // CELL)
        q = n - taken * CELL
        chosen = subsets(chooser, samples, cells, taken)
        if signed:
            turned = torch.from_numpy(chooser.integers(2, size=chosen.shape)).float()
            chosen = torch.cat((chosen * turned, chosen * (1 - turned)), 1)
        more = cpu.attend(query[None, :q], home[None, :q], (home[:q] @ case.V.T)[None])
        rest = torch.exp(more[0][0] - top[:q])
        Y = (chosen @ pull[:, :q].flatten(1)).view(samples, q, DIM) + rest[:, None] * more[1][0]
        Y /= (chosen @ weight[:, :q] + rest)[..., None]
        G, sums = own[:q], chosen @ first + own[:q].sum(0)
        products = (chosen @ second).view(samples, DIM, DIM) + G.T @ G
        found = case.squares(Y, G, sums, products.double(), n, float(case.kappa[j]))
        squares[:, j] = [float(part.mean()) for part in found]
    return squares


def weighted(case: Case, queries: int = 1000, samples: int = 24) -> float:
    """What the best weights of queries would leave of their noise in the mean, at the largest size."""
    query, n = case.tokens(queries), SIZES[-1]
    total, square = torch.zeros(queries, DIM), torch.zeros(queries)
    for _ in range(samples):
        X = case.tokens(n)
        output = cpu.attend((query @ case.A.T)[None], X[None], (X @ case.V.T)[None])[1][0]
        total, square = total + output, square + output.square().sum(1)
    variance = (square - total.square().sum(1) / samples) / (samples - 1)
    return float(variance.sqrt().mean().square() / variance.mean())


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


def timed(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Processor seconds of each: the least of several calls, in turns, since others work on the machine too."""
    took: dict[str, list[float]] = {what: [] for what in works}
    for _ in range(TURNS):
        for what, work in works.items():
            started = time.process_time()
            work()
            took[what].append(time.process_time() - started)
    return {what: min(each) for what, each in took.items()}


def run() -> dict[str, object]:
    torch.set_num_threads(1)
    case = Case()
    works: dict[str, Callable[[], Array]] = {"fewer": lambda: nested(case, FEWER, both=False)[0][:, 0]}
    works |= {what: partial(pooled, case, pool) for what, pool in POOLS.items()}
    squares, controls = zip(*(nested(case, QUERIES, both=True) for _ in range(REPLICATES)), strict=True)
    rows = {"plain": np.stack(squares)[:, :, 0]}
    rows |= {what: np.stack([work() for _ in range(REPLICATES)]) for what, work in works.items()}
    seconds = timed({"plain": lambda: nested(case, QUERIES, both=False), **works})
    told: dict[str, dict[str, tuple[float, float]]] = {}
    for i, name in enumerate(NAMES):
        base = rows["plain"][:, i]
        known = controlled(base, np.stack(controls)[:, :, None])
        told[name] = {
            "expected": gain((base, 1.0), (np.stack(squares)[:, i, 1], 1.0), paired=True),
            "popular": gain((base, 1.0), (known, 1.0), paired=True),
        }
        for what in works:
            told[name][what] = gain((base, seconds["plain"]), (rows[what][:, i], seconds[what]), paired=False)
        print(
            f"{name}: " + ", ".join(f"{what} {value:.2f} ± {error:.2f}" for what, (value, error) in told[name].items())
        )
    slopes = {
        what: [-float(np.log(part[:, i].mean(0)) @ line_weights()) / 2 for i in range(len(NAMES))]
        for what, part in rows.items()
    }
    print("slopes of mean and covariance: " + ", ".join(f"{what} {a:.3f} {b:.3f}" for what, (a, b) in slopes.items()))
    left = weighted(case)
    print(f"noise of the mean that the best weights of queries would leave: {left:.3f}")
    print("seconds a replicate: " + ", ".join(f"{what} {value:.3f}" for what, value in seconds.items()))
    return {
        "gains": told,
        "slopes": slopes,
        "weighted": left,
        "seconds": seconds,
        "kappa": case.kappa.tolist(),
        "queries": QUERIES,
        "replicates": REPLICATES,
    }
