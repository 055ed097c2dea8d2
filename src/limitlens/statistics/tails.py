"""Tests of tails, which decide whether a bound applies: of attention weights by a Pareto fit, of tokens by log-moments.

A generalised Pareto law of shape k has finite moments only below order 1/k, so k̂ < 1/2 suggests a finite variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from scipy.special import ndtri

from limitlens.arrays import array_like, library, native, pd, to_numpy
from limitlens.errors import Array, InputError, as_array
from limitlens.estimate import Estimate
from limitlens.outcome import Outcome
from limitlens.report.text import sentence
from limitlens.report.view import SHADES, Axis, Cell, Figure, Guide, Section, Table, View, cells, points
from limitlens.results import Result

_IN_CACHE = 1 << 14  # numbers of a table computed at a time on a CPU
FALSE_ALARM = 1e-3  # probability that a Gaussian sample exceeds the threshold anywhere, for normal excesses


def tail_length(n: int) -> int:
    """Number min(n/5, 3√n) of largest of n values that a Pareto fit uses, as in Pareto smoothed importance sampling."""
    return int(np.ceil(min(0.2 * n, 3.0 * np.sqrt(n))))


def sorted_shape(scores: Any) -> Any:
    """Pareto shape k̂ (...) of the tail of softmax weights, from the largest scores (..., m + 1) of each query.

    `scores` are the m + 1 largest of n scores in increasing order, m = `tail_length(n)` ≥ 5. The fit is to the weights
    e^{score} above the smallest. k̂ is shrunk towards 1/2 with the weight of ten observations, as in Vehtari et al.
    """
    # Exceedances in units of the threshold, from the logarithm, so that equal scores give exact zeros.
    lib, m = library(scores), scores.shape[-1] - 1
    exceedances = lib.expm1(lib.clip(scores[..., 1:] - scores[..., :1], None, 300.0))
    return (m * fit_generalised_pareto(exceedances)[0] + 5.0) / (m + 10.0)


def fit_generalised_pareto(x: Any) -> tuple[Any, Any]:
    """Fit the shape k and scale σ of a generalised Pareto law by the posterior mean of Zhang and Stephens (2009).

    The density is σ^{-1} (1 + k x/σ)^{-1/k - 1}. `x` (..., m ≥ 5) are exceedances of a threshold, in increasing order.
    """
    lib, m = library(x), x.shape[-1]
    flat = x[..., -1:] <= 0.0
    x = lib.where(flat, 1.0, x)  # a tail of equal values has shape 0 by convention, set below
    largest, quartile = x[..., -1:], x[..., int(m / 4 + 0.5) - 1, None]
    quartile = lib.where(quartile > 0, quartile, largest)  # a quarter of the tail ties with its threshold
    count = 30 + int(np.sqrt(m))
    grid = array_like(x, 1.0 - np.sqrt(count / (np.arange(1, count + 1) - 0.5)))
    theta = 1.0 / largest + grid / (3.0 * quartile)
    theta = lib.where(theta == 0.0, 1e-12 / largest, theta)  # σ = -k/θ is continuous there, its formula is not
    # On a CPU a few grid points at a time, to stay in the cache: the whole table is (queries, grid, tail).
    step = count if lib is not np else max(1, _IN_CACHE // x.size)
    parts = (-theta[..., start : start + step, None] for start in range(0, count, step))
    shapes = lib.concatenate([lib.log1p(part * x[..., None, :]).mean(-1) for part in parts], -1)
    profile = m * (lib.log(-theta / shapes) - shapes - 1.0)
    posterior = lib.exp(profile - lib.amax(profile, -1)[..., None])
    theta_hat = (theta * posterior).sum(-1) / posterior.sum(-1)
    k = lib.log1p(-theta_hat[..., None] * x).mean(-1)
    return lib.where(flat[..., 0], 0.0, k), lib.where(flat[..., 0], 0.0, -k / theta_hat)


class Verdict(Outcome):
    """Verdict on whether tokens have tails as light as Gaussian ones (are sub-Gaussian)."""

    SUB_GAUSSIAN = (
        "sub-Gaussian",
        "nothing exceeds the Gaussian curve, and the test detects one direction with a Laplace tail nine times in ten; "
        "a sample cannot prove that the covariance is a variance proxy",
    )
    CANNOT_TELL = (
        "cannot tell",
        "nothing exceeds the Gaussian curve, but in this dimension there are too few tokens to detect one direction "
        "with a Laplace tail",
        "use as many tokens as the report asks for, or fewer dimensions",
    )
    ABOVE_GAUSSIAN = (
        "heavier than Gaussian",
        "some direction has a log-moment curve above ½ tᵀΣt, so bounds need a larger variance proxy, or hold only for "
        "small tilts; no power tail was seen",
        "use the printed variance proxy, which is a lower bound, instead of the covariance, or the empirical K",
    )
    POWER = (
        "power tail",
        "the norms have a power tail, so K is infinite away from 0, the infinite-token limit does not exist and no "
        "rate or bound of the theory applies",
        "normalise or clip the tokens before attention, or read the measured curves without a theory",
    )


@dataclass(frozen=True, eq=False, repr=False)
class TailReport(Result):
    """Result of the test whether tokens x are sub-Gaussian, by K(t) = log E e^{t·x} and the tail of the norms |x|."""

    kind, file = "tail verdict", "tails"
    verdict: Verdict
    tilts: Array  # (points,): lengths s of t in whitened coordinates
    excess: Array  # (directions, points): K̂(s u)/(s²/2) - 1 along u, positive where tokens exceed the Gaussian curve
    stderr: Array  # (directions, points): standard error of the excess (delta method, whitening included)
    variance_proxy: float  # the largest K̂(s u)/(s²/2), at least 1: times Σ, the variance proxy seen in the sample
    pareto_norm: Estimate  # generalised Pareto shape k̂ of the norms of whitened tokens, standard error (1 + k̂)/√m
    kurtosis: float  # Mardia's E|y|⁴ - d(d+2) of whitened tokens y in standard errors of a Gaussian sample
    needed: int  # tokens needed to detect one Laplace direction in this dimension nine times in ten

    def document(self) -> dict[str, Any]:
        """Report on the tails as a dictionary for JSON, with meaning and remedy of the verdict."""
        return super().document() | {"meaning": self.verdict.meaning, "remedy": self.verdict.remedy}

    @property
    def table(self) -> pd.DataFrame:
        """Table of the excess of K(t) over the Gaussian curve, one row per direction and length of t."""
        columns = np.broadcast_arrays(np.arange(len(self.excess))[:, None], self.tilts, self.excess, self.stderr)
        names = ("direction", "tilt", "excess", "stderr")
        return pd.DataFrame({name: column.ravel() for name, column in zip(names, columns, strict=True)})

    def view(self) -> View:
        """Page of the report: the verdict, then the curves of K in order of decreasing excess over the Gaussian one."""
        order = self.excess.max(axis=1).argsort()[::-1].tolist()
        rows: list[list[Cell]] = [[i, *cells(self.excess[i], self.stderr[i])] for i in order]
        series = [
            points(f"direction {i}", self.tilts, self.excess[i], shade, self.stderr[i], joined=True, positive=False)
            for i, shade in zip(order, SHADES, strict=False)
        ]
        axes = (Axis("length s of the whitened tilt"), Axis("K(s u)/(s²/2) − 1"))
        figure = Figure("Excess over the Gaussian curve", *axes, series, [Guide("Gaussian", y=0.0)])
        title = "K(s u)/(s²/2) − 1 along whitened directions u: positive where it exceeds the Gaussian curve"
        table = Table(title, ["direction", *(f"s = {s:.2f}" for s in self.tilts)], rows, shown=5)
        measured = f"The log-moment curves of the tokens along {len(rows)} whitened directions and their kurtosis were "
        measured += "compared with those of a Gaussian law, and a Pareto tail was fitted to their norms."
        found = (
            f"The verdict is {self.verdict.value}: variance proxy {self.variance_proxy:.3g}, kurtosis "
            f"{self.kurtosis:.1f} standard errors above the Gaussian one, norms of Pareto shape "
            f"{self.pareto_norm.value:.2f} ± {self.pareto_norm.stderr:.2f}; {self.verdict.meaning}."
        )
        advice = f"{sentence(self.verdict.remedy)} The test detects one heavy direction from {self.needed} tokens on."
        subtitle = f"{len(rows)} directions · lengths s up to {self.tilts[-1]:.2f}"
        sections = [Section("Log-moment curves", "With 95% bars.", [figure, table])]
        return View(f"Tails: {self.verdict.value}", subtitle, (measured, found, advice), sections)


def check_tails(tokens: Any, points: int = 8) -> TailReport:
    """Test whether tokens (n ≥ 100, d) are sub-Gaussian, which bounds assume; they may be an array or a tensor.

    Tokens y, centred and whitened with their own covariance, are compared with a Gaussian law in three ways. First, log
    E e^{s u·y} must not exceed s²/2, for both signs of the principal and coordinate axes u, and for `points` lengths up
    to s = √(2 ln n)/2, the most that n tokens resolve. Second, Mardia's kurtosis E|y|⁴ must not exceed d(d+2), as in
    strictly sub-Gaussian laws. Both count from about four standard errors on. Third, the norms must have no power tail:
    a Pareto shape three standard errors above zero, one in the upper quarter of the tail, and mostly distinct values.
    """
    x = tokens if hasattr(tokens, "detach") else as_array("tokens", tokens, ndim=2)
    if len(x) < 100 or x.shape[1] < 1:
        raise InputError(f"tokens have shape {tuple(x.shape)}; expected at least 100 rows to judge a tail")
    n, centred = len(x), x - x.mean(0)
    covariance = centred.T @ centred / n
    as_array("the covariance of the tokens", *to_numpy(covariance))
    to_white, coordinates = _whitener(*to_numpy(*library(x).linalg.eigh(covariance)))
    white, rank = centred @ array_like(x, to_white), to_white.shape[1]
    axes = np.concatenate((np.eye(rank), coordinates / np.linalg.norm(coordinates, axis=1, keepdims=True)))
    tilts = np.linspace(0, np.sqrt(2 * np.log(n)) / 2, points + 1)[1:]
    projections = array_like(x, np.concatenate((axes, -axes))) @ white.T
    measured = _log_moment_excess(projections if library(x) is np else native(projections), tilts)
    excess, stderr, squares = to_numpy(*measured, (white * white).sum(1))
    gaussian = rank * (rank + 2)
    # A Gaussian sample whitened by itself has the mean d(d+2)(n-1)/(n+1) and the variance 8d(d+2)/n.
    kurtosis = float((np.mean(squares**2) - gaussian * (n - 1) / (n + 1)) / np.sqrt(8 * gaussian / n))
    norms, tail = np.sort(np.sqrt(squares)), tail_length(n)
    shape, upper = (_tail_shape(norms, m) for m in (tail, max(tail // 4, 5)))
    verdict, needed = Verdict.SUB_GAUSSIAN, tokens_needed(rank)
    differ = np.mean(np.diff(norms[-tail:]) > 1e-9 * norms[-1]) > 0.5  # most values differ, as under a density
    if shape.value > 3 * shape.stderr and upper.value > upper.stderr and differ:
        verdict = Verdict.POWER
    elif kurtosis > 4 or (excess > ndtri(1 - FALSE_ALARM / excess.size) * stderr).any():
        verdict = Verdict.ABOVE_GAUSSIAN
    elif n < needed:
        verdict = Verdict.CANNOT_TELL
    proxy = 1.0 + max(float(excess.max()), 0.0)
    return TailReport(verdict, tilts, excess, stderr, proxy, shape, kurtosis, needed)


def tokens_needed(dim: int) -> int:
    """Number of tokens with which `check_tails` detects one Laplace direction of `dim` nine times in ten (verified)."""
    return 28 * dim * (dim + 2) + 300


def _tail_shape(norms: Array, tail: int) -> Estimate:
    """Pareto shape k̂ of the m = `tail` largest of sorted norms, with its standard error (1 + k̂)/√m."""
    shape = float(fit_generalised_pareto(norms[-tail:] - norms[-tail - 1])[0])
    return Estimate(shape, (1.0 + max(shape, 0.0)) / float(np.sqrt(tail)))


def _whitener(eigenvalues: Array, vectors: Array) -> tuple[Array, Array]:
    """Whitening matrix (d, rank) from eigenvalues and axes of a covariance, and the coordinate axes after whitening."""
    kept = eigenvalues > 1e-10 * max(float(eigenvalues[-1]), 0.0)
    if not kept.any():
        raise InputError("all tokens are equal; expected tokens with some spread")
    root, vectors = np.sqrt(eigenvalues[kept]), vectors[:, kept]
    # Fix the sign of each axis, which depends on the library: its largest entry is positive.
    vectors = vectors * np.sign(np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0))
    coordinates = vectors * root  # <row, white> is the coordinate itself
    varies = np.linalg.norm(coordinates, axis=1) > 1e-5 * root[-1]
    return np.asarray(vectors / root), coordinates[varies] if coordinates.shape[1] > 1 else coordinates[:0]


def _log_moment_excess(projections: Any, s: Array) -> tuple[Any, Any]:
    """Excess K̂(s)/(s²/2) - 1 of the log-moment curve over the Gaussian one, and its standard error.

    Both are (directions, points), from `projections` (directions, n) of n tokens, at lengths `s` = s₁, 2 s₁, 3 s₁, ….
    """
    lib, (directions, n) = library(projections), projections.shape
    length, excess, stderr = array_like(projections, s), [], []
    step = directions if lib is not np else max(1, _IN_CACHE // n)  # a few directions at a time on a CPU
    for start in range(0, directions, step):
        x = projections[start : start + step]
        top = lib.amax(x, -1)[:, None]
        once = lib.exp((x - top) * length[0])
        weights = lib.stack(list(accumulate([once] * len(s), mul)), 1)  # (step, points, n)
        powers = (lib.ones_like(x), x, x * x)
        mass, slope, second = lib.moveaxis(lib.matmul(weights, lib.stack(powers, -1)) / n, -1, 0)
        pairs = ((0, 1), (1, 1), (1, 2), (2, 2))
        first, square, cube, fourth = (lib.einsum("dn,dn->d", powers[i], powers[j])[:, None] / n for i, j in pairs)
        slope, second = slope / mass, second / mass  # the first is K̂'(s)
        spread = lib.einsum("dpn,dpn->dp", weights, weights) / (n * mass * mass)
        # Whitening with the sample mean and variance removes their noise: the remaining influence is
        # w − s x − b x², b = s K̂'(s)/2, and this is its variance.
        b = length / 2 * slope
        variance = spread + length**2 * square + b * b * fourth + 2 * (length * (b * cube - slope) - b * second)
        variance = variance - (1 - length * first - b * square) ** 2
        excess.append((lib.log(mass) + length * top) / (length**2 / 2) - 1.0)
        stderr.append(lib.sqrt(variance.clip(0)) / n**0.5 / (length**2 / 2))
    return lib.concatenate(excess), lib.concatenate(stderr)
