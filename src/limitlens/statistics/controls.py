"""Control variates for Gaussian tokens: functions of a sample that correlate with its errors and have mean zero.

At a small horizon the errors of a sample of n Gaussian tokens come from its mean x̄ and covariance S. With Σ the
covariance of the law, g = VΣA the slope of the limit and Δ = S − Σ, the first order in (x̄, Δ) is

    mean of the outputs:        V (I + ΣA) (x̄ − E x),
    their covariance:           T(Δ) = VΔM + MᵀΔVᵀ + gΔgᵀ,    M = AΣgᵀ.

The expected squares of both are known exactly for every n and every horizon, so each square minus its expectation is a
control variate [P]. They remove nearly all of the variance of the mean's error at a small horizon, and nothing far
beyond H = 1 (measured).
"""

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.head import Head
from limitlens.errors import Array
from limitlens.measures import Gaussian
from limitlens.statistics.estimators import TokenSums

FEWEST_REPLICATES = 30  # for each fitted coefficient; with fewer, one outlying control can increase the variance


class GaussianControls:
    """Control variates of a head over Gaussian tokens."""

    def __init__(self, measure: Gaussian, head: Head, device: torch.device | str = "cpu") -> None:
        known = (measure.covariance, head.A, head.V, measure.mean)
        sigma, A, V, mean = (torch.from_numpy(np.asarray(part)).to(device) for part in known)
        self.mean, self.covariance = mean, sigma
        slope = V @ sigma @ A
        M = A @ sigma @ slope.T
        self.pull = V + slope
        self.terms = ((V, M), (M.T, V.T), (slope, slope.T))
        self.pull_square = float(((self.pull @ sigma) * self.pull).sum())  # n E|V (I + ΣA) (x̄ − E x)|²
        self.spread_square = float(sum(self._product(*one, *other) for one in self.terms for other in self.terms))

    def _product(self, L: Tensor, R: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """(n − 1) E<LΔR, lΔr>, from (n − 1) E ΔCΔ = Σ tr(CΣ) + ΣCᵀΣ."""
        sigma, C = self.covariance, R @ right.T
        return (L @ (sigma * torch.sum(C * sigma) + sigma @ C.T @ sigma) * left).sum()

    def of(self, sums: TokenSums) -> Tensor:
        """Control variates (r, 2) of samples, from the sums over their tokens; 0 where the expected square is 0."""
        n, average = sums.count, sums.first / sums.count
        found = average.new_zeros(len(average), 2)
        if self.pull_square > 0:
            pull = (average - self.mean) @ self.pull.T
            found[:, 0] = pull.square().sum(-1) * (n / self.pull_square) - 1
        if self.spread_square > 0 and n > 1:
            delta = (sums.second - n * average[:, :, None] * average[:, None, :]) / (n - 1) - self.covariance
            spread = sum(L @ delta @ R for L, R in self.terms)
            found[:, 1] = torch.as_tensor(spread).square().sum((-1, -2)) * ((n - 1) / self.spread_square) - 1
        return found


def controlled(rows: Array, controls: Array) -> Array:
    """Rows (replicates, sizes) with the part explained by control variates (replicates, sizes, F) subtracted.

    A least-squares fit per size; each row is adjusted by the fit to all others, b₋ᵣ = b − (XᵀX)⁻¹xᵣ eᵣ/(1 − hᵣ). The
    controls of a row, of mean zero, are then independent of its coefficients, so adjusted rows have exactly the
    expectation of the rows [P]. With fewer than 30 replicates per fitted coefficient, rows are returned unchanged.
    """
    count, sizes, known = controls.shape
    if not known or count < FEWEST_REPLICATES * (known + 1):
        return rows
    result = np.empty_like(rows)
    for j in range(sizes):
        design = np.column_stack((np.ones(count), controls[:, j]))
        inverse = np.linalg.pinv(design)  # column r is (XᵀX)⁻¹xᵣ
        coefficients = inverse @ rows[:, j]
        residual = rows[:, j] - design @ coefficients
        leverage = np.sum(design.T * inverse, axis=0)
        share = residual / np.maximum(1 - leverage, 1e-9)
        without = coefficients[1:, None] - inverse[1:] * share
        result[:, j] = rows[:, j] - np.sum(controls[:, j].T * without, axis=0)
    return result
