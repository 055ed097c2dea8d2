"""Errors of softmax attention over n standard normal tokens in d = 1, for tests of the theory at large n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from limitlens.errors import Array
from limitlens.experiments.hardmax import grid_outputs


@dataclass(frozen=True)
class GridErrors:
    """Errors of softmax attention over n standard normal tokens in d = 1, each of shape (replicates,)."""

    mean: Array  # signed error of the outputs' mean (and variance, below); the queries are the tokens
    variance: Array
    absolute: Array  # |Γ_n(x) - Γ(x)| and its square averaged over queries from the law, independent of the tokens
    square: Array


def grid_errors(signed_horizon: float, n: int, replicates: int, seed: int) -> GridErrors:
    """Errors of attention with A = `signed_horizon` over n standard normal tokens, in independent replicates."""
    y, share, output = grid_outputs(signed_horizon, n, replicates, seed)
    probability = np.exp(-(y**2) / 2)
    probability /= probability.sum()
    mean = np.sum(share * output, axis=0)
    error = output - signed_horizon * y[:, None]
    return GridErrors(
        mean=mean,
        variance=np.sum(share * output**2, axis=0) - mean**2 - signed_horizon**2,
        absolute=probability @ np.abs(error),
        square=probability @ error**2,
    )
