"""Scaling limits, predicted beside measured: the ordered weights and the output of attention from one query.

For a law of the keys, n and β (or θ) there is, per quantity: the value of the scaling limit ("predicted"), the exact
expectation at this n ("exact"), and what a simulation of n keys gave ("measured", with its standard error). The laws of
the top weight, of Σw² and of the output are compared with the limit's by Kolmogorov-Smirnov tests.
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
from limitlens.experiments.quantity import Quantity, sampled, verified
from limitlens.experiments.regimes_figure import FEWEST_KEYS, regime_figures
from limitlens.experiments.weight_samples import WeightSample, check_replicates, sample_direct, sample_weights
from limitlens.record import Run, to_json
from limitlens.report.view import Block, Figure, Row, Section, Table, Text, View, line, points
from limitlens.report.words import cell, falling, read_words, short, worded_figure, worded_view
from limitlens.results import Result
from limitlens.theory.prediction import Status
from limitlens.theory.scaling import control, regimes, weights
from limitlens.theory.scaling.control import Regime
from limitlens.theory.scaling.laws import GapLaw, PowerGap, named_law, uniform
from limitlens.theory.scaling.points import KeyPoints, PoissonPoints
from limitlens.theory.scaling.top_weight import mean_inverse_top, mean_top

WORDS = read_words("experiments/scaling_words.json")["limits"]
_CURVE_POINTS = 25
_MOST_NUMBERS = 2e8  # coordinates drawn by brute force before the nearest keys alone are drawn instead
_COLLAPSED_TOP = 0.9  # of E w₁: the formulas of the collapse are its first order, good to some percent from here on
_NEAR_LIMIT = 0.2  # in log E Σw²


@dataclass(frozen=True)
class LawTest:
    """A measured law against the one of `against`: Kolmogorov-Smirnov distance and p-value."""

    against: str
    ks: float
    p: float


@dataclass(frozen=True)
class Averaging:
    """The subcritical formulas in the units of the output itself, <q, Γ> and one coordinate across."""

    applies: bool
    mean: Quantity
    shrinkage: Quantity
    bias: Quantity
    radial_variance: Quantity
    effective_sample_size: Quantity
    tangential_variance: Quantity | None


@dataclass(frozen=True)
class Collapse:
    """The supercritical formulas: how far the nearest key is, and what leaks from it, where that is known."""

    applies: bool
    nearest_distance: Quantity
    one_minus_top_weight: Quantity | None


@dataclass(frozen=True)
class Ambient:
    """What keys of low exponent get at the critical β of the sphere they lie in."""

    beta: float
    theta: Quantity
    participation: Quantity


@dataclass(frozen=True, eq=False, repr=False)
class ScalingLimits(Result):
    """Everything predicted and measured for attention over n keys of a law at one β."""

    kind, file = "scaling", "scaling"
    law: GapLaw  # the document names it in `inputs`
    inputs: Mapping[str, Any]  # law and its parameters, dim of the sphere around the keys, n, θ, β, replicates, seed
    local: Mapping[str, float]  # exponent, a and c of P(D ≤ s) ~ c s^a near the query
    control: Mapping[str, Quantity]  # θ, and the critical β and n
    regime: Regime  # by the exact E Σw²
    quantities: Mapping[str, Quantity]  # expectations: the limit, exact at n, measured
    averaging: Averaging  # the formulas of the two sides of the critical scale
    collapse: Collapse
    laws: Mapping[str, LawTest]
    warnings: tuple[str, ...]  # where the limit is not the law at this n: the higher the exponent, the farther it is
    method: str  # how keys were drawn: "direct" or "nearest keys"
    replaced_mass: float  # that a Gaussian stood in for, at most
    ambient: Ambient | None  # where the keys have a lower exponent than the sphere

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        return {name: value for name, value in super().document().items() if name != "law"}

    @property
    def table(self) -> pd.DataFrame:
        """One row per quantity, by part."""
        parts = {"quantities": self.quantities, "averaging": vars(self.averaging), "collapse": vars(self.collapse)}
        rows = [
            {"part": part, "quantity": name, **to_json(quantity)}
            for part, found in parts.items()
            for name, quantity in found.items()
            if isinstance(quantity, Quantity)
        ]
        return pd.DataFrame(rows).dropna(axis=1, how="all")

    @classmethod
    def load(cls, run: Run) -> Self:
        """The result that a run folder holds."""
        inputs = run.document["inputs"]
        given = {name: inputs[name] for name in ("concentration", "cosine", "sub", "power") if name in inputs}
        law = named_law(inputs["law"], inputs["dim"], **given)
        return super().load(replace(run, document={**run.document, "law": law}))

    def view(self) -> View:
        """The three regimes at one n and β, predicted beside measured."""
        inputs, known, found = self.inputs, self.control, self.quantities["participation"].measured
        control = [(label, known[name].predicted, known[name].asymptotic) for name, label in WORDS["control"].items()]
        laws = [(name, test.against, test.ks, test.p) for name, test in self.laws.items()]
        view = worded_view(
            WORDS,
            [_along_theta(self), Table("control parameters", WORDS["controls"], control)],
            _tables(self),
            [Table("laws", WORDS["laws"], laws)],
            warnings=self.warnings,
            of=self,
            law=inputs["law"].capitalize(),
            beta=short(inputs["beta"]),
            theta=short(inputs["theta"]),
            fine_beta=short(inputs["beta"], 6),
            fine_theta=short(inputs["theta"], 4),
            fate=WORDS["fate"][self.regime],
            sharing=short(1 / found if found else None),
            farthest=_farthest(self),
            critical_n=short(known["critical_n"].predicted),
            critical_beta=short(known["critical_beta"].predicted),
            growth=falling(-2 / self.local["exponent"]),
        )
        return replace(view, later=self._regimes)

    def _regimes(self) -> list[Section]:
        drawn, (title, lead) = regime_figures(self.law, self.inputs["n"], self.inputs["seed"]), WORDS["regimes"]
        return [Section(title, lead, [Row(drawn[:3]), Row(drawn[3:])])] if drawn else []

    def figures(self) -> list[Figure]:
        """The same keys at three temperatures, their ordered weights, and Σw² along the scale of θ."""
        if (n := self.inputs["n"]) < FEWEST_KEYS:
            raise InputError(f"n is {n:g}; expected at least {FEWEST_KEYS} keys, to draw what θ = 100 of them do")
        return regime_figures(self.law, n, self.inputs["seed"])

    def __repr__(self) -> str:
        shared = self.quantities["participation"]
        keys = "{law} keys, dim {dim}, n = {n:,}, β = {beta:.4g}, θ = {theta:.4g}".format(**self.inputs)
        return f"<ScalingLimits: {keys}: {self.regime}, Σw² = {shared.measured:.4g} ± {shared.stderr:.1g}>"


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
    """Everything predicted and measured for attention over n keys of a law, at β or at θ.

    Keys of a subsphere are uniform keys in its own dimension: `name` and `dim` then tell what they are called and the
    dimension of the sphere around them.
    """
    if (theta is None) == (beta is None):
        raise InputError("expected exactly one of theta and beta: the other follows from it")
    beta = control.critical_beta(n, law, theta) if theta is not None else float(beta or 0.0)
    theta = control.theta(n, beta, law)
    rng = np.random.default_rng(seed)
    found, method = measure_weights(law, n, beta, replicates, rng)
    finite, poisson = KeyPoints(law, n, beta), PoissonPoints(theta, law.a)
    limit = sample_weights(poisson, replicates, rng, law.tangent_dim)
    own, dim = law.parameters["dim"], int(law.parameters["dim"]) if dim is None else dim
    sub = {"sub": own} if name == "subsphere" else {}
    rest = {"n": n, "theta": theta, "beta": beta, "replicates": replicates, "seed": seed}
    critical_beta, critical_n = control.critical_beta(n, law), control.critical_n(beta, law)
    leak = sampled(1 - found.top, predicted=regimes.collapse_deficit(n, beta, law)) if law.a > 0.5 else None
    exact, expected = weights.participation(finite), weights.participation(poisson)
    far = WORDS["far"].format(n=n, exponent=law.exponent, exact=exact, expected=expected)
    return ScalingLimits(
        law,
        inputs={"law": name or law.name, **law.parameters, "dim": dim, **sub, **rest},
        local={"exponent": law.exponent, "a": law.a, "c": law.c},
        control={
            "theta": verified(theta, asymptotic=control.theta(n, beta, law.local)),
            "critical_beta": verified(critical_beta, asymptotic=control.critical_beta(n, law.local)),
            "critical_n": verified(critical_n, asymptotic=control.critical_n(beta, law.local)),
        },
        regime=control.regime(exact),
        quantities=_quantities(law, finite, poisson, found, limit),
        averaging=_averaging(law, n, beta, found, control.regime(exact) == "averaging"),
        collapse=Collapse(
            mean_top(finite) > _COLLAPSED_TOP,
            sampled(np.sqrt(2 * found.nearest / beta), predicted=regimes.nearest_distance(n, law)),
            leak,
        ),
        laws=_laws(law, n, beta, found, limit),
        warnings=() if abs(math.log(exact / expected)) < _NEAR_LIMIT else (far,),
        method=method,
        replaced_mass=float(found.remainder.max()),
        ambient=ambient(law, dim, n, replicates, seed) if law.exponent < dim - 1 else None,
    )


def ambient(law: GapLaw, dim: int, n: int, replicates: int = 2000, seed: int = 0) -> Ambient:
    """What keys of low exponent get at the critical β of the sphere they lie in: mass spread thin, since α < d − 1."""
    beta = control.critical_beta(n, uniform(dim))
    found, _ = measure_weights(law, n, beta, replicates, np.random.default_rng(seed))
    shared = sampled(found.participation, predicted=weights.participation(KeyPoints(law, n, beta)))
    return Ambient(beta, verified(control.theta(n, beta, law)), shared)


def measure_weights(
    law: GapLaw, n: int, beta: float, replicates: int, rng: np.random.Generator
) -> tuple[WeightSample, str]:
    """Simulate n keys, and say how: "direct" while brute force is affordable, else "nearest keys"."""
    check_replicates(replicates)
    if isinstance(law, PowerGap) and law.power == 0 and float(n) * law.dim * replicates <= _MOST_NUMBERS:
        return sample_direct(law.dim, int(n), beta, replicates, rng), "direct"
    return sample_weights(KeyPoints(law, n, beta), replicates, rng, law.tangent_dim), "nearest keys"


def _quantities(
    law: GapLaw, finite: KeyPoints, poisson: PoissonPoints, found: WeightSample, limit: WeightSample
) -> dict[str, Quantity]:
    """Per quantity: the limit, the exact value at n, the measurement."""
    expected = {
        "participation": (weights.participation, found.participation),
        "top_weight": (mean_top, found.top),
        "inverse_top_weight": (mean_inverse_top, 1 / found.top),
        "entropy": (weights.entropy, found.entropy),
        "output_gap": (weights.gap_mean, found.gap),
        "output_gap_variance": (weights.gap_variance, _squared(found.gap)),
    }
    if law.tangent_dim is not None:
        across = partial(weights.tangential_variance, tangent_dim=law.tangent_dim)
        expected["output_tangential_variance"] = (across, np.square(found.tangential))
    drawn, sharing = Quantity.sampled(limit.keys90), regimes.keys_holding(finite)
    return {
        name: sampled(values, predicted=of(poisson), exact=of(finite)) for name, (of, values) in expected.items()
    } | {
        "keys_holding_90": sampled(
            found.keys90, predicted=drawn.measured, predicted_stderr=drawn.stderr, averaging=sharing
        )
    }


def _averaging(law: GapLaw, n: int, beta: float, found: WeightSample, applies: bool) -> Averaging:
    limit = regimes.averaging(n, beta, law)
    radial, share = 1 - found.gap / beta, found.participation.mean()
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
            measured=float(1 / share),
            stderr=float(found.participation.std(ddof=1) / share**2 / np.sqrt(found.top.size)),
        ),
        tangential_variance=None if across is None else sampled(np.square(found.tangential) / beta, predicted=across),
    )


def _laws(law: GapLaw, n: int, beta: float, found: WeightSample, limit: WeightSample) -> dict[str, LawTest]:
    """Kolmogorov-Smirnov tests of the measured laws against the limit, and of the output against a Gaussian."""
    names = {"top": "top_weight", "participation": "participation", "gap": "output_gap"}
    if law.tangent_dim is not None:
        names["tangential"] = "output_tangential"
    tests = {name: ("limit", stats.ks_2samp(getattr(found, of), getattr(limit, of))) for of, name in names.items()}
    shape = regimes.averaging(n, beta, law)
    centred = (shape.shrinkage - shape.bias - found.gap / beta) / np.sqrt(shape.radial_variance)
    tests["output_gaussian"] = ("averaging", stats.kstest(centred, "norm"))
    return {name: LawTest(of, float(test.statistic), float(test.pvalue)) for name, (of, test) in tests.items()}


def _squared(values: Array) -> Array:
    """Squared deviations whose mean is the unbiased variance: times R/(R − 1), the mean being estimated from them."""
    return np.asarray(np.square(values - values.mean()) * (values.size / (values.size - 1)))


def _farthest(result: ScalingLimits) -> str:
    """How far measured and exact expectations are apart at most, in standard errors."""
    apart = [
        (abs(row.measured - row.exact) / row.stderr, WORDS["quantities"][name])
        for name, row in result.quantities.items()
        if row.exact is not None and row.measured is not None and row.stderr
    ]
    most, label = max(apart, default=(0.0, ""))
    return f"; measured and exact values differ by at most {most:.1f} standard errors ({label})" if apart else ""


def _along_theta(result: ScalingLimits) -> Figure:
    theta, shared = result.inputs["theta"], result.quantities["participation"]
    here = math.log(theta)
    fine = np.exp(np.linspace(max(min(here - 2, -7.0), -12.0), max(here + 2, 7.0), _CURVE_POINTS)).tolist()
    limit = [weights.participation(PoissonPoints(value, result.local["a"])) for value in fine]
    series = [
        line("scaling limit", fine, limit, "grey"),
        points("this run", [theta], [shared.measured], "blue", [shared.stderr]),
    ]
    return worded_figure(WORDS["along_theta"], series)


def _tables(result: ScalingLimits) -> list[Block]:
    """Expectations, the formulas of the side that applies, and the critical β of the sphere around the keys."""
    rows = [
        (label, row.predicted, row.exact, row.cell, row.status and row.status.value)
        for name, label in WORDS["quantities"].items()
        if (row := result.quantities.get(name)) is not None
    ]
    blocks: list[Block] = [Table("expectations", WORDS["expectations"], rows)]
    for side, labels in WORDS["sides"].items():
        found = getattr(result, side)
        if found.applies:
            formulas = [
                (label, row.predicted, row.cell, row.status.value)
                for name, label in labels.items()
                if (row := getattr(found, name)) is not None
            ]
            blocks.append(Table(f"formulas of the {side} side", WORDS["formulas"], formulas))
    if (around := result.ambient) is not None:
        known = (around.beta, around.theta.predicted, around.participation.predicted)
        beta, theta, predicted = (short(value, 4) for value in known)
        told = {"beta": beta, "theta": theta, "predicted": predicted, "measured": cell(around.participation.cell)}
        blocks.append(Text([WORDS["ambient"].format(**told)]))
    return blocks
