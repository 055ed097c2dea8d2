"""`sweep`: repeat a study for several horizons (strengths of the scores), or for several radii of bounded tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.arrays import pd
from limitlens.attention.head import Head, designed_head
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, as_array
from limitlens.experiments.study import study, study_cost
from limitlens.experiments.study_result import COLOURS, StudyResult, span, trust
from limitlens.measures.custom import TokenLaw, as_measure
from limitlens.record import Run
from limitlens.report.text import join, plural, short
from limitlens.report.view import Axis, Block, Figure, Guide, Section, Table, View, cells, line, points
from limitlens.results import Result
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import under
from limitlens.sampling.interrupt import StopNow
from limitlens.theory import rates

FEWEST_RADII = 3  # a growth has two parameters
FITTED = ("mean", "covariance", "output")  # errors whose rates a sweep of the horizon compares
GROWING = ("uniform", "mean", "covariance")  # errors whose constants a sweep of the radius compares


@dataclass(frozen=True, eq=False, repr=False)
class _Sweep(Result):
    """Result of `sweep`: one study for each value of the horizon or of the radius."""

    values: tuple[float, ...]
    curves: tuple[StudyResult, ...]
    interrupted: bool = False  # whether fewer values than requested were studied

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of all studies of the sweep, without duplicates."""
        return tuple(dict.fromkeys(warning for curve in self.curves for warning in curve.warnings))

    def document(self) -> dict[str, Any]:
        """JSON document of the sweep: values of the horizon or radius, and the document of every study."""
        studies = [curve.document() for curve in self.curves]
        return {self.kind: list(self.values), "studies": studies, "interrupted": self.interrupted}

    def arrays(self) -> dict[str, Array]:
        """Arrays of all studies by name, to be saved; names start with the index of the study."""
        return {f"{k}.{name}": array for k, curve in enumerate(self.curves) for name, array in curve.arrays().items()}

    @classmethod
    def load(cls, run: Run) -> Self:
        """Read a saved sweep from a run folder."""
        arrays = run.arrays()
        curves = [StudyResult.stored(study, under(f"{k}.", arrays)) for k, study in enumerate(run.document["studies"])]
        return cls(tuple(run.document[cls.kind]), tuple(curves), run.document["interrupted"])


class HorizonSweep(_Sweep):
    """Result of `sweep` over horizons: one study for each horizon (strength of the head's scores) in `values`."""

    kind, file = "horizons", "curve"

    @property
    def table(self) -> pd.DataFrame:
        """Tables of the errors of all studies as one, with a column `horizon`."""
        parts = [curve.table.assign(horizon=horizon) for horizon, curve in zip(self.values, self.curves, strict=True)]
        return pd.concat(parts, ignore_index=True)

    def slopes(self, name: str) -> tuple[Array, Array]:
        """Fitted rates of the error `name` and standard errors, one per horizon (score strength); NaN without a fit."""
        fitted = [curve.rate(name) for curve in self.curves]
        pairs = [(np.nan, np.nan) if rate is None else (rate.slope, rate.stderr) for rate in fitted]
        value, stderr = np.transpose(pairs)
        return value, stderr

    def view(self) -> View:
        """HTML page: fitted rates of the errors against the horizon (score strength), with the rates of theory."""
        first, count = self.curves[0], plural(len(self.values), "horizon")
        slopes = [cells(*self.slopes(name)) for name in FITTED]
        asymptotic = {name: [curve.asymptotic[name] for curve in self.curves] for name in ("mean", "output")}
        drawn = [curve.theory["rate_drawn"] for curve in self.curves]
        rows = [*zip(self.values, *slopes, *asymptotic.values(), drawn, strict=True)]
        columns = ["H", *FITTED, "asymptotic, moments", "asymptotic, output (rms)", "1/(2(1+H²))"]
        found = "No rate of the mean can be fitted: too few sizes, or errors too close to the numerical floor."
        means = self.slopes("mean")[0]
        known = np.flatnonzero(np.isfinite(means))
        if known.size:
            ends = [f"{short(means[place])} at H = {short(self.values[place])}" for place in known[[0, -1]]]
            distance = short(np.nanmax(np.abs(means - asymptotic["mean"])))
            found = f"The rate of the mean goes from {ends[0]} to {ends[1]}, within {distance} of its asymptotic value."
        lead = "One point per horizon, with its 95% bar; the sharp lines hold for unbounded tokens."
        verdict = (
            f"Attention over n tokens of {first.measure} was compared with its exact limit for {count} of the head, "
            f"{span(first)}.",
            found,
            "Plan with the curve of your head's horizon, not with n⁻⁰·⁵⁰: beyond H = 1 each further digit costs many "
            "more tokens.",
        )
        title = f"{first.measure}, {count} from {short(min(self.values))} to {short(max(self.values))}"
        blocks: list[Block] = [self._rates_figure(), Table("rates", columns, rows)]
        sections = [Section("Rates over the horizon", lead, blocks)]
        subtitle, caveats = f"{first.replicates} replicates · {span(first)}", trust(self.curves, self.interrupted)
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=caveats)

    def _rates_figure(self) -> Figure:
        fine = np.geomspace(min(self.values), max(self.values), 80).tolist()
        rms = "sharp, output (rms): min(½, (√(1+4/H²)−1)/4), verified in d = 1"
        series = [
            line("sharp, moments: min(½, 1/(1+H²)), verified in d = 1", fine, map(rates.rate_sharp, fine), "ink"),
            line(rms, fine, map(rates.rate_rms_output, fine), "ink", "dashed"),
            line("drawn: 1/(2(1+H²))", fine, map(rates.rate_drawn, fine), "grey", "dotted"),
        ]
        for name in FITTED:
            slope, stderr = self.slopes(name)
            if np.isfinite(slope).any():
                series.append(points(f"{name}, measured", self.values, slope, COLOURS[name], stderr, positive=False))
        shown = [rate for part in series for rate in part.y if rate is not None]
        up = Axis("rate β: error falls like n to the −β", low=min(0, *shown), high=1.05 * max(0.55, *shown))
        across, guides = Axis("horizon H", log=True), [Guide("½: plain averaging", y=0.5)]
        return Figure("Fitted rates over the horizon", across, up, series, guides, height=380)


