"""Rates from error curves, with honest intervals.

A curve is a matrix (replicates, sizes) of errors to the power `moment`: the first for E|error|, the second for the root
mean square, which can have different exponents. Nested sizes make its columns correlated, so uncertainty comes from
resampling whole rows. The power law is e = c n^{−β}; the logarithmic law e = c (ln n)^{−γ} has as many parameters, so
the difference of their misfits is the difference of their information criteria.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from limitlens.errors import Array

BOOTSTRAP = 2000
AT_ONCE = 50  # resamples drawn at a time; a divisor of their number
MOST_KEPT = 2000  # rows up to which their resamples are kept for the next curve: 32 MB
LEVEL = 0.95
DECIDES = 10  # evidence from which on one law is preferred to the other


@dataclass(frozen=True)
class Rate:
    """A fitted rate."""

    slope: float  # β > 0 of e = c n^{−β}, always of the power law, so that rates compare whatever the law
    stderr: float  # standard error and 95% interval of the slope, from a bootstrap over replicates
    interval: tuple[float, float]
    constant: float  # c of the power law
    evidence: float  # AIC(log) − AIC(power), positive for the power law: it counts beyond ±2 and decides beyond ±10
    log_exponent: float  # γ of e = c (ln n)^{−γ}
    misfit: float  # χ² of the preferred law per degree of freedom; far above 1 neither law holds on these sizes
    used: tuple[int, ...]  # sizes in the fit: those below the numerical floor are left out

    @property
    def law(self) -> str:
        """The law that the evidence decides for, "power" or "log", else "undecided"."""
        return "undecided" if abs(self.evidence) < DECIDES else "power" if self.evidence > 0 else "log"

    def document(self) -> dict[str, Any]:
        """The rate as JSON: its law is the one that fits better, the verdict says whether that is decided."""
        return {**asdict(self), "law": "power" if self.evidence >= 0 else "log", "verdict": self.law}

    def __str__(self) -> str:
        law = f"{self.law} law" if self.law != "undecided" else "law undecided"
        return f"{self.slope:.3f} ± {self.stderr:.3f} ({law}, evidence {self.evidence:+.1f})"


def fit_rate(
    sizes: Array, powers: Array, *, moment: int = 1, usable: NDArray[np.bool_] | None = None, seed: int = 0
) -> Rate | None:
    """Fit a rate to powers (replicates, sizes), the |error|^moment of each replicate, at the `usable` sizes.

    None with fewer than three usable sizes or two replicates: there is no rate to speak of.
    """
    n = np.asarray(sizes, dtype=np.float64)
    keep = np.ones(len(n), bool) if usable is None else usable.copy()
    keep &= (powers.mean(0) > 0) & (n > np.e)  # (ln n)^{−γ} needs ln n > 1
    count = len(powers)
    if keep.sum() < 3 or count < 2:
        return None
    n, powers = n[keep], powers[:, keep]
    log_mean = np.log(typical(powers, moment))
    logs = np.log(np.maximum(bootstrap(powers, seed, moment), np.finfo(float).tiny))
    # A bootstrap of r rows has (r − 1)/r of the variance it should have.
    deviations = (logs - logs.mean(0)) * np.sqrt(count / (count - 1))
    covariance = deviations.T @ deviations / (len(logs) - 1)
    scatter = np.diag(covariance)
    variance = np.maximum(scatter, max(1e-4 * scatter.max(), np.finfo(float).tiny))  # no size decides alone

    weights = _line_weights(np.log(n), 1 / variance)
    stderr = float(np.sqrt(weights[1] @ covariance @ weights[1]))
    intercept, minus_slope = (float(w @ log_mean) for w in weights)
    half_width = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * stderr
    misfits = [_misfit(axis, log_mean, covariance, count) for axis in (np.log(n), np.log(np.log(n)))]
    log_weights = _line_weights(np.log(np.log(n)), 1 / variance)
    evidence = misfits[1] - misfits[0]
    return Rate(
        slope=-minus_slope,
        stderr=stderr,
        interval=(-minus_slope - half_width, -minus_slope + half_width),
        constant=float(np.exp(intercept)),
        evidence=float(evidence),
        log_exponent=-float(log_weights[1] @ log_mean),
        misfit=float(min(misfits) / (len(n) - 2)),
        used=tuple(int(size) for size in n),
    )


def local_slopes(sizes: Array, powers: Array, *, moment: int = 1, seed: int = 0) -> tuple[Array, Array]:
    """Slopes −Δ ln e/Δ ln n between neighbouring sizes and their standard errors: two arrays (sizes − 1,)."""
    step = np.diff(np.log(sizes))
    tiny = np.finfo(float).tiny
    slopes = -np.diff(np.log(np.maximum(typical(powers, moment), tiny))) / step
    logs = np.log(np.maximum(bootstrap(powers, seed, moment), tiny))
    return slopes, np.std(np.diff(logs, axis=1), axis=0) / step


def typical(powers: Array, moment: int = 1) -> Array:
    """The mean (moment 1) or root mean square (moment 2) over replicates: (replicates, sizes) to (sizes,)."""
    return _root(powers.mean(0), moment)


def typical_stderr(powers: Array, moment: int = 1) -> Array:
    """Standard error of `typical`, by the delta method for a root mean square; 0 where the error is: (sizes,)."""
    value = typical(powers, moment)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = powers.std(0, ddof=1) / np.sqrt(len(powers))
        return np.where(value > 0, spread / (moment * value ** (moment - 1)), 0.0)


def bootstrap(powers: Array, seed: int, moment: int = 1) -> Array:
    """`typical` errors of resampled rows: (resamples, sizes)."""
    count = len(powers)
    kept = _resamples(count, seed) if count <= MOST_KEPT else _draw_resamples(count, seed)
    return _root(np.concatenate([weights @ powers for weights in kept]), moment)


@lru_cache(maxsize=4)
def _resamples(count: int, seed: int) -> tuple[Array, ...]:
    """The weights of rows in every resample: many curves have as many rows."""
    return tuple(_draw_resamples(count, seed))


def _draw_resamples(count: int, seed: int) -> Iterator[Array]:
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xB007]))
    even = np.full(count, 1 / count)
    for _ in range(BOOTSTRAP // AT_ONCE):
        yield generator.multinomial(count, even, size=AT_ONCE) / count


def _root(averages: Array, moment: int) -> Array:
    """Rows with known quantities taken out (`controls`) need not be positive, and resamples of a few need not be."""
    return np.asarray(np.maximum(averages, 0) ** (1 / moment))


def _line_weights(x: Array, precision: Array) -> Array:
    """Rows w₀, w₁ such that w₀·y and w₁·y are intercept and slope of the weighted least-squares line: (2, sizes)."""
    design = np.stack((np.ones_like(x), x))
    weighted = design * precision
    return np.asarray(np.linalg.solve(weighted @ design.T, weighted), dtype=np.float64)


def _misfit(x: Array, y: Array, covariance: Array, count: int) -> float:
    """χ² of the best line through correlated points.

    The covariance is estimated from `count` replicates, which overstates χ² by (count − 1)/(count − 2 − points) (the
    inverse of a Wishart matrix); with too few replicates for that, correlations are ignored.
    """
    points = len(x)
    spare = count - 2 - points
    shrink = spare / (count - 1)
    if spare < points:
        covariance, shrink = np.diag(np.diag(covariance)), 1.0
    root = np.linalg.cholesky(covariance + 1e-12 * np.trace(covariance) / points * np.eye(points))
    design = np.linalg.solve(root, np.stack((np.ones_like(x), x), 1))
    target = np.linalg.solve(root, y)
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float(residual @ residual) * shrink
