"""Rates from error curves, with honest intervals.

A curve is a mean of errors to the power `moment`: the first for E|error|, the second for the root mean square, which
can have different exponents. Nested sizes are correlated, so uncertainty comes from resampling whole rows.
The power law is e = c n^{−β}; the logarithmic law e = c (ln n)^{−γ} has as many parameters, so the difference of their
misfits is the difference of their information criteria.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from limitlens.errors import Array
from limitlens.statistics.bootstrap import LEVEL, TwoWayBootstrap, student

DECIDES = 10  # evidence from which on one law is preferred to the other


@dataclass(frozen=True)
class Rate:
    """A fitted rate."""

    slope: float  # β > 0 of e = c n^{−β}, always of the power law, so that rates compare whatever the law
    stderr: float  # standard error and 95% interval of the slope, over replicates, clusters of queries and windows
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


def fit_rate(sizes: Array, scatter: TwoWayBootstrap, usable: NDArray[np.bool_] | None = None) -> Rate | None:
    """Fit a rate to a curve at the `usable` sizes.

    None with fewer than three usable sizes or two replicates: there is no rate to speak of.
    """
    n, mean = np.asarray(sizes, dtype=np.float64), scatter.error_moments.mean((0, 1))
    keep = np.ones(len(n), bool) if usable is None else usable.copy()
    keep &= (mean > 0) & (n > np.e)  # (ln n)^{−γ} needs ln n > 1
    if keep.sum() < 3 or scatter.counts[0] < 2:
        return None
    n, log_mean = n[keep], np.log(mean[keep]) / scatter.moment
    parts = [part[:, keep] - part[:, keep].mean(0) for part in scatter.deviations()]
    covariances = [part.T @ part / (len(part) - 1) for part in parts]
    text = scatter.text[:, keep]
    covariance = covariances[0] + covariances[1] + text.T @ text
    # Every size counts alike: weights from the scatter at hand would lean on sizes where rare replicates are missing.
    weights = _line_weights(np.log(n))
    over, across = (float(weights[1] @ part @ weights[1]) for part in covariances)
    other = float(np.square(text @ weights[1]).sum())
    stderr = float(np.sqrt(over + across + other))
    intercept, minus_slope = (float(w @ log_mean) for w in weights)
    placed = np.zeros(len(keep))
    placed[keep] = weights[1]
    wider = student(scatter.freedom(placed, over, across))
    half_width = float(special.ndtri((1 + LEVEL) / 2)) * float(np.sqrt(wider**2 * (over + across) + other))
    count = scatter.witnesses
    misfits = [_misfit(axis, log_mean, covariance, count) for axis in (np.log(n), np.log(np.log(n)))]
    log_weights = _line_weights(np.log(np.log(n)))
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


def local_slopes(sizes: Array, scatter: TwoWayBootstrap) -> tuple[Array, Array]:
    """Slopes −Δ ln e/Δ ln n between neighbouring sizes and their standard errors: two arrays (sizes − 1,)."""
    step, tiny = np.diff(np.log(sizes)), np.finfo(float).tiny
    slopes = -np.diff(np.log(np.maximum(scatter.error_moments.mean((0, 1)), tiny))) / scatter.moment / step
    return slopes, np.std(np.diff(scatter.draws(), axis=1), axis=0) / step


def _line_weights(x: Array) -> Array:
    """Rows w₀, w₁ such that w₀·y and w₁·y are intercept and slope of the least-squares line: (2, sizes)."""
    design = np.stack((np.ones_like(x), x))
    return np.asarray(np.linalg.solve(design @ design.T, design), dtype=np.float64)


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
    root = np.linalg.cholesky(covariance + max(1e-12 * np.trace(covariance) / points, 1e-30) * np.eye(points))
    design = np.linalg.solve(root, np.stack((np.ones_like(x), x), 1))
    target = np.linalg.solve(root, y)
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float(residual @ residual) * shrink