@dataclass(frozen=True)
class Growth:
    """How the constant C of an error C/√n grows with the radius R of the tokens: like e^{bR} or like R^p."""

    law: str  # the growth that fits better: exponential or polynomial
    exponential_rate: float  # b
    polynomial_degree: float  # p
    evidence: float  # AIC(polynomial) − AIC(exponential), with as many parameters: positive favours exponential


class RadiusSweep(_Sweep):
    """Result of `sweep` over radii: how the errors grow as tokens are scaled to larger radii."""

    kind, file = "radii", "constants"

    def constants(self, name: str) -> tuple[Array, Array]:
        """√n times the error `name` at the largest n, and its standard error, for each radius."""
        last = [(curve.error[-1], curve.stderr[-1]) for curve in (study.errors[name] for study in self.curves)]
        value, stderr = np.sqrt(self.curves[0].sizes[-1]) * np.transpose(last)
        return value, stderr

    def growth(self, name: str) -> Growth | None:
        """Fit of how √n times the error `name` grows with the radius; None for fewer than 3 radii."""
        if len(self.values) < FEWEST_RADII:
            return None
        value, stderr = self.constants(name)
        y, precision = np.log(value), value / np.maximum(stderr, 1e-300)
        fits = []
        for axis in (np.asarray(self.values), np.log(self.values)):
            slope, offset = np.polyfit(axis, y, 1, w=precision)
            fits.append((float(slope), float((precision**2 * (y - slope * axis - offset) ** 2).sum())))
        (rate, exponential), (degree, polynomial) = fits
        better = "exponential" if polynomial > exponential else "polynomial"
        return Growth(better, rate, degree, polynomial - exponential)

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per error and radius: √n times the error at the largest n, and its standard error."""
        columns = {name: (self.values, *self.constants(name)) for name in GROWING}
        rows = [(name, *row) for name, column in columns.items() for row in zip(*column, strict=True)]
        return pd.DataFrame(rows, columns=["error", "radius", "constant", "stderr"])

    def document(self) -> dict[str, Any]:
        """JSON document of the sweep: radii, studies, and √n times the errors with their growth in the radius."""
        return {
            **super().document(),
            "n": self.curves[0].sizes[-1],
            "constants": {name: dict(zip(("value", "stderr"), self.constants(name), strict=True)) for name in GROWING},
            "growth": {name: self.growth(name) for name in GROWING},
        }

    def view(self) -> View:
        """HTML page: growth of the errors with the radius of the tokens."""
        first, last = self.curves[0], f"n = {self.curves[0].sizes[-1]:,}"
        constants = {name: self.constants(name) for name in GROWING}
        grown = {name: growth for name in GROWING if (growth := self.growth(name)) is not None}
        columns = ["error", *(f"R = {short(radius)}" for radius in self.values)]
        tables = [Table("constants", columns, [[name, *cells(*found)] for name, found in constants.items()])]
        found = "There are too few radii to fit the growth of the constants of C/√n."
        if grown:
            laws = [(name, *vars(growth).values()) for name, growth in grown.items()]
            columns = ["error", "growth", "b of e^(bR)", "p of R^p", "evidence for an exponential"]
            tables.append(Table("growth", columns, laws))
            growths = join([f"{name} {of.law}ly" for name, of in grown.items()])
            found = f"With the radius the constants of C/√n grow: {growths}."
        series = [points(name, self.values, y, COLOURS[name], bar, joined=True) for name, (y, bar) in constants.items()]
        across, up = Axis("radius R of tokens and queries"), Axis("√n × error", log=True)
        figure = Figure("Constants against the radius", across, up, series, height=360)
        lead = f"√n × error at {last} as tokens and queries are scaled to radius R, with 95% bars."
        verdict = (
            f"Tokens of {first.measure} were scaled to balls of {len(self.values)} radii, and the maximum error over "
            "the queries of each ball was measured, as well as the errors of the moments.",
            found,
            "Do not read a uniform bound as the error of a typical query: the ball holds queries that no token "
            "resembles.",
        )
        title = f"{first.measure}: radius {short(self.values[0])} to {short(self.values[-1])}"
        subtitle = f"{len(self.values)} radii · {last} · {first.replicates} replicates"
        sections = [Section("Growth of the constants", lead, [figure, *tables])]
        caveats = trust(self.curves, self.interrupted)
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=caveats)


def sweep(
    measure: TokenLaw, *, horizons: Sequence[float] | None = None, radii: Sequence[float] | None = None,
    horizon: float = 1.0, head: Head | None = None, spectrum: str | Sequence[float] = "flat",
    sizes: str | Sequence[int] = "1000:30000:12", replicates: int = 200, queries: int | None = None,
    radius: float | None = None, yes: bool = False, progress: Progress | None = None, seed: int = 0, **options: Any,
) -> HorizonSweep | RadiusSweep:  # fmt: skip
    """Run a study for each horizon (strength of the head's scores), or for each radius of bounded tokens.

    Give exactly one of `horizons` and `radii`. For each horizon H = ‖Σ^{1/2} A Σ^{1/2}‖ a head with this `spectrum` is
    designed, and a `radius` adds the uniform error, the largest over queries in the ball of this radius. For each of
    the radii R the tokens are scaled to radius R, and the uniform error over |x| ≤ R is measured too. All radii share
    one head: `head`, or one designed for `horizon` over the tokens before scaling. Other options are those of `study`.

    >>> law = ll.Gaussian(0.0, 1.0)
    >>> ll.sweep(law, horizons=[0.5, 1.5], sizes=[50, 200, 800], replicates=12, queries=32)
    <HorizonSweep: Gaussian(dim=1, mean=0, covariance=1), 2 horizons from 0.5 to 1.5, 12 replicates · n from 50 to 800>
    """
    if (horizons is None) == (radii is None):
        which = "neither horizons nor radii" if radii is None else "both horizons and radii"
        raise InputError(f"{which} were given; expected one of them, such as horizons=[0.5, 1, 2]")
    if radii is not None and radius is not None:
        raise InputError("both radius and radii were given; expected radii alone: each is also the ball of queries")
    if radii is None and head is not None:
        raise InputError("both head and horizons were given; expected a head with radii alone: horizons make their own")
    name, given = ("horizons", horizons) if radii is None else ("radii", radii)
    values = as_array(name, given, ndim=1).tolist()
    law = as_measure(measure)
    if radii is None and not values:
        raise InputError("no horizon was given; expected at least one, such as horizons=[0.5, 1, 2]")
    if radii is not None and not np.isfinite(law.radius):
        remedy = "use sphere, ball, cube or vmf"
        raise InputError(f"radii scale a law of bounded support, and {law!r} is unbounded; {remedy}")
    if radii is not None and len(values) < FEWEST_RADII:
        raise InputError(f"{len(values)} radii were given; expected at least {FEWEST_RADII}, to fit a growth to them")
    designed = [horizon] if radii is not None else values
    heads = [head] if head else [designed_head(measure, value, spectrum=spectrum, seed=seed) for value in designed]
    seconds, memory = study_cost(heads[0], Cells(parse_sizes(sizes)), replicates, queries)
    check_cost("the sweep", len(values) * seconds, len(values) * memory, yes=yes)
    options |= {"sizes": sizes, "replicates": replicates, "queries": queries, "seed": seed}
    one = partial(study, yes=True, **options)
    if radii is None:
        studies = [partial(one, law, head, radius=radius) for head in heads]
        return HorizonSweep(*_run_each(values, studies, progress))
    studies = [partial(one, law.scaled(R / law.radius), heads[0], radius=R) for R in values]
    return RadiusSweep(*_run_each(values, studies, progress))


def _run_each(
    values: Sequence[float], studies: Sequence[Callable[..., StudyResult]], progress: Progress | None
) -> tuple[tuple[float, ...], tuple[StudyResult, ...], bool]:
    """Run the studies in turn; returns finished values and results, and whether an interrupt ended the sweep early."""
    report = progress or (lambda done, total: None)
    curves: list[StudyResult] = []
    try:
        for index, run in enumerate(studies):
            curves.append(run(progress=lambda done, total, index=index: report(index + done / total, len(studies))))
            if curves[-1].interrupted:
                break
    except KeyboardInterrupt as stop:
        if not curves or isinstance(stop, StopNow):
            raise
    return tuple(values[: len(curves)]), tuple(curves), curves[-1].interrupted or len(curves) < len(studies)
