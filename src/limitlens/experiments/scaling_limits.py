"""Scaling limits of attention from one query over n keys, predicted and measured: ordered weights and output.

For a law of the keys, n and β (or θ), each quantity has the value of the scaling limit ("predicted"), the exact
expectation at this n ("exact"), and the value of a simulation of n keys ("measured", with its standard error).
Kolmogorov-Smirnov tests compare the laws of the largest weight, of Σw² and of the output with those of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from scipy import stats

from limitlens.arrays import pd
from limitlens.errors import Array, InputError
from limitlens.estimate import Estimate
from limitlens.experiments.quantity import Quantity, sampled, verified
from limitlens.experiments.regimes_figure import regime_figures
from limitlens.experiments.weight_samples import WeightSample, check_replicates, sample_direct, sample_weights
from limitlens.record import Run, to_json
from limitlens.report.text import cell, falling, short
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, Table, Text, View, line, points
from limitlens.results import Result
from limitlens.theory.prediction import Status
from limitlens.theory.scaling import control, regimes, weights
from limitlens.theory.scaling.control import Regime
from limitlens.theory.scaling.laws import GapLaw, PowerGap, named_law, uniform
from limitlens.theory.scaling.points import KeyPoints, PoissonPoints
from limitlens.theory.scaling.top_weight import mean_inverse_top, mean_top

FATE = {
    "averaging": "many keys share the mass, and the output is an average",
    "selective": "a few keys share the mass",
    "frozen": "one key holds nearly all of the mass",
}
CONTROL = {"theta": "θ", "critical_beta": "critical β for this n", "critical_n": "critical n for this β"}
QUANTITIES = {
    "participation": "Σw², the inverse number of effective keys",
    "top_weight": "largest weight w₁",
    "inverse_top_weight": "1/w₁",
    "entropy": "entropy (nats)",
    "keys_holding_90": "keys that hold 90% of the mass",
    "output_gap": "output gap β(1 − <q, Γ>)",
    "output_gap_variance": "variance of the output gap",
    "output_tangential_variance": "variance orthogonal to the query, × β",
}
FORMULAS = {
    "averaging": {
        "mean": "output along the query",
        "bias": "its bias at order 1/n",
        "radial_variance": "its variance",
        "tangential_variance": "variance orthogonal to the query",
        "effective_sample_size": "effective sample size",
    },
    "collapse": {"one_minus_top_weight": "1 − w₁", "nearest_distance": "distance of the nearest key"},
}
_MOST_NUMBERS = 2e8  # coordinates drawn by brute force; beyond, only the nearest keys are drawn
_COLLAPSED_TOP = 0.9  # E w₁ from which on the first-order formulas of the collapse are good to a few percent
_NEAR_LIMIT = 0.2  # in log E Σw²


@dataclass(frozen=True)
class LawTest:
    """Kolmogorov-Smirnov distance and p-value of a measured law against the law named by `against`."""

    against: str
    ks: float
    p: float


@dataclass(frozen=True)
class Averaging:
    """The subcritical formulas for the output along the query, <q, Γ>, and for one coordinate orthogonal to it."""

    applies: bool
    mean: Quantity
    shrinkage: Quantity
    bias: Quantity
    radial_variance: Quantity
    effective_sample_size: Quantity
    tangential_variance: Quantity | None


@dataclass(frozen=True)
class Collapse:
    """The supercritical formulas: distance of the nearest key, and the mass that the others keep where it is known."""

    applies: bool
    nearest_distance: Quantity
    one_minus_top_weight: Quantity | None


@dataclass(frozen=True)
class Ambient:
    """Keys of low local exponent at the critical β of the sphere they lie in."""

    beta: float
    theta: Quantity
    participation: Quantity


@dataclass(frozen=True, eq=False, repr=False)
class ScalingLimits(Result):
    """Everything predicted and measured for attention over n keys of a law at one β."""

    kind, file = "scaling", "scaling"
    law: GapLaw  # named in `inputs`, so not part of the document
    inputs: Mapping[str, Any]  # law and its parameters, dimension of the ambient sphere, n, θ, β, replicates, seed
    local: Mapping[str, float]  # exponent, a and c of P(D ≤ s) ~ c s^a near the query
    control: Mapping[str, Quantity]  # θ, and the critical β and n
    regime: Regime  # by the exact E Σw²
    quantities: Mapping[str, Quantity]  # expectations: of the limit, exact at n, measured
    averaging: Averaging  # formulas below the critical scale
    collapse: Collapse  # formulas above it
    laws: Mapping[str, LawTest]
    warnings: tuple[str, ...]  # that n is too small for the limit, which high exponents approach slowly
    method: str  # how keys were drawn: "direct" or "nearest keys"
    replaced_mass: float  # largest share of mass that a Gaussian approximates
    ambient: Ambient | None  # where the keys have a lower exponent than the ambient sphere

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        return {name: value for name, value in super().document().items() if name != "law"}

    @property
    def table(self) -> pd.DataFrame:
        """One row per quantity, by part."""
        parts = {"quantities": self.quantities, "averaging": vars(self.averaging), "collapse": vars(self.collapse)}
        rows = [
            {"part": part, "quantity": name, **to_json(quantity)}
            for part, quantities in parts.items()
            for name, quantity in quantities.items()
            if isinstance(quantity, Quantity)
        ]
        return pd.DataFrame(rows).dropna(axis=1, how="all")

    @classmethod
    def load(cls, run: Run) -> Self:
        """The result that a run folder holds."""
        inputs = run.document["inputs"]
        parameters = {name: inputs[name] for name in ("concentration", "cosine", "sub", "power") if name in inputs}
        law = named_law(inputs["law"], inputs["dim"], **parameters)
        return super().load(replace(run, document={**run.document, "law": law}))

    def view(self) -> View:
        """The regime of the head, and every quantity predicted and measured."""
        inputs, known = self.inputs, self.control
        n, replicates = f"{inputs['n']:,}", f"{inputs['replicates']:,}"
        shared = self.quantities["participation"].measured.value
        control = [(label, known[name].predicted, known[name].asymptotic) for name, label in CONTROL.items()]
        laws = [(name, test.against, test.ks, test.p) for name, test in self.laws.items()]
        return View(
            f"{inputs['law'].capitalize()} keys on the sphere in dimension {inputs['dim']}",
            f"n = {n} keys · β = {short(inputs['beta'], 6)} · θ = {short(inputs['theta'], 4)} · local exponent "
            f"{self.local['exponent']:g} · {replicates} replicates ({self.method})",
            (
                f"One query attended to {n} random keys at inverse temperature {short(inputs['beta'])}, in "
                f"{replicates} replicates; in theory everything depends on the effective number of keys θ, here "
                f"{short(inputs['theta'])}.",
                f"The head is {self.regime}: {FATE[self.regime]} ({short(1 / shared if shared else None)} effective "
                f"keys){_largest_difference(self)}.",
                f"At this temperature it stops selecting beyond about {short(known['critical_n'].predicted)} keys; "
                f"with {n} keys, β near {short(known['critical_beta'].predicted)} is the critical scale, and β must "
                f"grow like {falling(-2 / self.local['exponent'])} to stay there.",
            ),
            [
                Section(
                    "Regime of this head",
                    "E Σw², the inverse number of effective keys, against the effective number of keys θ: near 1 one "
                    "key holds the mass, near 0 many share it. The line is the scaling limit, the point is this run.",
                    [_along_theta(self), Table("control parameters", ["", "exact", "asymptotic"], control)],
                ),
                Section("Predicted and measured", "Every expectation with its status.", _tables(self)),
                Section(
                    "Distributions",
                    "Kolmogorov-Smirnov distances between measured and predicted laws; a small p says they differ.",
                    [Table("laws", ["law of", "against", "distance", "p"], laws)],
                ),
            ],
            later=self._regimes,
            warnings=self.warnings,
            trust=[
                "Statuses: proved (in the literature), verified (derived here, confirmed by simulation), heuristic."
            ],
        )

    def _regimes(self) -> list[Section]:
        """The same keys at three temperatures, for a page."""
        drawn = regime_figures(self.law, self.inputs["n"], self.inputs["seed"])
        lead = (
            "The same keys at three temperatures: each disc is a key at its true distance from the query and at a "
            "random angle; its area is its weight. Below, points are simulations of n keys with 95% bars, dashed lines "
            "the scaling limit."
        )
        return [Section("Average, select, collapse", lead, [Row(drawn[:3]), Row(drawn[3:])])] if drawn else []

    def figures(self) -> list[Figure]:
        """The three regimes of the keys, or Σw² against θ where there are too few keys to draw them."""
        return regime_figures(self.law, self.inputs["n"], self.inputs["seed"]) or super().figures()

    def __repr__(self) -> str:
        shared = self.quantities["participation"]
        keys = "{law} keys, dim {dim}, n = {n:,}, β = {beta:.4g}, θ = {theta:.4g}".format(**self.inputs)
        return f"<ScalingLimits: {keys}: {self.regime}, Σw² = {cell(shared.measured)}>"


def scaling_limits(
    law: GapLaw,
    n: int,
    theta: float | None = None,
    beta: float | None = None,
    *,
    replicates: int = 2000,
    seed: int = 0,
    name: str | None = None,
    dim: int | None = None,
) -> ScalingLimits:
    """Predict and measure attention over n keys of a law, at β or at θ.

    Keys of a subsphere have the law of uniform keys in its own dimension; `name` and `dim` are then the name of the law
    and the dimension of the ambient sphere.
    """
    if (theta is None) == (beta is None):
        raise InputError("expected exactly one of theta and beta: the other follows from it")
    beta = control.critical_beta(n, law, theta) if theta is not None else float(beta or 0.0)
    theta = control.theta(n, beta, law)
    rng = np.random.default_rng(seed)
    sample, method = measure_weights(law, n, beta, replicates, rng)
    finite, poisson = KeyPoints(law, n, beta), PoissonPoints(theta, law.a)
    limit = sample_weights(poisson, replicates, rng, law.tangent_dim)
    dim = int(law.parameters["dim"]) if dim is None else dim
    sub = {"sub": law.parameters["dim"]} if name == "subsphere" else {}
    run = {"n": n, "theta": theta, "beta": beta, "replicates": replicates, "seed": seed}
    leak = sampled(1 - sample.top, predicted=regimes.collapse_deficit(n, beta, law)) if law.a > 0.5 else None
    exact, expected = weights.participation(finite), weights.participation(poisson)
    far = (
        f"the scaling limit is not reached at n = {n:,} with local exponent {law.exponent:g}: E Σw² is {exact:.3g}, "
        f"and {expected:.3g} in the limit; trust the exact values"
    )
    return ScalingLimits(
        law,
        inputs={"law": name or law.name, **law.parameters, "dim": dim, **sub, **run},
        local={"exponent": law.exponent, "a": law.a, "c": law.c},
        control={
            "theta": verified(theta, asymptotic=control.theta(n, beta, law.local)),
            "critical_beta": verified(control.critical_beta(n, law), asymptotic=control.critical_beta(n, law.local)),
            "critical_n": verified(control.critical_n(beta, law), asymptotic=control.critical_n(beta, law.local)),
        },
        regime=control.regime(exact),
        quantities=_quantities(law, finite, poisson, sample, limit),
        averaging=_averaging(law, n, beta, sample, control.regime(exact) == "averaging"),
        collapse=Collapse(
            mean_top(finite) > _COLLAPSED_TOP,
            sampled(np.sqrt(2 * sample.nearest / beta), predicted=regimes.nearest_distance(n, law)),
            leak,
        ),
        laws=_laws(law, n, beta, sample, limit),
        warnings=() if abs(math.log(exact / expected)) < _NEAR_LIMIT else (far,),
        method=method,
        replaced_mass=float(sample.remainder.max()),
        ambient=ambient(law, dim, n, replicates, seed) if law.exponent < dim - 1 else None,
    )


def ambient(law: GapLaw, dim: int, n: int, replicates: int = 2000, seed: int = 0) -> Ambient:
    """Keys of low exponent α < d − 1 at the critical β of the sphere they lie in, where many of them share the mass."""
    beta = control.critical_beta(n, uniform(dim))
    sample, _ = measure_weights(law, n, beta, replicates, np.random.default_rng(seed))
    shared = sampled(sample.participation, predicted=weights.participation(KeyPoints(law, n, beta)))
    return Ambient(beta, verified(control.theta(n, beta, law)), shared)


def measure_weights(
    law: GapLaw, n: int, beta: float, replicates: int, rng: np.random.Generator
) -> tuple[WeightSample, str]:
    """Simulate n keys by brute force ("direct") while that is affordable, else by the "nearest keys"; returns which."""
    check_replicates(replicates)
    if isinstance(law, PowerGap) and law.power == 0 and float(n) * law.dim * replicates <= _MOST_NUMBERS:
        return sample_direct(law.dim, int(n), beta, replicates, rng), "direct"
    return sample_weights(KeyPoints(law, n, beta), replicates, rng, law.tangent_dim), "nearest keys"


def _quantities(
    law: GapLaw, finite: KeyPoints, poisson: PoissonPoints, sample: WeightSample, limit: WeightSample
) -> dict[str, Quantity]:
    """Value in the limit, exact value at n and measurement of every quantity."""
    expected = {
        "participation": (weights.participation, sample.participation),
        "top_weight": (mean_top, sample.top),
        "inverse_top_weight": (mean_inverse_top, 1 / sample.top),
        "entropy": (weights.entropy, sample.entropy),
        "output_gap": (weights.gap_mean, sample.gap),
        "output_gap_variance": (weights.gap_variance, _squared(sample.gap)),
    }
    if law.tangent_dim is not None:
        across = partial(weights.tangential_variance, tangent_dim=law.tangent_dim)
        expected["output_tangential_variance"] = (across, np.square(sample.tangential))
    rows = {name: sampled(values, predicted=of(poisson), exact=of(finite)) for name, (of, values) in expected.items()}
    keys90 = Quantity.sampled(limit.keys90).measured
    known = {"predicted": keys90.value, "predicted_stderr": keys90.stderr, "averaging": regimes.keys_holding(finite)}
    return rows | {"keys_holding_90": sampled(sample.keys90, **known)}


def _averaging(law: GapLaw, n: int, beta: float, sample: WeightSample, applies: bool) -> Averaging:
    limit = regimes.averaging(n, beta, law)
    radial, shared = 1 - sample.gap / beta, sample.participation
    share = shared.mean()
    expansion = regimes.shrinkage_expansion(beta, law.dim) if isinstance(law, PowerGap) and law.power == 0 else None
    across = limit.tangential_variance
    return Averaging(
        applies,
        mean=sampled(radial, predicted=limit.mean + limit.bias),
        shrinkage=verified(limit.shrinkage, expansion=expansion),
        bias=sampled(radial - limit.mean, predicted=limit.bias),
        radial_variance=sampled(_squared(radial), predicted=limit.radial_variance),
        effective_sample_size=Quantity(
            limit.effective_sample_size,
            Status.PROVED,
            measured=Estimate(float(1 / share), float(shared.std(ddof=1) / share**2 / np.sqrt(shared.size))),
        ),
        tangential_variance=None if across is None else sampled(np.square(sample.tangential) / beta, predicted=across),
    )


def _laws(law: GapLaw, n: int, beta: float, sample: WeightSample, limit: WeightSample) -> dict[str, LawTest]:
    """Kolmogorov-Smirnov tests of the measured laws against the limit, and of the output against a Gaussian."""
    names = {"top": "top_weight", "participation": "participation", "gap": "output_gap"}
    if law.tangent_dim is not None:
        names["tangential"] = "output_tangential"
    tests = {name: ("limit", stats.ks_2samp(getattr(sample, of), getattr(limit, of))) for of, name in names.items()}
    shape = regimes.averaging(n, beta, law)
    centred = (shape.shrinkage - shape.bias - sample.gap / beta) / np.sqrt(shape.radial_variance)
    tests["output_gaussian"] = ("averaging", stats.kstest(centred, "norm"))
    return {name: LawTest(of, float(test.statistic), float(test.pvalue)) for name, (of, test) in tests.items()}


def _squared(values: Array) -> Array:
    """Squared deviations whose mean is the unbiased variance: times R/(R − 1), the mean being estimated from them."""
    return np.asarray(np.square(values - values.mean()) * (values.size / (values.size - 1)))


def _largest_difference(result: ScalingLimits) -> str:
    """Clause on the largest difference between measured and exact expectations, in standard errors."""
    apart = [
        (abs(row.measured.value - row.exact) / row.measured.stderr, QUANTITIES[name])
        for name, row in result.quantities.items()
        if row.exact is not None and row.measured.stderr > 0
    ]
    most, label = max(apart, default=(0.0, ""))
    return f"; measured and exact values differ by at most {most:.1f} standard errors ({label})" if apart else ""


def _along_theta(result: ScalingLimits) -> Figure:
    theta, shared = result.inputs["theta"], result.quantities["participation"]
    here = math.log(theta)
    fine = np.exp(np.linspace(max(min(here - 2, -7.0), -12.0), max(here + 2, 7.0), 25)).tolist()
    limit = [weights.participation(PoissonPoints(value, result.local["a"])) for value in fine]
    series = [
        line("scaling limit", fine, limit, "grey"),
        points("this run", [theta], [shared.measured.value], "blue", [shared.measured.stderr]),
    ]
    return Figure(
        "E Σw² against the effective number of keys",
        Axis("effective number of keys θ", log=True),
        Axis("E Σw²", log=True, high=1.2),
        series,
        [Guide("θ = 1: critical", x=1.0)],
    )


def _tables(result: ScalingLimits) -> list[Block]:
    """Expectations, the formulas of the regime that applies, and the keys at the critical β of the ambient sphere."""
    rows = [
        (label, row.predicted, row.exact, row.measured, row.status and row.status.value)
        for name, label in QUANTITIES.items()
        if (row := result.quantities.get(name)) is not None
    ]
    columns = ["expectation of", "scaling limit", "exact at n", "measured", "status"]
    blocks: list[Block] = [Table("expectations", columns, rows)]
    for side, labels in FORMULAS.items():
        formulas = getattr(result, side)
        if formulas.applies:
            found = [
                (label, row.predicted, row.measured, row.status.value)
                for name, label in labels.items()
                if (row := getattr(formulas, name)) is not None
            ]
            columns = ["formula", "predicted", "measured", "status"]
            blocks.append(Table(f"formulas of the {side} side", columns, found))
    if (around := result.ambient) is not None:
        beta, theta, shared = short(around.beta, 4), short(around.theta.predicted, 4), around.participation
        sentence = f"At the critical β of the ambient sphere, {beta}: θ = {theta}, E Σw² = {short(shared.predicted, 4)}"
        blocks.append(Text([f"{sentence} (measured {cell(shared.measured)})."]))
    return blocks
