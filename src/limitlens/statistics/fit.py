"""Rates (exponents of decay with n) fitted to error curves, with confidence intervals.

The power law e = c n^{−β} is compared with the logarithmic law e = c (ln n)^{−γ}. Both have two parameters, so the
difference of their misfits χ² is that of their information criteria (AIC). The local slopes γ/ln n of a logarithm fall
to 0. Slopes that fall and then level off look the same on few sizes, so a logarithm with a large γ has to fit better
than e = c n^{−β} (1 + b n^{−δ}) with δ = 1/2 or 1, whose slopes fall to β.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from limitlens.errors import Array
from limitlens.statistics.bootstrap import ENDS, TwoWayBootstrap, student_factor

DECIDES = 10  # evidence from which on one law is preferred to the other
GENTLE = 1.5  # largest γ of a logarithm that is compared with n^{−β} alone; hardmax has .8 on n = 1e2 to 1e6
FARTHEST = 1e15  # largest size at which two laws are said to become distinguishable
BENDS = np.geomspace(0.01, 100, 41)  # values of b n^{−δ} at the smallest size


@dataclass(frozen=True)
class Rate:
    """Exponent β of the power law e = c n^{−β} fitted to an error curve, and a comparison with a logarithmic law."""

    slope: float  # β > 0 of e = c n^{−β}; always of the power law, so that rates can be compared
    stderr: float  # standard error and 95% interval of the slope, over replicates, clusters of queries and windows
    interval: tuple[float, float]
    constant: float  # c of the power law
    # AIC(log) − AIC(power): positive for a power law, noticeable beyond ±2, decisive beyond ±10. If a logarithm with
    # γ > 1.5 fits better than n^{−β}, this is against the power law that levels off.
    evidence: float
    log_exponent: float  # γ of e = c (ln n)^{−γ}
    misfit: float  # χ² per degree of freedom of the better law; far above 1 neither law holds on these sizes
    used: tuple[int, ...]  # sizes in the fit; those with errors too close to numerical error are left out
    covariance: Array | None = field(default=None, compare=False, repr=False)  # of the log errors at the sizes used
    independent: int = 0  # number of replicates from which it was estimated

    @property
    def law(self) -> str:
        """Law that fits decisively better: "power" or "log", or "undecided" if the AIC differ by less than 10."""
        return "undecided" if abs(self.evidence) < DECIDES else "power" if self.evidence > 0 else "log"

    def decides_at(self, law: str) -> float | None:
        """Largest size that would decide an undecided fit with probability 0.9 if the true law is "power" or "log".

        Assumes as many sizes, spread from the same smallest one, with the same errors (heuristic); 1e15 stands for 1e15
        or more. The evidence of a curve that follows one law has about the mean D² of the curve without noise, and the
        standard deviation 2D, so that it exceeds `DECIDES` with probability 0.9 from D² − 1.28·2D = `DECIDES` on.
        """
        if self.covariance is None or self.law != "undecided":
            return None
        covariance, x = self.covariance, np.log(np.asarray(self.used, dtype=np.float64))

        def short_of(last: float) -> float:
            """Evidence that lacks with sizes that end at e^last."""
            far = x[0] + (last - x[0]) / (x[-1] - x[0]) * (x - x[0])
            curve = -self.slope * far if law == "power" else -self.log_exponent * np.log(far)
            evidence = _compare(far, curve, covariance, self.independent)[2]
            return float((1.2816 + np.sqrt(1.2816**2 + DECIDES)) ** 2 - (evidence if law == "power" else -evidence))

        ends = float(x[-1]), float(np.log(FARTHEST))
        if short_of(ends[0]) <= 0:
            return float(self.used[-1])
        return FARTHEST if short_of(ends[1]) > 0 else float(np.exp(optimize.brentq(short_of, *ends, xtol=0.01)))

    def document(self) -> dict[str, Any]:
        """Fitted rate as a dictionary for JSON; `law` is the better law, `verdict` the same or "undecided"."""
        shown = {name: value for name, value in asdict(self).items() if name not in ("covariance", "independent")}
        return {**shown, "law": "power" if self.evidence >= 0 else "log", "verdict": self.law}

    def __str__(self) -> str:
        law = f"{self.law} law" if self.law != "undecided" else "law undecided"
        return f"{self.slope:.3f} ± {self.stderr:.3f} ({law}, evidence {self.evidence:+.1f})"


def fit_rate(sizes: Array, bootstrap: TwoWayBootstrap, usable: NDArray[np.bool_] | None = None) -> Rate | None:
    """Fit the rate of decay of an error curve at the `usable` sizes; None below three such sizes or two replicates."""
    n = np.asarray(sizes, dtype=np.float64)
    mean = bootstrap.error_moments.mean((0, 1))
    keep = np.ones(len(n), bool) if usable is None else usable.copy()
    keep &= (mean > 0) & (n > np.e)  # (ln n)^{−γ} needs ln n > 1
    if keep.sum() < 3 or bootstrap.counts[0] < 2:
        return None
    n = n[keep]
    log_mean = np.log(mean[keep]) / bootstrap.moment
    parts = [part[:, keep] - part[:, keep].mean(0) for part in bootstrap.deviations()]
    covariances = [part.T @ part / (len(part) - 1) for part in parts]
    text = bootstrap.text[:, keep]
    covariance = covariances[0] + covariances[1] + text.T @ text
    # All sizes have equal weight: estimated weights would favour sizes at which rare replicates happen to be missing.
    weights = _line_weights(np.log(n))
    over_replicates, over_clusters = (float(weights[1] @ part @ weights[1]) for part in covariances)
    over_text = float(np.square(text @ weights[1]).sum())
    intercept, minus_slope = (float(w @ log_mean) for w in weights)
    slope_weights = np.zeros(len(keep))
    slope_weights[keep] = weights[1]
    wider = student_factor(bootstrap.degrees_of_freedom(slope_weights, over_replicates, over_clusters))
    half_width = float(special.ndtri(ENDS[1]) * np.sqrt(wider**2 * (over_replicates + over_clusters) + over_text))
    replicates, clusters = bootstrap.counts
    independent = min(replicates, clusters) if clusters > 1 else replicates
    power, log, evidence, log_exponent = _compare(np.log(n), log_mean, covariance, independent)
    return Rate(
        slope=-minus_slope,
        stderr=float(np.sqrt(over_replicates + over_clusters + over_text)),
        interval=(-minus_slope - half_width, -minus_slope + half_width),
        constant=float(np.exp(intercept)),
        evidence=evidence,
        log_exponent=log_exponent,
        misfit=float(min(power, log) / (len(n) - 2)),
        used=tuple(int(size) for size in n),
        covariance=covariance,
        independent=independent,
    )


def _compare(x: Array, log_error: Array, covariance: Array, count: int) -> tuple[float, float, float, float]:
    """Misfits χ² of a power law and a logarithm to log errors at x = ln n, evidence as in `Rate`, and γ of the log."""
    log_exponent = -float(_line_weights(np.log(x))[1] @ log_error)
    power, log = (_misfit(at, log_error, covariance, count) for at in (x, np.log(x)))
    evidence = log - power
    if evidence < 0 and log_exponent > GENTLE:
        bends = (np.log1p(b * np.exp(delta * (x[0] - x))) for b in BENDS for delta in (0.5, 1.0))
        level = min(_misfit(x, log_error - bend, covariance, count) for bend in bends)
        evidence = max(evidence, log - level - 2)  # 2 for one more parameter
    return power, log, evidence, log_exponent


def _line_weights(x: Array) -> Array:
    """Weights (2, sizes) whose products with y are the intercept and slope of the least-squares line of y over x."""
    design = np.stack((np.ones_like(x), x))
    return np.asarray(np.linalg.solve(design @ design.T, design), dtype=np.float64)


def _misfit(x: Array, y: Array, covariance: Array, count: int) -> float:
    """Misfit χ² of the best line through points (x, y), with a covariance of y estimated from `count` replicates.

    The factor (count − 1)/(count − len(x)) by which such an estimate increases the mean of χ² (Hotelling, for the
    len(x) − 2 dimensions that a line leaves) is divided out. With too few replicates, correlations are ignored.
    """
    points = len(x)
    shrink = (count - points) / (count - 1)
    if count - 2 - points < points:
        covariance, shrink = np.diag(np.diag(covariance)), 1.0
    root = np.linalg.cholesky(covariance + max(1e-12 * np.trace(covariance) / points, 1e-30) * np.eye(points))
    design = np.linalg.solve(root, np.stack((np.ones_like(x), x), 1))
    target = np.linalg.solve(root, y)
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float(residual @ residual) * shrink
