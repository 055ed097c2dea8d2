"""Tails that decide whether a bound or an interval applies: Pareto shape, Hill index, log-moment curves.

A generalised Pareto law with shape k has moments below 1/k only. Attention weights with k̂ < 1/2 have a finite variance,
so the central limit theorem starts to work; k̂ above 0.7 means that one more token may move the output at will.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array
from limitlens.outcome import Outcome


def tail_length(n: int) -> int:
    """Number of largest values a Pareto fit uses: min(n/5, 3√n), as in Pareto smoothed importance sampling."""
    return int(np.ceil(min(0.2 * n, 3.0 * np.sqrt(n))))


def pareto_shape(top_scores: ArrayLike) -> Array:
    """Pareto shape k̂ of attention weights, from the largest scores of each query.

    The weights e^{score} above the smallest score given are fitted by a generalised Pareto law. Pass the
    `tail_length(n)` + 1 largest scores of n. The shape does not change when all scores shift.

    Parameters
    ----------
    top_scores : array of shape (..., m + 1)
        Scores (log weights) in any order, m at least 5.

    Returns
    -------
    Array of shape (...)
        k̂ per query, shrunk towards 1/2 with the weight of ten observations, as in Vehtari et al.
    """
    scores = np.sort(as_array("top_scores", top_scores), axis=-1)
    if scores.ndim == 0 or scores.shape[-1] < 6:
        raise InputError(f"top_scores have shape {scores.shape}; expected at least 6 scores per query to fit a tail")
    log_threshold = scores[..., :1]
    # Exceedances in units of the threshold, from the logarithm, so that equal scores give exact zeros.
    exceedances = np.expm1(np.minimum(scores[..., 1:] - log_threshold, 300.0))
    shape, _ = fit_generalised_pareto(exceedances)
    m = exceedances.shape[-1]
    return np.asarray((m * shape + 5.0) / (m + 10.0))


def fit_generalised_pareto(exceedances: ArrayLike) -> tuple[Array, Array]:
    """Shape k and scale σ of a generalised Pareto law by the posterior mean of Zhang and Stephens (2009).

    The density is σ^{-1} (1 + k x/σ)^{-1/k - 1}. The profile likelihood in θ = -k/σ is averaged over a grid placed by
    the first quartile, which needs no iteration and has no failure case.

    Parameters
    ----------
    exceedances : array of shape (..., m)
        Values above the threshold, zero or positive.

    Returns
    -------
    k, σ : arrays of shape (...)
    """
    x = np.sort(as_array("exceedances", exceedances), axis=-1)
    if x.ndim == 0 or x.shape[-1] < 5:
        raise InputError(f"exceedances have shape {x.shape}; expected at least 5 per tail")
    if (x[..., 0] < 0).any():
        raise InputError(f"an exceedance is {x.min():.3g}; expected values above the threshold, zero or positive")
    m = x.shape[-1]
    largest = x[..., -1:]
    flat = largest[..., 0] <= 0.0
    x = np.where(flat[..., None], 1.0, x)  # a tail of equal values has shape 0 by convention, set below
    largest = x[..., -1:]
    quartile = x[..., int(m / 4 + 0.5) - 1, None]
    quartile = np.where(quartile > 0, quartile, largest)  # a quarter of the tail ties with its threshold
    count = 30 + int(np.sqrt(m))
    grid = 1.0 - np.sqrt(count / (np.arange(1, count + 1) - 0.5))
    theta = 1.0 / largest + grid / (3.0 * quartile)
    theta = np.where(theta == 0.0, 1e-12 / largest, theta)  # σ = -k/θ is continuous there, its formula is not
    # One grid point at a time: the whole table would be (queries, grid, tail).
    shapes = np.stack([np.mean(np.log1p(-theta[..., i, None] * x), axis=-1) for i in range(count)], axis=-1)
    profile = m * (np.log(-theta / shapes) - shapes - 1.0)
    posterior = np.exp(profile - profile.max(-1, keepdims=True))
    theta_hat = np.sum(theta * posterior, axis=-1) / posterior.sum(-1)
    k = np.mean(np.log1p(-theta_hat[..., None] * x), axis=-1)
    return np.where(flat, 0.0, k), np.where(flat, 0.0, -k / theta_hat)


def hill(values: ArrayLike, tail: int) -> Array:
    """Hill estimate of the tail index inverse γ = 1/α from the `tail` largest positive values.

    γ̂ = mean of ln(x_(i) / x_(tail+1)) over the `tail` largest. It assumes a power tail: it stays positive and falls
    only slowly for lighter ones, so read it beside `fit_generalised_pareto`.

    Parameters
    ----------
    values : array of shape (..., n)
    tail : int
        Between 1 and n - 1.
    """
    x = np.sort(as_array("values", values), axis=-1)
    if x.ndim == 0 or not 1 <= tail < x.shape[-1]:
        raise InputError(f"tail is {tail} for values of shape {x.shape}; expected between 1 and n - 1")
    threshold = x[..., -tail - 1]
    if (threshold <= 0).any():
        raise InputError(
            "the tail reaches zero or below; expected positive values, so take a smaller tail or absolute values"
        )
    return np.asarray(np.mean(np.log(x[..., -tail:] / threshold[..., None]), axis=-1))


class Verdict(Outcome):
    """What the tails of a set of tokens allow; the value is the word shown to a reader."""

    SUB_GAUSSIAN = (
        "sub-Gaussian",
        "no direction exceeds its Gaussian log-moment curve within the range the sample can resolve, so the proved "
        "rates and the uniform bound apply with the given covariance",
        "nothing to do",
    )
    ABOVE_GAUSSIAN = (
        "heavier than Gaussian",
        "some direction has a log-moment curve above ½ tᵀΣt although its tail is lighter than any power, so the bounds "
        "hold only with a larger variance proxy, or only for small tilts",
        "use the printed variance proxy instead of the covariance, or the empirical K",
    )
    POWER = (
        "power tail",
        "the norms have a power tail, so K is infinite away from 0, the infinite-token limit does not exist and no "
        "rate or bound of the theory applies",
        "normalise or clip the tokens before attention, or read the measured curves without a theory",
    )


@dataclass(frozen=True)
class TailReport:
    """Are these tokens sub-Gaussian?

    Attributes
    ----------
    tilts : Array of shape (points,)
        Lengths s of the whitened tilts.
    excess : Array of shape (directions, points)
        K̂(s u) / (s²/2) - 1 per direction u: above 0 the tokens exceed the Gaussian curve ½ tᵀΣt.
    stderr : Array of shape (directions, points)
        Its standard error (delta method, whitening included).
    variance_proxy : float
        The largest K̂(s u) / (s²/2), at least 1: Σ times this number is a variance proxy as far as the sample sees.
    hill_norm : float
        Hill γ̂ of the norms of the whitened tokens.
    pareto_norm, pareto_norm_stderr : float
        Generalised Pareto shape k̂ of the same norms and its standard error (1 + k̂)/√m.
    verdict : Verdict
    """

    tilts: Array
    excess: Array
    stderr: Array
    variance_proxy: float
    hill_norm: float
    pareto_norm: float
    pareto_norm_stderr: float
    verdict: Verdict

    def document(self) -> dict[str, Any]:
        """The report as a JSON-ready mapping."""
        return {
            "verdict": self.verdict.value,
            "meaning": self.verdict.meaning,
            "remedy": self.verdict.remedy,
            "variance_proxy": self.variance_proxy,
            "pareto_norm": {"measured": self.pareto_norm, "stderr": self.pareto_norm_stderr},
            "hill_norm": self.hill_norm,
            "log_moment": {"tilts": self.tilts, "excess": self.excess, "stderr": self.stderr},
        }

    def __str__(self) -> str:
        return (
            f"{self.verdict.value}: variance proxy {self.variance_proxy:.3g}, norms have Pareto shape "
            f"{self.pareto_norm:.2f} ± {self.pareto_norm_stderr:.2f} and Hill index {self.hill_norm:.2f}; "
            f"{self.verdict.meaning}; {self.verdict.remedy}"
        )


def check_tails(tokens: ArrayLike, directions: ArrayLike | None = None, points: int = 8) -> TailReport:
    """Compare the log-moment curve of tokens with ½ tᵀΣt along directions, and fit the tail of their norms.

    Tokens are centred and whitened with their own covariance. The curve stops at s = √(2 ln n)/2, beyond which a sample
    of n cannot resolve K. An excess counts when it is four standard errors above zero, a power tail when k̂ of the norms
    is three standard errors above zero (Gaussian norms have a slightly negative k̂, exponential ones zero).

    Parameters
    ----------
    tokens : array of shape (n, d)
        At least 100 tokens.
    directions : array of shape (directions, d), optional
        In whitened coordinates; both signs of each coordinate axis (the principal axes of the tokens) when absent.
    points : int
        Number of tilt lengths.
    """
    x = as_array("tokens", tokens, ndim=2)
    n, dim = x.shape
    if n < 100 or dim < 1:
        raise InputError(f"tokens have shape {x.shape}; expected at least 100 rows to judge a tail")
    white = _whiten(x)
    axes = np.eye(white.shape[1])
    units = np.concatenate((axes, -axes)) if directions is None else as_array("directions", directions, ndim=2)
    if units.shape[1] != white.shape[1] or not (np.linalg.norm(units, axis=1) > 0).all():
        raise InputError(f"directions have shape {units.shape}; expected non-zero rows of length {white.shape[1]}")
    units = units / np.linalg.norm(units, axis=1, keepdims=True)

    s = np.linspace(0, np.sqrt(2 * np.log(n)) / 2, points + 1)[1:]
    excess, stderr = _log_moment_excess(white @ units.T, s)
    norms = np.linalg.norm(white, axis=1)
    tail = tail_length(n)
    ordered = np.sort(norms)
    shape = float(fit_generalised_pareto(ordered[-tail:] - ordered[-tail - 1])[0])
    shape_stderr = (1.0 + max(shape, 0.0)) / float(np.sqrt(tail))
    if shape > 3 * shape_stderr:
        verdict = Verdict.POWER
    elif (excess > 4 * stderr).any():
        verdict = Verdict.ABOVE_GAUSSIAN
    else:
        verdict = Verdict.SUB_GAUSSIAN
    return TailReport(
        tilts=s,
        excess=excess,
        stderr=stderr,
        variance_proxy=1.0 + max(float(excess.max()), 0.0),
        hill_norm=float(hill(norms, tail)),
        pareto_norm=shape,
        pareto_norm_stderr=shape_stderr,
        verdict=verdict,
    )


def _whiten(tokens: Array) -> Array:
    """Tokens in their principal axes with unit variance, directions without variance dropped: (n, rank)."""
    centred = tokens - tokens.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(centred.T @ centred / len(tokens))
    kept = eigenvalues > 1e-10 * max(float(eigenvalues[-1]), 0.0)
    if not kept.any():
        raise InputError("all tokens are equal; expected tokens with some spread")
    return np.asarray(centred @ (vectors[:, kept] / np.sqrt(eigenvalues[kept])))


def _log_moment_excess(projections: Array, s: Array) -> tuple[Array, Array]:
    """K̂(s)/(s²/2) - 1 and its standard error for projections (n, directions) at lengths s: (directions, points)."""
    excess, stderr = [], []
    for length in s:
        scores = length * projections
        top = scores.max(axis=0)
        weights = np.exp(scores - top)
        mean = weights.mean(axis=0)
        weights /= mean
        slope = np.mean(weights * projections, axis=0)  # K̂'(s)
        # Whitening with the sample's own mean and variance takes out their noise: that is the influence left.
        influence = weights - 1.0 - scores - (length * slope / 2) * (projections**2 - 1.0)
        curve = length**2 / 2
        excess.append((np.log(mean) + top) / curve - 1.0)
        stderr.append(influence.std(axis=0) / np.sqrt(len(weights)) / curve)
    return np.stack(excess, axis=1), np.stack(stderr, axis=1)
