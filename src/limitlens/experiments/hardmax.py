"""Hardmax attention, measured: softmax replaced by argmax through the same states.

For one-dimensional Gaussian tokens the mean output is (N₊ max + N₋ min)/n and is drawn exactly from its order
statistics at any n. For other laws and dimensions the best token of each query merges over blocks exactly as it does in
a state (`State.hardmax`), without the sums that softmax needs; there no formula is claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.curves.fit import Rate, fit_rate
from limitlens.errors import Array, InputError
from limitlens.experiments.gaussian_grid import grid_errors
from limitlens.theory.hardmax import hardmax_asymptotic, hardmax_finite
from limitlens.theory.influence import LARGEST_HORIZON, mean_error_1d

if TYPE_CHECKING:
    import pandas as pd

    from limitlens.attention.head import Head
    from limitlens.measures.base import Measure

SAMPLES_PER_REPLICATE = 1000  # on the line, where a sample of any n costs two random numbers


@dataclass(frozen=True)
class HardmaxCurve:
    """E|mean output| over n tokens, measured.

    Attributes
    ----------
    label : str
        What was attended to, and how.
    sizes : tuple of int
    errors : (replicates, sizes) array
        |mean output| of a sample, or its average over the samples of a replicate.
    correction : (sizes,) array
        Factor on the mean error for the noise of few queries; 1 where every token is a query.
    predicted : dict of str to (sizes,) array
        Predictions by name with their status in `statuses`; empty where no formula is claimed.
    """

    label: str
    sizes: tuple[int, ...]
    errors: Array
    correction: Array
    predicted: dict[str, Array]
    statuses: dict[str, str]
    seed: int

    @property
    def measured(self) -> Array:
        """Mean over replicates: (sizes,)."""
        return np.asarray(self.errors.mean(axis=0) * self.correction)

    @property
    def stderr(self) -> Array:
        """Its standard error: (sizes,)."""
        return np.asarray(self.errors.std(axis=0, ddof=1) / np.sqrt(len(self.errors)) * self.correction)

    @property
    def rate(self) -> Rate | None:
        """Power law against logarithmic law, with the evidence between them."""
        return fit_rate(np.asarray(self.sizes), self.errors, correction=self.correction, seed=self.seed)

    def document(self) -> dict[str, Any]:
        """The curve as a JSON-ready mapping."""
        rate = self.rate
        return {
            "label": self.label,
            "n": list(self.sizes),
            "measured": self.measured,
            "stderr": self.stderr,
            "predicted": {
                name: {"value": value, "status": self.statuses[name]} for name, value in self.predicted.items()
            },
            "rate": None if rate is None else rate.document(),
            "replicates": len(self.errors),
        }

    def table(self) -> pd.DataFrame:
        """One row per size: label, n, measured, stderr and the predictions."""
        import pandas as pd

        columns = {"label": self.label, "n": self.sizes, "measured": self.measured, "stderr": self.stderr}
        return pd.DataFrame({**columns, **self.predicted})


def hardmax_line(sizes: tuple[int, ...], replicates: int = 400, seed: int = 0) -> HardmaxCurve:
    """E|(N₊ max + N₋ min)/n| for standard normal tokens in d = 1, drawn exactly at any n.

    Given the number N₊ of positive tokens, the largest is the maximum of N₊ half-normal variables and the smallest
    minus that of N₋: two inverse distribution functions per sample, so cheap that each replicate averages
    `SAMPLES_PER_REPLICATE` of them.
    """
    _check(sizes, replicates)
    from scipy.special import ndtri

    def largest(rng: np.random.Generator, counts: Array) -> Array:
        # u^{1/N} is the distribution function at the maximum; half-normal tails are two-sided normal tails.
        tail = -np.expm1(np.log(rng.random(len(counts))) / np.maximum(counts, 1.0))
        return np.asarray(-ndtri(tail / 2))

    columns = []
    for n in sizes:
        rng = np.random.default_rng(np.random.SeedSequence([seed, 0x4A2D, n]))
        positive = rng.binomial(n, 0.5, size=replicates * SAMPLES_PER_REPLICATE).astype(np.float64)
        negative = n - positive
        mean_output = (positive * largest(rng, positive) - negative * largest(rng, negative)) / n
        columns.append(np.abs(mean_output).reshape(replicates, -1).mean(axis=1))
    return HardmaxCurve(
        label="hardmax",
        sizes=sizes,
        errors=np.stack(columns, axis=1),
        correction=np.ones(len(sizes)),
        predicted={
            "finite": np.array([hardmax_finite(n) for n in sizes]),
            "asymptotic": np.array([hardmax_asymptotic(n) for n in sizes]),
        },
        statuses={"finite": "verified", "asymptotic": "proved"},
        seed=seed,
    )


def softmax_line(horizon: float, sizes: tuple[int, ...], replicates: int = 400, seed: int = 0) -> HardmaxCurve:
    """The same quantity for softmax attention with A = H in d = 1: what hardmax is the H → ∞ end of."""
    _check(sizes, replicates)
    errors = np.stack([np.abs(grid_errors(horizon, n, replicates, seed).mean) for n in sizes], axis=1)
    known = abs(horizon) <= LARGEST_HORIZON
    return HardmaxCurve(
        label=f"softmax, H = {horizon:g}",
        sizes=sizes,
        errors=errors,
        correction=np.ones(len(sizes)),
        predicted={"influence": mean_error_1d(horizon, sizes)} if known else {},
        statuses={"influence": "verified" if abs(horizon) <= 1 else "heuristic"} if known else {},
        seed=seed,
    )


def hardmax_study(
    measure: Measure,
    head: Head,
    sizes: tuple[int, ...],
    *,
    replicates: int = 200,
    queries: int = 2048,
    seed: int = 0,
    progress: Callable[[float, float], None] | None = None,
) -> HardmaxCurve:
    """Scatter of the mean hardmax output around its expectation, for any law and dimension: measured, no formula.

    Queries are the first tokens of each sample. The expectation is the mean over replicates at each size (zero for
    symmetric laws). Few queries add noise, which is measured from their two halves and taken out of the mean square.
    """
    _check(sizes, replicates)
    used = min(queries, sizes[-1])
    rows = []
    for replicate in range(replicates):
        rows.append(_replicate_means(measure, head, sizes, used, seed, replicate))
        if progress is not None:
            progress(replicate + 1, replicates)
    found = np.stack(rows)
    mean, gap = found[:, :, 0], found[:, :, 1] - found[:, :, 2]
    errors = np.linalg.norm(mean - mean.mean(axis=0), axis=-1) * np.sqrt(replicates / (replicates - 1))
    left_out = np.clip(1 - used / np.asarray(sizes, dtype=np.float64), 0.0, None) / 4
    noise = np.sum(gap**2, axis=-1).mean(axis=0) * left_out
    share = noise / np.maximum(np.mean(errors**2, axis=0), np.finfo(float).tiny)
    return HardmaxCurve(
        label=f"hardmax over {measure!r}",
        sizes=sizes,
        errors=errors,
        correction=np.sqrt(np.clip(1 - share, 0.02, 1.0)),
        predicted={},
        statuses={},
        seed=seed,
    )


def _replicate_means(
    measure: Measure, head: Head, sizes: tuple[int, ...], queries: int, seed: int, replicate: int
) -> Array:
    """Mean hardmax output of one sample over all queries and over each half of them: (sizes, 3, v)."""
    import torch

    from limitlens.sampling.cells import Cells
    from limitlens.sampling.streams import PAGE, IidStream

    stream, which = IidStream(measure, seed), range(replicate, replicate + 1)
    query = head.queries(stream.draw(which, 0, queries)[0]).float()
    best = torch.full((queries,), float("-inf"))
    value = torch.zeros((queries, head.value_dim), dtype=torch.float64)
    rows = {}
    for step, start, stop in Cells(sizes).blocks(PAGE):
        tokens = stream.draw(which, start, stop)[0]
        score, place = (query @ head.keys(tokens).float().T).max(dim=1)
        better = score > best
        best = torch.where(better, score, best)
        value = torch.where(better[:, None], head.values(tokens)[place], value)
        output = value[: min(queries, sizes[step])]
        rows[step] = torch.stack((output.mean(0), output[::2].mean(0), output[1::2].mean(0)))
    return np.asarray(torch.stack(list(rows.values())).numpy())


def _check(sizes: tuple[int, ...], replicates: int) -> None:
    if not sizes or sizes[0] < 2 or any(later <= earlier for earlier, later in pairwise(sizes)):
        raise InputError(f"sizes are {list(sizes)}; expected increasing numbers of tokens from 2 on")
    if replicates < 2:
        raise InputError(f"replicates is {replicates}; expected at least 2, since error bars come from their scatter")
