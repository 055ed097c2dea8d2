"""`sweep`: a study for each horizon of the head, or for each radius of compactly supported tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.arrays import pd
from limitlens.attention.head import Head, designed_head
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress
from limitlens.experiments.study import study, study_cost
from limitlens.experiments.study_result import StudyResult
from limitlens.experiments.study_view import GROWING, constants_figure, horizons_view, radii_view, rates_figure
from limitlens.measures.base import Measure
from limitlens.measures.custom import TokenLaw, as_measure
from limitlens.record import Run
from limitlens.report.view import Figure
from limitlens.results import Result
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import under
from limitlens.sampling.cluster import connected

FEWEST_RADII = 3  # a growth has two parameters


@dataclass(frozen=True, eq=False, repr=False)
class _Swept(Result):
    """One study for each value of the swept parameter, which `kind` names."""

    values: tuple[float, ...]
    curves: tuple[StudyResult, ...]
    interrupted: bool = False  # fewer values than requested

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of every study, each once."""
        return tuple(dict.fromkeys(warning for curve in self.curves for warning in curve.warnings))

    def document(self) -> dict[str, Any]:
        """The sweep as JSON."""
        studies = [curve.document() for curve in self.curves]
        return {self.kind: list(self.values), "studies": studies, "interrupted": self.interrupted}

    def arrays(self) -> dict[str, Array]:
        """The arrays of every study, prefixed by its index."""
        return {f"{k}.{name}": array for k, curve in enumerate(self.curves) for name, array in curve.arrays().items()}

    @classmethod
    def load(cls, run: Run) -> Self:
        """The sweep of a run folder."""
        arrays = run.arrays()
        curves = [StudyResult.stored(study, under(f"{k}.", arrays)) for k, study in enumerate(run.document["studies"])]
        return cls(tuple(run.document[cls.kind]), tuple(curves), run.document["interrupted"])


class HorizonSweep(_Swept):
    """One study for each horizon of the head."""

    kind, file = "horizons", "curve"

    @property
    def horizons(self) -> tuple[float, ...]:
        """The horizons, one per study."""
        return self.values

    @property
    def table(self) -> pd.DataFrame:
        """The tables of all studies, with a column `horizon`."""
        parts = [curve.table.assign(horizon=horizon) for horizon, curve in zip(self.horizons, self.curves, strict=True)]
        return pd.concat(parts, ignore_index=True)

    def figures(self) -> list[Figure]:
        """Fitted rates against the horizon, with the predicted ones."""
        return [rates_figure(self)]

    def __repr__(self) -> str:
        ends = f"{self.horizons[0]:.3g} to {self.horizons[-1]:.3g}"
        return f"<HorizonSweep: {self.curves[0].measure}, {len(self.horizons)} horizons from {ends}>"

    view = horizons_view


@dataclass(frozen=True)
class Growth:
    """Growth of the constant C of C/√n with the radius R of the tokens: ln C = a + b R against ln C = a + p ln R."""

    exponential_rate: float
    polynomial_degree: float
    evidence: float  # AIC(polynomial) − AIC(exponential), with as many parameters: positive favours exponential

    @property
    def law(self) -> str:
        """The law that fits better."""
        return "exponential" if self.evidence > 0 else "polynomial"


