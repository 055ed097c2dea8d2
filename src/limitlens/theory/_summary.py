"""All predictions for one head and n tokens of one distribution in one JSON document, without sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures import Gaussian, GaussianMixture, Measure, TokenLaw, as_measure
from limitlens.theory import bounds, clt, curve, hardmax, rates, token_influence
from limitlens.theory.prediction import Prediction, as_sizes, predicted, value_matrix
from limitlens.theory.spectrum import Reach, reach, square_root, whitened
from limitlens.theory.statuses import CENTRED, CLAIMS, VERIFIED_CONSTANT, mean_verified

DEVIATIONS = (0.5, 1.0, 2.0, 3.0)  # queries of the summary: standard deviations along the direction of the horizon
REACH = ("horizon", "horizon_one_sided", "coupling", "frobenius", "trace", "mean_tilt")
NO_LIMIT = {1: "K ends before t: attention has no limit", 2: "K ends before 2t: no central limit theorem holds"}


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """All predictions for attention of one head over n tokens of one distribution (made by `summary`).

    `predicted` is a JSON document with the keys inputs, theory (numbers by name), rates, uniform, queries and warnings.
    Gaussian tokens add local_rates, constants and curve, and those of mean 0 in d = 1 hardmax.
    """

    predicted: Mapping[str, Any]

    @property
    def warnings(self) -> Sequence[str]:
        """Reasons, one sentence each, why the slope of an error curve at this n is not the asymptotic exponent."""
        return list(self.predicted["warnings"])

    def document(self) -> dict[str, Any]:
        """All predictions as a dictionary that can be written as JSON."""
        return dict(self.predicted)

    def __str__(self) -> str:
        rows = [
            f"{name:<20} {rate['predicted']:<10.4g} {rate['status']:<10} {rate['formula']}"
            for name, rate in self.predicted["rates"].items()
        ]
        return "\n".join([repr(self), *rows, *(f"Warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        inputs, numbers = self.predicted["inputs"], self.predicted["theory"]
        shown = ", ".join(f"{name} {numbers[name]:.4g}" for name in REACH)
        return f"Predictions for {inputs['measure']}, n = {inputs['n']:g}: {shown}"


def summary(
    measure: TokenLaw, head: Any, n: float,
    *, sizes: ArrayLike | None = None, radius: float | None = None, error: float = 0.1, mask_self: bool = False,
) -> Summary:  # fmt: skip
    """Predict the error of a head's attention over n tokens of a distribution, without sampling.

    `head` is a Head without biases, or a score matrix A (d, d) with the tokens as values. Errors are predicted at
    `sizes` (default n), at four queries, and over all queries up to `radius` (default: root mean square norm of the
    tokens). The probability of a relative `error` is bounded. `mask_self` excludes a query's own token.

    >>> summary = theory.summary(ll.Gaussian(0.0, 1.0), ll.Head(1.5), 30_000)
    >>> round(summary.predicted['theory']['rate_sharp'], 4)
    0.3077
    """
    hardmax.check_size(n)
    check_number("the error", error, "a positive number, such as 0.1", closed=False, below=1e15)
    if radius is not None:
        check_number("the radius", radius, "a number from 0 to 1e15", below=1e15)
    law = as_measure(measure)
    counts = as_sizes(n if sizes is None else sizes)
    ball = float(np.sqrt(np.trace(law.covariance) + law.mean @ law.mean)) if radius is None else radius
    A, V = _matrices(head, law.dim)
    case = _Case(law, A, V, n, reach(law.covariance, A, law.mean), rates.proxy_reach(law, A))
    exponents = case.rates()
    queries = [case.query(deviations, error) for deviations in DEVIATIONS]
    document: dict[str, Any] = {
        "inputs": {"measure": repr(law), "dim": law.dim, "n": n, "radius": ball, "mask_self": mask_self},
        "theory": {name: getattr(case.reach, name) for name in REACH} | {one.name: one.value for one in exponents},
        "rates": {one.name: one.as_dict() for one in exponents},
        "uniform": case.uniform(ball),
        "queries": queries,
    }
    if case.gaussian:
        document["local_rates"] = {moment: case.local_rate(moment) for moment in ("mean", "covariance")}
        document |= {"constants": case.constants(), "curve": case.curve(counts, mask_self)}
    if case.gaussian and law.dim == 1 and not law.mean.any():
        document["hardmax"] = {
            "finite": predicted(hardmax.hardmax_finite(n, case.scale), hardmax.finite_status(n)),
            "asymptotic": predicted(hardmax.hardmax_asymptotic(n, case.scale), CLAIMS["hardmax.asymptotic"].status),
        }
    return Summary({**document, "warnings": case.warnings(queries, mask_self=mask_self)})


def _matrices(head: Any, dim: int) -> tuple[Array, Array]:
    """Score matrix A (d, d) and value matrix V (d_out, d) of a Head, or of a score matrix with the tokens as values."""
    if not hasattr(head, "value_map"):
        score = as_array("A", head, ndim=(0, 2))
        return (score * np.eye(dim) if score.ndim == 0 else score), np.eye(dim)
    if head.query_bias.any() or head.value_bias.any():
        raise InputError("the head has a bias; expected one without, so pass its score matrix head.A alone")
    return head.A, value_matrix(head.value_map, dim)


@dataclass(frozen=True)
class _Case:
    """Inputs of `summary`; each method predicts one section of the JSON document."""

    law: Measure
    A: Array
    V: Array
    n: float
    reach: Reach
    proxy: Reach | None  # from a variance proxy of the law instead of its covariance

    @property
    def gaussian(self) -> bool:
        return isinstance(self.law, Gaussian)

    @property
    def scale(self) -> float:
        """Norm |V Σ^{1/2}|: in d = 1, the standard deviation of the values."""
        return float(np.linalg.norm(self.V @ square_root(self.law.covariance)))

    @property
    def centred(self) -> bool:
        return self.reach.mean_tilt <= CENTRED

    def rates(self) -> list[Prediction]:
        """Predicted exponents; that of bounded tokens says from which n on it shows."""
        start = rates.reached_from(self.law, self.A)
        coupling = None if self.proxy is None else self.proxy.coupling
        options: dict[str, Any] = {"compact": start is not None, "proxy_coupling": coupling}
        options["tail"] = rates.tail_horizon(self.law, self.A)
        found = rates.predictions(self.reach, gaussian=self.gaussian, **options)
        if start is not None:
            found[0] = replace(found[0], note=f"{found[0].note}; {rates.reached_words(self.law, start, self.n)}")
        return found

    def warnings(self, queries: Sequence[Mapping[str, Any]], *, mask_self: bool) -> list[str]:
        """Reasons, one sentence each, why numbers of the summary do not hold or are left out."""
        found = self.reach.warnings(self.n, mask_self=mask_self)
        if not self.gaussian:
            what = "covariances of its components" if isinstance(self.law, GaussianMixture) else "covariance"
            found.append(f"sharp rates hold for Gaussian tokens; for this law they use the {what} alone")
        if not self.centred and not np.isfinite(self.law.radius):
            left_out = "the proved rate, the law of the covariance error and the hardmax law need centred tokens"
            tilt = f"mean tilt {self.reach.mean_tilt:.3g}"
            found.append(f"the tokens are not centred ({tilt}): {left_out} and are left out, sharp rates are heuristic")
        ends = {query["interval"]["meaning"]: f"{query['deviations']:g}" for query in reversed(queries)}
        return found + [f"{what} (from {sd} sd on)" for what, sd in ends.items() if what.startswith("K ends")]

    def local_rate(self, moment: str) -> dict[str, Any]:
        """Slope at n of the predicted error of a `moment` of the outputs, "mean" or "covariance", as JSON."""
        law = rates.sharp_law(self.reach.horizon, moment, self.reach.multiplicity)
        in_line = self.reach.dim == 1 and self.centred and self.reach.horizon <= rates.VERIFIED_HORIZON
        claim = CLAIMS["local_rates"]
        status, note = claim.at(in_line and self.n >= rates.SLOPES_FROM), f"verified for {claim.where}"
        return predicted(law.local_rate(self.n), status, formula=claim.formula, **asdict(law), note=note)

    def constants(self) -> dict[str, Any] | None:
        """Limits of n times the variance of the outputs' mean and covariance; None if the horizon is 1 or more."""
        if self.reach.horizon >= 1:
            return None
        law, of, claim = self.law, self.reach, CLAIMS["constants.mean"]
        trace = float(np.trace(token_influence.mean_error_covariance(law.covariance, self.A, self.V, law.mean)))
        small = of.dim == 1 and of.horizon <= 0.5 and of.mean_tilt <= 1
        more = {} if self.centred else {"note": self._constant_note()}
        status = claim.at(small or mean_verified(of, VERIFIED_CONSTANT))
        constants = {"mean": predicted(trace, status, formula=claim.formula, **more)}
        if law.dim == 1 and self.centred:
            value = self.scale**4 * token_influence.covariance_error_variance_1d(of.horizon)
            claim = CLAIMS["constants.covariance"]
            status = claim.at(of.horizon <= VERIFIED_CONSTANT)
            constants["covariance"] = predicted(value, status, formula=claim.formula)
        return constants

    def _constant_note(self) -> str:
        """From which n on tokens with a mean have about their constant: 1,000 e^{2|ν|²}, since it rests on rare tokens.

        The variance comes from tokens near 2ν, ν = (I - BBᵀ)^{-1} Σ^{1/2} A E X, which have the density e^{-2|ν|²}.
        """
        B = whitened(self.law.covariance, self.A)
        shift = np.linalg.solve(np.eye(len(B)) - B @ B.T, square_root(self.law.covariance) @ self.A @ self.law.mean)
        start = float(np.exp(min(np.log(1000.0) + 2 * shift @ shift, 700.0)))
        late = "" if self.n >= start else ", not reached here"
        return f"tokens with a mean reach it from about n = {start:.2g} on{late}"

    def uniform(self, radius: float) -> dict[str, Any]:
        """Error bounds over queries within `radius`: constant, value at n, and smallest n at which they are useful."""
        found = [bounds.uniform_exponential(radius, (self.proxy or self.reach).horizon_one_sided)]
        if self.gaussian:
            laws = (bounds.uniform_gaussian, bounds.uniform_supremum)
            found += [law(self.law.covariance, self.A, radius, self.V) for law in laws]
        return {
            bound.prediction.name: bound.prediction.as_dict()
            | {"at_n": bound.at(self.n), "useful_from": bound.useful_from, "log10": bound.log_constant / np.log(10)}
            for bound in found
        }

    def query(self, deviations: float, error: float) -> dict[str, Any]:
        """Predictions at one query, `deviations` standard deviations from the mean along the top singular direction."""
        law, A, n = self.law, self.A, self.n
        root = square_root(law.covariance)
        direction = np.linalg.svd(whitened(law.covariance, A))[2][0]
        tilt = A @ (law.mean + deviations * root @ direction)
        cost = bounds.tilt_cost(law, tilt, self.V)
        validity = clt.interval_validity(law, tilt, n, self.V)
        meaning = NO_LIMIT.get(clt.ends_before(law, tilt) or 0, validity.meaning)
        absolute = error * cost.limit
        asymptotic, bound = map(float, np.sqrt((cost.trace / n, cost.mean_square_bound(n))))
        always, useful = "at every n, bounded laws only", cost.mean_square_useful_from()
        chance, useful_from = 1.0, float("inf")
        if absolute > 0:
            chance, useful_from = cost.deviation_bound(n, absolute), cost.deviation_useful_from(absolute)
        deviation = {"error": absolute, "probability_at_most": chance, "useful_from": useful_from}
        found: dict[str, Any] = {
            "deviations": deviations,
            "tilt": float(np.linalg.norm(root @ tilt)),
            "limit": cost.limit,
            "effective_sample_size": self._claimed("effective_sample_size", float(n * np.exp(-cost.log_cost))),
            "rms_error": self._claimed("rms_error", asymptotic, note="as n → ∞, by the central limit theorem"),
            "rms_error_bound": self._claimed("rms_error_bound", bound, note=always, useful_from=useful),
            "deviation": {**deviation, "status": CLAIMS["deviation"].status.value},
            "interval": {"validity": validity.value, "meaning": meaning, "remedy": validity.remedy},
        }
        if self.gaussian:
            query = deviations * direction[None]
            square = curve.query_error(law.covariance, A, query, n, V=self.V, mean=law.mean)[0, 0]
            note = "at this n, exactly, Gaussian tokens"
            found["rms_error_exact"] = self._claimed("rms_error_exact", float(np.sqrt(square)), note=note)
        return found

    @staticmethod
    def _claimed(name: str, value: Any, *, holds: bool = True, **more: Any) -> dict[str, Any]:
        return predicted(value, CLAIMS[name].at(holds), **more)

    def curve(self, sizes: Array, mask_self: bool) -> dict[str, Any]:
        covariance, mean = self.law.covariance, self.law.mean
        # E|Γ(X)|² = |V Σ A Σ^{1/2}|² + |V (Σ A + I) m|²
        random = self.V @ covariance @ self.A @ square_root(covariance)
        constant = self.V @ (covariance @ self.A @ mean + mean)
        size = float(np.sqrt(np.sum(random**2) + np.sum(constant**2)))
        output = curve.output_error(covariance, self.A, sizes, V=self.V, mean=mean, mask_self=mask_self)
        found = {
            "n": sizes,
            "output": self._claimed("curve.output", output, note="root mean square over queries and samples"),
            "relative_output": self._claimed("curve.output", output / size if size > 0 else None),
        }
        if not self.centred:
            return found
        mean_error = curve.mean_error(covariance, self.A, sizes, self.V)
        if mean_error is not None:
            note = "E|error of the mean output|"
            found["mean"] = self._claimed("curve.mean", mean_error, holds=mean_verified(self.reach), note=note)
        if self.law.dim > 1:
            return found
        horizon = float(whitened(covariance, self.A)[0, 0])
        if mean_error is not None:
            of_variance = self.scale**2 * token_influence.variance_error_1d(horizon, sizes)
            note = "E|error of the variance of the outputs|"
            found["covariance"] = self._claimed("curve.covariance", of_variance, note=note)
        averaged = self.scale * curve.averaged_error_1d(horizon, sizes)
        holds = abs(horizon) <= curve.VERIFIED_HORIZON
        note = "E|Γ_n − Γ| averaged over queries, by the three-piece law"
        return {**found, "averaged": self._claimed("curve.averaged", averaged, holds=holds, note=note)}
