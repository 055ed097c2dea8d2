"""The infinite-token output Γ that a study compares attention with, and the mean and covariance of Γ."""

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.attend import attend_state
from limitlens.attention.head import Head, limit
from limitlens.errors import Array, InputError
from limitlens.measures import Discrete, Gaussian, Measure, Sample, Sphere
from limitlens.measures.sphere import SMOOTH_FROM, limit_covariance
from limitlens.sampling.streams import IidStream, PoolStream, generator_for
from limitlens.statistics.estimators import GaussianControls, TokenSums

Device = torch.device | str
BLOCK = 1 << 16
REFERENCE_FACTOR = 64  # tokens for Monte Carlo moments of Γ / largest size: a token costs O(1), not O(queries)
QUERIES = 4096  # tokens of a `Sample` that attend to the whole sample in one call
POOL_LIMIT = 200_000  # a larger `Sample` is thinned, since attention over all of it costs N² scores
CHECKED, FEW = 512, 10  # queries checked, and effective tokens below which a `Sample` is too small


class Reference:
    """Random tokens of a study, and the infinite-token output Γ that attention over them is compared with.

    For a `Sample`, tokens are drawn from it without replacement, and Γ is attention over the whole sample. For other
    distributions, tokens are independent, and Γ is the exact limit.
    """

    mean: Tensor  # (v,) E Γ(X)
    covariance: Tensor  # (v, v) Cov Γ(X)
    stream: IidStream | PoolStream  # tokens of the replicates
    warnings: tuple[str, ...] = ()
    _linear: tuple[Tensor, Tensor] | None = None  # slope and offset of a limit that is affine in the tokens
    _controls: GaussianControls | None = None
    _samples = float("inf")  # tokens behind `mean` and `covariance`
    _pool_limits: Tensor  # (N, v): Γ at the tokens of a `Sample`

    def __init__(self, measure: Measure, head: Head, largest: int, seed: int, device: Device = "cpu") -> None:
        self.measure, self.head = measure, head
        if isinstance(measure, Sample):
            self._use_pool(measure.tokens, largest, seed, device)
        else:
            self._use_law(measure, largest, seed, device)

    def _use_law(self, measure: Measure, largest: int, seed: int, device: Device) -> None:
        head = self.head
        self.stream = IidStream(measure, seed, device, largest)
        if isinstance(measure, Gaussian):
            # Γ(x) = V (m + Σ (A x + shift)) is affine in x, so its moments follow from those of the tokens.
            slope = head.V @ measure.covariance @ head.A
            offset = limit(measure, head, np.zeros((1, head.dim)))[0]
            self._linear = (torch.from_numpy(slope).to(device), torch.from_numpy(offset).to(device))
            self._controls = GaussianControls(measure, head, device)
            mean, covariance = slope @ measure.mean + offset, slope @ measure.covariance @ slope.T
        elif isinstance(measure, Discrete):
            at_points = limit(measure, head, measure.points)
            mean = measure.weights @ at_points
            covariance = (at_points - mean).T @ (measure.weights[:, None] * (at_points - mean))
        elif isinstance(measure, Sphere) and measure.dim >= SMOOTH_FROM and not head.query_bias.any():
            mean, covariance = head.value_bias, head.V @ limit_covariance(head.A, measure.radius) @ head.V.T
        else:
            self._samples = float(max(REFERENCE_FACTOR * largest, 1 << 20))
            mean, covariance = sampled_moments(measure, head, int(self._samples), seed)
        self.mean, self.covariance = (torch.from_numpy(part).to(device) for part in (mean, covariance))

    def _use_pool(self, rows: Array, largest: int, seed: int, device: Device) -> None:
        head = self.head
        if len(rows) > POOL_LIMIT:
            keep = torch.randperm(len(rows), generator=generator_for(seed, 0x9001))[:POOL_LIMIT]
            self.warnings = (f"the sample of {len(rows)} tokens was thinned at random to {POOL_LIMIT}",)
            rows = rows[keep.sort().values.numpy()]
        tokens = torch.from_numpy(np.array(rows))  # a copy: the file behind it may be read-only
        if largest >= len(rows):
            given = f"the largest size is {largest} and the sample has {len(rows)} tokens"
            expected = "sizes smaller than the sample, since the reference is attention over all of it"
            raise InputError(f"{given}; expected {expected}; lower the sizes or give more tokens")
        self.stream = PoolStream(tokens.to(device), largest, seed)
        at_once = [tokens[start : start + QUERIES] for start in range(0, len(tokens), QUERIES)]
        limits = torch.cat([attend_state(tokens, head, part, precise=False).output for part in at_once])
        # Where queries attend to few effective tokens, the whole sample is itself far from its limit.
        checked = tokens[:CHECKED]
        once, twice = (attend_state(tokens, head, checked, times=times, precise=False).lse for times in (1, 2))
        share = float((torch.exp(2 * once - twice) < FEW).double().mean())  # 1/Σw²
        if share >= 0.01:
            self.warnings += (
                f"{share:.0%} of the queries attend to fewer than {FEW} effective tokens of the whole sample, "
                "which has not converged there: their errors are lower bounds, and more tokens would raise them",
            )
        self._pool_limits = limits.to(device)
        self.mean = self._pool_limits.mean(0)
        self.covariance = torch.cov(self._pool_limits.T, correction=0).reshape(head.value_dim, head.value_dim)

    def draw(self, replicates: range, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Random tokens (replicates, stop − start, d), and for each a vector (f,) from which `limits` computes Γ."""
        if isinstance(self.stream, PoolStream):
            chosen = self.stream.indices(replicates, start, stop)
            return self.stream.tokens[chosen].double(), self._pool_limits[chosen]
        tokens = self.stream.draw(replicates, start, stop)
        if self._linear:
            return tokens, tokens
        return tokens, torch.from_numpy(limit(self.measure, self.head, tokens.cpu().numpy())).to(tokens.device)

    def factor(self, n: int) -> float:
        """Ratio of measured to true error at n tokens; it is not 1 where the limit is estimated from finitely many."""
        if isinstance(self.stream, PoolStream):
            return self.stream.finite_population_correction(n)
        return float(np.sqrt(1 + n / self._samples))

    def limits(self, vectors: Tensor) -> Tensor:
        """Infinite-token outputs Γ (..., v) at tokens, from the vectors (..., f) that `draw` returned with them."""
        return vectors @ self._linear[0].T + self._linear[1] if self._linear else vectors

    def limit_sums(self, sums: TokenSums) -> TokenSums:
        """Sums over tokens of the infinite-token output Γ, from sums of the vectors that `draw` returned with them."""
        return sums.mapped(*self._linear) if self._linear else sums

    def controls(self, sums: TokenSums) -> Tensor:
        """Control variates (replicates, F), functions of the tokens with mean zero; F is 0 for non-Gaussian tokens."""
        return self._controls.of(sums) if self._controls else sums.first.new_empty(len(sums.first), 0)


def sampled_moments(measure: Measure, head: Head, samples: int, seed: int) -> tuple[Array, Array]:
    """Monte Carlo mean (v,) and covariance (v, v) of the infinite-token output at random queries from `measure`."""
    total, square = np.zeros(head.value_dim), np.zeros((head.value_dim,) * 2)
    for start in range(0, samples, BLOCK):
        tokens = measure.sample(min(BLOCK, samples - start), generator_for(seed, 0x4EF, start))
        at_tokens = limit(measure, head, tokens.numpy())
        total += at_tokens.sum(0)
        square += at_tokens.T @ at_tokens
    mean = total / samples
    return mean, square / samples - np.outer(mean, mean)