class RadiusSweep(_Swept):
    """Constants of the uniform and moment errors, √n · error at the largest size, as tokens spread over a ball."""

    kind, file = "radii", "constants"

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii, one per study."""
        return self.values

    def constants(self, name: str) -> tuple[Array, Array]:
        """√n · error at the largest size and its standard error, for each radius."""
        last = [(curve.error(name)[-1], curve.stderr(name)[-1]) for curve in self.curves]
        value, stderr = np.sqrt(self.curves[0].sizes[-1]) * np.transpose(last)
        return value, stderr

    def growth(self, name: str) -> Growth | None:
        """Growth of the constant of an error; None where an interrupt left fewer than 3 radii."""
        if len(self.radii) < FEWEST_RADII:
            return None
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
        columns = {name: (self.radii, *self.constants(name)) for name in GROWING}
        rows = [(name, *row) for name, column in columns.items() for row in zip(*column, strict=True)]
        return pd.DataFrame(rows, columns=["error", "radius", "constant", "stderr"])

    def document(self) -> dict[str, Any]:
        """The sweep as JSON."""
        grown = {name: self.growth(name) for name in GROWING}
        return {
            **super().document(),
            "n": self.curves[0].sizes[-1],
            "constants": {name: dict(zip(("value", "stderr"), self.constants(name), strict=True)) for name in GROWING},
            "growth": {name: growth and {"law": growth.law, **asdict(growth)} for name, growth in grown.items()},
        }

    def figures(self) -> list[Figure]:
        """Constants of the uniform and moment errors against the radius of the tokens."""
        return [constants_figure(self)]

    def __repr__(self) -> str:
        laws = [f"{name} {growth.law}" for name in GROWING if (growth := self.growth(name))]
        ends = f"{len(self.radii)} radii from {self.radii[0]:.3g} to {self.radii[-1]:.3g}"
        return f"<RadiusSweep: {self.curves[0].measure}, {ends}; growth: {', '.join(laws) or 'not known'}>"

    view = radii_view


def sweep(
    measure: TokenLaw, *, horizons: Sequence[float] | None = None, radii: Sequence[float] | None = None,
    horizon: float = 1.0, head: Head | None = None, spectrum: str | Sequence[float] = "flat",
    sizes: str | Sequence[int] = "1000:30000:12", replicates: int = 200, queries: int | None = None,
    radius: float | None = None, yes: bool = False, progress: Progress | None = None, seed: int = 0, **options: Any,
) -> HorizonSweep | RadiusSweep:  # fmt: skip
    """Run a study for each horizon of a designed head, or for each radius to which compact tokens are scaled.

    Give exactly one of `horizons` and `radii`. `spectrum` is that of the designed head. With horizons, `radius` adds
    the uniform error over the ball of this radius. With radii R the head stays the same: `head`, or one designed for
    this `horizon` over the law as given. Scores then grow like R², and the uniform error over |x| ≤ R is measured as
    well as the errors of the moments. The bound of the uniform error grows exponentially with the scores, since the
    ball holds queries with few tokens near them; the moments average over queries that are tokens, and grow like a
    power of R. In low dimension the uniform error too ends up growing like a power, once tilted laws are small caps.
    The other options are those of `study`.

    >>> law = ll.Gaussian(0.0, 1.0)
    >>> ll.sweep(law, horizons=[0.5, 1.5], sizes=[50, 200, 800], replicates=12, queries=32)
    <HorizonSweep: Gaussian(dim=1, mean=0, covariance=1), 2 horizons from 0.5 to 1.5>
    """
    if (horizons is None) == (radii is None):
        which = "neither horizons nor radii" if radii is None else "both horizons and radii"
        raise InputError(f"{which} were given; expected one of them, such as horizons=[0.5, 1, 2]")
    if radii is not None and radius is not None:
        raise InputError("both radius and radii were given; expected radii alone: each is also the ball of queries")
    if radii is None and head is not None:
        raise InputError("both head and horizons were given; expected a head with radii alone: horizons make their own")
    values = [float(value) for value in (horizons if radii is None else radii) or ()]
    law = as_measure(measure)
    if radii is None and not values:
        raise InputError("no horizon was given; expected at least one, such as horizons=[0.5, 1, 2]")
    if radii is not None:
        _check_radii(law, values)
    designed = [horizon] if radii is not None else values
    heads = [head] if head else [designed_head(measure, value, spectrum=spectrum, seed=seed) for value in designed]
    seconds, memory = study_cost(heads[0], Cells(parse_sizes(sizes)), replicates, queries)
    check_cost("the sweep", len(values) * seconds, len(values) * memory, yes=yes)
    options |= {"sizes": sizes, "replicates": replicates, "queries": queries, "seed": seed}
    one = partial(study, yes=True, **options)
    if radii is None:
        studies = [partial(one, law, head, radius=radius) for head in heads]
        return HorizonSweep(*_run_each(values, studies, progress, options.get("ray")))
    studies = [partial(one, law.scaled(R / law.radius), heads[0], radius=R) for R in values]
    return RadiusSweep(*_run_each(values, studies, progress, options.get("ray")))


def _check_radii(law: Measure, radii: Sequence[float]) -> None:
    """Refuse radii for tokens of unbounded support, and too few of them for a growth."""
    if not np.isfinite(law.radius):
        raise InputError(f"{law!r} has unbounded support, which radii would scale; use sphere, ball, cube or vmf")
    if len(radii) < FEWEST_RADII:
        raise InputError(f"{len(radii)} radii were given; expected at least {FEWEST_RADII}, to fit a growth to them")


def _run_each(
    values: Sequence[float], studies: Sequence[Callable[..., StudyResult]], progress: Progress | None, ray: str | None
) -> tuple[tuple[float, ...], tuple[StudyResult, ...], bool]:
    """Values, results and whether an interrupt ended the sweep, of the studies that finished."""
    report = progress or (lambda done, total: None)
    curves: list[StudyResult] = []
    try:
        with nullcontext() if ray is None else connected(ray):  # one connection for all, so that workers stay warm
            for index, run in enumerate(studies):
                curves.append(run(progress=lambda done, total, index=index: report(index + done / total, len(studies))))
                if curves[-1].interrupted:
                    break
    except KeyboardInterrupt:
        if not curves:
            raise
    return tuple(values[: len(curves)]), tuple(curves), curves[-1].interrupted or len(curves) < len(studies)
