"""`scaling`: does attention from one query over n keys average over many, select a few or collapse onto one?"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, check_number, check_seed
from limitlens.estimate import Estimate
from limitlens.experiments import weight_samples
from limitlens.experiments.weight_samples import MOST_DRAWN, Quantity, WeightSample, sampled, verified
from limitlens.record import to_json
from limitlens.report.text import falling, short
from limitlens.report.view import Axis, Figure, Section, Table, View, line, points
from limitlens.results import Result
from limitlens.theory.prediction import Status, value_matrix
from limitlens.theory.scaling import control, ordered, weights
from limitlens.theory.scaling.control import Regime
from limitlens.theory.scaling.laws import GapLaw, named_law
from limitlens.theory.scaling.points import KeyPoints, PoissonPoints

KEY_SECONDS = 1e-6  # to draw one key
MOST_DIM = 400  # the weights of keys on a sphere of higher dimension overflow float64
RANKS = 32  # ordered weights in the result
LAW_RANKS = (1, 2, 3, 10)  # ranks whose law is given
FATE = {
    "averaging": "many keys share the mass, and the output is an average",
    "selective": "a few keys share the mass",
    "frozen": "one key holds nearly all of the mass",
}
CONTROL = {"theta": "θ", "critical_beta": "critical β for this n", "critical_n": "critical n for this β"}
LABELS = {
    "participation": "Σw², the inverse number of effective keys", "top_weight": "largest weight w₁",
    "inverse_top_weight": "1/w₁", "entropy": "entropy (nats)", "keys_holding_90": "keys that hold 90% of the mass",
    "output_gap": "output gap β(1 − <q, Γ>)", "output_gap_variance": "variance of the output gap",
    "output_tangential_variance": "variance orthogonal to the query, × β",
    "mean": "output along the query", "bias": "bias of the output along the query, at order 1/n",
    "radial_variance": "variance of the output along the query",
    "tangential_variance": "variance orthogonal to the query", "effective_sample_size": "effective sample size",
    "tangential_bias": "bias of the output orthogonal to the query",
    "one_minus_top_weight": "1 − w₁", "nearest_distance": "distance of the nearest key",
}  # fmt: skip
_COLLAPSED_TOP = 0.9  # E w₁ from which on the first-order formulas of the collapse are good to a few percent
_LEAST_WEIGHT = 1e-9  # ordered weights, and distances of w₁ from 1, below have no law in the result
_LEAST_DEFICIT = 1e-30  # values of 1 − w₁ below are not compared with their law
_NEAR_LIMIT = 0.2  # difference in log E Σw² from the scaling limit, beyond which the result warns


@dataclass(frozen=True)
class LawTest:
    """Kolmogorov-Smirnov test of the distribution of a measured quantity against a predicted distribution."""

    against: str  # "limit" (many keys), "exact" (at n), "averaging" (Gaussian), or of the collapse "nearest key(s)"
    ks: float  # distance
    p: float


@dataclass(frozen=True, eq=False, repr=False)
class ScalingLimits(Result):
    """Result of `scaling`: softmax weights and output of one query over n random keys, predicted and measured."""

    kind, file = "scaling", "scaling"
    inputs: Mapping[str, Any]  # law and its parameters, dimension of the sphere, n, θ, β, replicates, seed
    local: Mapping[str, float]  # exponent, a and c of P(D ≤ s) ~ c s^a near the query
    control: Mapping[str, Quantity]  # θ, and the critical β and n
    regime: Regime  # by the exact E Σw²
    quantities: Mapping[str, Quantity]  # expectations: of the limit, exact at n, measured
    ordered_weights: tuple[Quantity, ...]  # means of w₁ ≥ w₂ ≥ …; `predicted` is a simulation of the scaling limit
    averaging: Mapping[str, Quantity]  # formulas for many keys that share the weight: output along the query, across it
    collapse: Mapping[str, Quantity]  # formulas for one key with most weight: distance of the nearest key, 1 − w₁
    applies: Mapping[str, bool]  # whether the formulas of `averaging` and `collapse` are accurate here
    laws: Mapping[str, LawTest]
    weight_laws: Mapping[str, Quantity]  # P(w_k ≤ t) of ordered weights, at the 10%, 50% and 90% quantiles of the limit
    outputs: Mapping[str, Quantity]  # mean and variance of each output of a value matrix; empty without one
    warnings: tuple[str, ...]  # says that n is too small for the limit, which high exponents approach slowly
    method: str  # how keys were drawn: "direct" or "nearest keys"
    replaced_mass: float  # largest share of softmax weight that a Gaussian approximates

    @property
    def table(self) -> pd.DataFrame:
        """Table of predicted and measured quantities, one per row; `part` names the field that holds it."""
        rows = [
            {"part": part, "quantity": name, **to_json(row)}
            for part in ("quantities", "averaging", "collapse", "weight_laws", "outputs")
            for name, row in getattr(self, part).items()
        ]
        return pd.DataFrame(rows).dropna(axis=1, how="all")

    def view(self) -> View:
        """HTML page: whether attention averages, selects a few keys or is frozen onto one, and all quantities."""
        inputs, known = self.inputs, self.control
        n, replicates = f"{inputs['n']:,}", f"{inputs['replicates']:,}"
        shared = self.quantities["participation"].measured.value
        scales = [(label, known[name].predicted, known[name].asymptotic) for name, label in CONTROL.items()]
        control = Table("control parameters", ["", "exact", "asymptotic"], scales)
        laws = [(name, test.against, test.ks, test.p) for name, test in self.laws.items()]
        by_rank = "Mean weights by rank. Points are measured, with 95% bars; the line is the scaling limit."
        compared = "Kolmogorov-Smirnov distances between measured and predicted laws; a small p says they differ."
        verdict = (
            f"One query attended to {n} random keys at inverse temperature {short(inputs['beta'])}, in {replicates} "
            "replicates.",
            f"The head is {self.regime}: {FATE[self.regime]} ({short(shared and 1 / shared)} effective keys).",
            f"At this temperature the critical scale, θ = 1, is at about {short(known['critical_n'].predicted)} keys, "
            f"and more keys share the mass among more of them. With {n} keys it is at β near "
            f"{short(known['critical_beta'].predicted)}, and β must grow like {falling(-2 / self.local['exponent'])} "
            "to stay there.",
        )
        sections = [
            Section("Regime of this head", by_rank, [self._ordered_figure(), control]),
            Section("Predicted and measured", "Every expectation with its status.", self._tables()),
            Section("Distributions", compared, [Table("laws", ["law of", "against", "distance", "p"], laws)]),
        ]
        title = f"{inputs['law'].capitalize()} keys on the sphere in dimension {inputs['dim']}"
        subtitle = f"n = {n} keys · β = {short(inputs['beta'], 6)} · θ = {short(inputs['theta'], 4)}"
        subtitle += f" · local exponent {self.local['exponent']:g} · {replicates} replicates ({self.method})"
        trust = ["Statuses: proved (in the literature), verified (by simulation in this project), heuristic."]
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=trust)

    def _ordered_figure(self) -> Figure:
        ranks = range(1, len(self.ordered_weights) + 1)
        value, stderr = zip(*((row.measured.value, row.measured.stderr) for row in self.ordered_weights), strict=True)
        series = [
            line("scaling limit", ranks, [row.predicted for row in self.ordered_weights], "grey", "dashed"),
            points(f"{self.inputs['n']:,} keys", ranks, value, "blue", stderr),
        ]
        up = Axis("mean weight", log=True, low=1e-4, high=2)
        return Figure("Ordered weights", Axis("rank of the key", log=True), up, series)

    def _tables(self) -> list[Table]:
        titles = {"quantities": "expectations"}
        titles |= {side: f"formulas of the {side} side" for side, applies in self.applies.items() if applies}
        titles |= {"weight_laws": "laws of the ordered weights"} if self.weight_laws else {}
        titles |= {"outputs": "outputs of the value matrix"} if self.outputs else {}
        tables = []
        for part, title in titles.items():
            found: Mapping[str, Quantity] = getattr(self, part)
            rows = [
                (label, row.predicted, row.exact, row.measured, row.status and row.status.value)
                for name, label in (LABELS | {name: name for name in found if name not in LABELS}).items()
                if (row := found.get(name)) is not None
            ]
            predicted = "scaling limit" if part in ("quantities", "weight_laws") else "predicted"
            tables.append(Table(title, ["expectation of", predicted, "exact at n", "measured", "status"], rows))
        return tables


def scaling(
    *, dim: int = 5, n: float = 10_000, theta: float | None = None, beta: float | None = None, law: str = "uniform",
    concentration: float = 5.0, cosine: float = 1.0, power: float = 1.0, value: ArrayLike | None = None,
    replicates: int = 2000, seed: int = 0, yes: bool = False,
) -> ScalingLimits:  # fmt: skip
    """Predict and measure whether attention over n keys averages, selects a few keys or collapses onto one.

    One query q attends to `n` random keys k on the sphere S^{dim−1}. Give the inverse temperature `beta`, or the
    effective number of keys `theta` (by default 1, between averaging and collapse). The `law` of the keys is "uniform",
    "vmf" (von Mises-Fisher, with `concentration`, and `cosine` between mean direction and query) or "power" (density
    like |q−k|^power near the query). A `value` matrix V (d_out, dim) adds mean and variance of V Γ, q = (1, 0, ..., 0).

    >>> result = ll.scaling(dim=5, n=1000, theta=1, replicates=100)
    >>> result.regime, round(result.inputs['beta'], 1)
    ('selective', 38.2)
    """
    check_seed(seed)
    gap_law = sphere_law(law, dim, concentration=concentration, cosine=cosine, power=power)
    count = weight_samples.check_count(n)
    matrix = None if value is None else value_matrix(value, dim)
    drawn = weight_samples.check_replicates(replicates) * min(count, MOST_DRAWN)
    check_cost("scaling", seconds=KEY_SECONDS * drawn, memory=200.0 * replicates, yes=yes)
    return scaling_limits(gap_law, count, theta, beta, value=matrix, replicates=replicates, seed=seed)


def sphere_law(law: str, dim: int, *, concentration: float, cosine: float, power: float) -> GapLaw:
    """Distribution of the gap 1 − <q, k> between a query q and keys k on S^{dim−1}, which follow the named `law`."""
    check_number("the concentration", concentration, "a number from 0 to 1e9", below=1e9)
    check_number("dim", dim, f"an integer from 2 to {MOST_DIM}, for keys on a sphere", low=2, below=MOST_DIM + 1)
    return named_law(law, dim, concentration=concentration, cosine=cosine, power=power)


def check_one_scale(theta: float | None, beta: float | None) -> None:
    """Raise an `InputError` if both θ (effective number of keys) and β are given, since each determines the other."""
    if theta is not None and beta is not None:
        raise InputError("both theta and beta were given; expected one, since each follows from the other")


def scaling_limits(
    law: GapLaw, n: int, theta: float | None = None, beta: float | None = None, *, value: Array | None = None,
    replicates: int = 2000, seed: int = 0,
) -> ScalingLimits:  # fmt: skip
    """Predict and measure one query's attention over n keys; `law` is the distribution of the gap 1 − <q, k>.

    Give the inverse temperature `beta`, or the effective number of keys `theta` (1 by default).
    """
    check_one_scale(theta, beta)
    beta = control.critical_beta(n, law, 1.0 if theta is None else theta) if beta is None else control.check_beta(beta)
    theta = control.theta(n, beta, law)
    rng = np.random.default_rng(seed)
    sample, method = weight_samples.measure_weights(law, n, beta, replicates, rng)
    finite, poisson = KeyPoints(law, n, beta), PoissonPoints(theta, law.a)
    limit = weight_samples.sample_weights(poisson, replicates, rng, law.tangent_dim)
    ordered_weights = partial(weight_samples.sample_ordered, ranks=min(n, RANKS), replicates=replicates)
    ranked, ranked_limit = (ordered_weights(keys, rng=np.random.default_rng(seed)) for keys in (finite, poisson))
    top = weights.mean_top(finite)
    run = {"n": n, "theta": theta, "beta": beta, "replicates": replicates, "seed": seed}
    nearest = np.sqrt(2 * sample.nearest / beta)
    collapse = {"nearest_distance": sampled(nearest, predicted=control.nearest_distance(n, law))}
    if law.a > 0.5:
        deficit = control.collapse_deficit(n, beta, law)
        collapse["one_minus_top_weight"] = sampled(sample.deficit, predicted=deficit, exact=1 - top)
    exact, expected = weights.participation(finite), weights.participation(poisson)
    far = f"the scaling limit is not reached at n = {n:,} with local exponent {law.exponent:g}: "
    far += f"E Σw² is {exact:.3g}, and {expected:.3g} in the limit; trust the exact values"
    return ScalingLimits(
        inputs={"law": law.name, **law.parameters, **run},
        local={"exponent": law.exponent, "a": law.a, "c": math.exp(law.log_c)},
        control={
            "theta": verified(theta, asymptotic=control.theta(n, beta, law.local)),
            "critical_beta": verified(control.critical_beta(n, law), asymptotic=control.critical_beta(n, law.local)),
            "critical_n": verified(control.critical_n(beta, law), asymptotic=control.critical_n(beta, law.local)),
        },
        regime=control.regime(exact),
        quantities=_quantities(finite, poisson, sample, sampled(limit.keys90).measured),
        ordered_weights=tuple(
            sampled(values, predicted=float(mean))
            for values, mean in zip(ranked.T, ranked_limit.mean(axis=0), strict=True)
        ),
        averaging=_averaging(finite, sample),
        collapse=collapse,
        applies={"averaging": control.regime(exact) == "averaging", "collapse": top > _COLLAPSED_TOP},
        laws=_laws(finite, sample, limit, collapsed=top > _COLLAPSED_TOP),
        weight_laws=_weight_laws(finite, poisson, ranked, ranked_limit),
        outputs={} if value is None else _outputs(finite, value),
        warnings=() if abs(math.log(exact / expected)) < _NEAR_LIMIT else (far,),
        method=method,
        replaced_mass=float(sample.remainder.max()),
    )


def _quantities(keys: KeyPoints, limit: PoissonPoints, sample: WeightSample, keys90: Estimate) -> dict[str, Quantity]:
    """Statistics of the softmax weights and output by name: in the limit, exact at n, and measured."""
    expected = {
        "participation": (weights.participation, sample.participation),
        "top_weight": (weights.mean_top, sample.top),
        "inverse_top_weight": (weights.mean_inverse_top, 1 / sample.top),
        "entropy": (weights.entropy, sample.entropy),
        "output_gap": (weights.gap_mean, sample.gap),
        "output_gap_variance": (weights.gap_variance, _squared(sample.gap)),
    }
    if keys.law.tangent_dim is not None:
        across = partial(weights.tangential_variance, tangent_dim=keys.law.tangent_dim)
        expected["output_tangential_variance"] = (across, np.square(sample.tangential))
    rows = {name: sampled(values, predicted=of(limit), exact=of(keys)) for name, (of, values) in expected.items()}
    known = {"predicted": keys90.value, "predicted_stderr": keys90.stderr, "averaging": weights.keys_holding(keys)}
    return rows | {"keys_holding_90": sampled(sample.keys90, **known)}


def _averaging(keys: KeyPoints, sample: WeightSample) -> dict[str, Quantity]:
    """Formulas for the output where many keys share the softmax weight, each with its measured value."""
    limit = control.averaging(keys.n, keys.beta, keys.law)
    radial, shared = 1 - sample.gap / keys.beta, sample.participation
    share = shared.mean()
    effective = Estimate(float(1 / share), float(shared.std(ddof=1) / share**2 / np.sqrt(shared.size)))
    rows = {
        "mean": sampled(radial, predicted=limit.mean + limit.bias),
        "bias": sampled(radial - limit.mean, predicted=limit.bias),
        "radial_variance": sampled(_squared(radial), predicted=limit.radial_variance),
        "effective_sample_size": Quantity(limit.effective_sample_size, Status.PROVED, measured=effective),
    }
    if limit.tangential_variance is not None:
        across = np.square(sample.tangential) / keys.beta
        rows["tangential_variance"] = sampled(across, predicted=limit.tangential_variance)
    else:
        exact = weights.tangential_mean(keys) - limit.tangential_mean
        rows["tangential_bias"] = verified(predicted=limit.tangential_bias, exact=exact)
    return rows


def _laws(keys: KeyPoints, sample: WeightSample, limit: WeightSample, *, collapsed: bool) -> dict[str, LawTest]:
    """Tests by name of the measured distributions against the limit, exact laws, and those of either regime."""
    names = {"top": "top_weight", "participation": "participation", "gap": "output_gap"}
    if keys.law.tangent_dim is not None:
        names["tangential"] = "output_tangential"
    tests = {name: ("limit", stats.ks_2samp(getattr(sample, of), getattr(limit, of))) for of, name in names.items()}
    shape = control.averaging(keys.n, keys.beta, keys.law)
    centred = (shape.shrinkage - shape.bias - sample.gap / keys.beta) / np.sqrt(shape.radial_variance)
    tests["output_gaussian"] = ("averaging", stats.kstest(centred, "norm"))
    nearest: Any = partial(ordered.nearest_cdf, points=keys)
    tests["nearest_distance"] = ("exact", stats.kstest(np.sqrt(2 * sample.nearest / keys.beta), nearest))
    if collapsed:
        seen = sample.deficit[sample.deficit > _LEAST_DEFICIT]  # simulations drop keys of less weight
        below = ordered.deficit_cdf(_LEAST_DEFICIT, keys)
        given_seen = (ordered.deficit_cdf(seen, keys) - below) / (1 - below)
        tests["one_minus_top_weight"] = ("two nearest keys", stats.kstest(given_seen, "uniform"))
        tests["output_distance"] = ("nearest key", stats.kstest(np.sqrt(2 * sample.gap / keys.beta), nearest))
    return {name: LawTest(of, float(test.statistic), float(test.pvalue)) for name, (of, test) in tests.items()}


def _weight_laws(keys: KeyPoints, limit: PoissonPoints, ranked: Array, ranked_limit: Array) -> dict[str, Quantity]:
    """Laws of the ordered weights, given measured and limiting samples of them, (replicates, ranks) both.

    A rank is left out if its weights are tiny or nearly 1, or vary too little for `ordered.top_cdf`.
    """
    rows = {}
    for rank in [rank for rank in LAW_RANKS if rank <= ranked.shape[1]]:
        at = np.quantile(ranked_limit[:, rank - 1], (0.1, 0.5, 0.9))
        if at[0] < _LEAST_WEIGHT or at[-1] > 1 - _LEAST_WEIGHT:
            continue
        with suppress(InputError):
            exact, expected = (ordered.top_cdf(at, points, rank).tolist() for points in (keys, limit))
            for t, here, there in zip(at, exact, expected, strict=True):
                below = (ranked[:, rank - 1] <= t).astype(np.float64)
                rows[f"P(w{rank} ≤ {t:.4g})"] = sampled(below, predicted=there, exact=here)
    return rows


def _outputs(keys: KeyPoints, value: Array) -> dict[str, Quantity]:
    """Exact mean and variance of each coordinate of the output V Γ over n keys."""
    mean, covariance = weights.output_law(keys, value)
    rows = {f"mean of output {i + 1}": verified(exact=float(one)) for i, one in enumerate(mean)}
    variances = [] if covariance is None else np.diag(covariance).tolist()
    return rows | {f"variance of output {i + 1}": verified(exact=one) for i, one in enumerate(variances)}


def _squared(values: Array) -> Array:
    """Squared deviations from the mean of R values, times R/(R − 1), so that their mean is the unbiased variance."""
    return np.asarray(np.square(values - values.mean()) * (values.size / (values.size - 1)))
