"""Sweeps of a study: over the horizon of the head, and over the radius of compactly supported tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.attention.head import Head
from limitlens.errors import Array, InputError
from limitlens.experiments.study import study
from limitlens.experiments.study_result import Curve
from limitlens.measures.base import Measure

if TYPE_CHECKING:
    import pandas as pd

GROWTH_ERRORS = ("uniform", "mean", "covariance")


def sweep(
    studies: Sequence[tuple[float, Callable[[Callable[[float, float], None]], Curve]]],
    progress: Callable[[float, float], None] | None = None,
) -> list[tuple[float, Curve]]:
    """Run studies one after another, each given as (value swept, function of a progress callback)."""
    report = progress or (lambda done, total: None)
    curves = []
    for index, (value, run) in enumerate(studies):
        curve = run(lambda done, total, index=index: report(index + done / total, len(studies)))  # type: ignore[misc]
        curves.append((value, curve))
        if curve.interrupted:
            break
    return curves


@dataclass(frozen=True)
class Growth:
    """How the constant C of C/√n grows with the radius of the tokens: ln C = a + b R against ln C = a + p ln R.

    `evidence` is AIC(polynomial) − AIC(exponential) with equal numbers of parameters: positive speaks for exponential.
    """

    exponential_rate: float
    polynomial_degree: float
    evidence: float

    @property
    def law(self) -> str:
        """The law that fits better."""
        return "exponential" if self.evidence > 0 else "polynomial"

    def document(self) -> dict[str, Any]:
        """The growth as JSON."""
        return {
            "law": self.law,
            "exponential_rate": self.exponential_rate,
            "polynomial_degree": self.polynomial_degree,
            "evidence": self.evidence,
        }


@dataclass(frozen=True)
class RadiusSweep:
    """Constants of the uniform and moment errors, √n · error at the largest size, as tokens spread over a ball."""

    radii: tuple[float, ...]
    curves: tuple[Curve, ...]

    def constants(self, name: str) -> tuple[Array, Array]:
        """√n · error at the largest size and its standard error, for each radius."""
        root = np.sqrt(self.curves[0].sizes[-1])
        value = np.array([root * curve.error(name)[-1] for curve in self.curves])
        stderr = np.array([root * curve.stderr(name)[-1] for curve in self.curves])
        return value, stderr

    def growth(self, name: str) -> Growth:
        """Exponential against polynomial growth of the constant in the radius."""
        value, stderr = self.constants(name)
        y, precision = np.log(value), value / np.maximum(stderr, 1e-300)
        fits = []
        for axis in (np.asarray(self.radii), np.log(self.radii)):
            slope, offset = np.polyfit(axis, y, 1, w=precision)
            fits.append((float(slope), float((precision**2 * (y - slope * axis - offset) ** 2).sum())))
        return Growth(fits[0][0], fits[1][0], fits[1][1] - fits[0][1])

    @property
    def table(self) -> pd.DataFrame:
        """One row per error and radius: error, radius, constant, stderr."""
        import pandas as pd

        parts = []
        for name in GROWTH_ERRORS:
            value, stderr = self.constants(name)
            parts.append(pd.DataFrame({"error": name, "radius": self.radii, "constant": value, "stderr": stderr}))
        return pd.concat(parts, ignore_index=True)

    def document(self) -> dict[str, Any]:
        """The sweep as JSON."""
        constants = {name: dict(zip(("value", "stderr"), self.constants(name), strict=True)) for name in GROWTH_ERRORS}
        return {
            "radii": list(self.radii),
            "n": self.curves[0].sizes[-1],
            "constants": constants,
            "growth": {name: self.growth(name).document() for name in GROWTH_ERRORS},
            "studies": [curve.document() for curve in self.curves],
        }


def radius_sweep(
    measure: Measure,
    head: Head,
    radii: Sequence[float],
    sizes: str | Sequence[int],
    *,
    replicates: int = 100,
    queries: int | None = None,
    seed: int = 0,
    progress: Callable[[float, float], None] | None = None,
) -> RadiusSweep:
    """Scale compactly supported tokens to each radius R and measure the uniform error over |x| ≤ R beside the moments'.

    The head stays the same, so scores grow like R². The bound on the uniform error grows exponentially with them, since
    the ball holds queries that few tokens answer; the moments average over queries that are tokens, and grow like a
    power of R. In low dimension even the uniform error ends up growing like a power, once tilted laws are small caps.
    """
    if not np.isfinite(measure.radius):
        raise InputError(
            f"{measure!r} has unbounded support and a sweep of the radius scales the support; "
            "use sphere, ball, cube or vmf"
        )
    if len(radii) < 3:
        raise InputError(f"{len(radii)} radii were given; expected at least 3, since a growth is fitted through them")

    def at(radius: float) -> Callable[[Callable[[float, float], None]], Curve]:
        scaled = measure.scaled(radius / measure.radius)
        return lambda report: study(
            scaled, head, sizes, replicates=replicates, queries=queries, radius=radius, seed=seed, progress=report
        )

    curves = sweep([(radius, at(radius)) for radius in radii], progress)
    return RadiusSweep(tuple(radius for radius, _ in curves), tuple(curve for _, curve in curves))
