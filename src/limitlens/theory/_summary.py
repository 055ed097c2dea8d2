"""Everything predicted for one law, one head and one n, each number with its standing; nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure
from limitlens.measures.gaussian import Gaussian
from limitlens.measures.own import TokenLaw, as_measure
from limitlens.record import Run, to_json
from limitlens.report.view import SHADES, Cell, Figure, Section, Table, View, points
from limitlens.report.words import falling, join, short, worded_figure
from limitlens.results import Result
from limitlens.theory import bounds, clt, curve, finite, hardmax, rates, token_influence
from limitlens.theory.prediction import WORDS
from limitlens.theory.proxy import proxy_reach
from limitlens.theory.spectrum import Reach, reach, square_root, whitened

TILTS = (0.5, 1.0, 2.0, 3.0)  # queries shown one by one: standard deviations along the direction of the horizon
REACH = ("horizon", "horizon_one_sided", "coupling", "frobenius", "trace")


@dataclass(frozen=True, eq=False, repr=False)
class Summary(Result):
    """What theory says about a law, a head and a number of tokens."""

    # inputs, theory (numbers), rates, uniform, queries, warnings; for Gaussian tokens local_rates, constants, curve too
    predicted: Mapping[str, Any]
    kind = "theory"

    @classmethod
    def load(cls, run: Run) -> Summary:
        """The summary that a run folder holds."""
        return cls(dict(run.document))

    @property
    def warnings(self) -> Sequence[str]:
        """Reasons not to read the slopes at this n as rates."""
        return list(self.predicted["warnings"])

    @property
    def table(self) -> pd.DataFrame:
        """The rates, one row each."""
        return pd.DataFrame([{"rate": name, **rate} for name, rate in self.predicted["rates"].items()])

    @property
    def curves(self) -> dict[str, Any]:
        """The predicted curves by name, with n first; empty where there is none."""
        found = self.predicted.get("curve", {})
        parts = {name: part["predicted"] for name, part in found.items() if name != "n"}
        known = {name: curve for name, curve in parts.items() if curve is not None}
        return {"n": found["n"], **known} if known else {}

    def document(self) -> dict[str, Any]:
        """The summary as a JSON document."""
        return dict(self.predicted)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The rates, and the predicted curve where there is one."""
        return {"rates": self.table, **({"curve": pd.DataFrame(self.curves)} if self.curves else {})}

    def figures(self) -> list[Figure]:
        """The predicted curves where there are any, and the error query by query."""
        curves, queries = self.curves, self.predicted["queries"]
        spreads = [query["deviations"] for query in queries]
        at_queries = [
            points(name, spreads, [query[key]["predicted"] for query in queries], colour, joined=True)
            for key, (name, colour) in WORDS["errors at queries"].items()
            if key in queries[0]
        ]
        lines = [
            points(name, curves["n"], curves[name], colour, joined=True)
            for name, colour in zip(list(curves)[1:], SHADES, strict=False)
        ]
        one = worded_figure(WORDS["at queries"], at_queries, n=self.predicted["inputs"]["n"])
        return [worded_figure(WORDS["curves"], lines), one] if lines else [one]

    def view(self) -> View:
        """Every prediction, as tables."""
        told, curves = self.predicted, self.curves
        given, numbers, found, queries = (told[key] for key in ("inputs", "theory", "rates", "queries"))
        valid = [f"{query['deviations']:g}" for query in queries if query["interval"]["validity"] == "valid"]
        # bounded tokens have their own rate, whatever the horizon
        names = ("rate_compact",) * 2 if "rate_compact" in found else ("rate_sharp", "rate_sharp_output")
        moments, output = ((falling(found[name]["predicted"]), found[name]["status"]) for name in names)
        known = {"given": given, "horizon": short(numbers["horizon"]), "moments": moments, "output": output}
        known["believed"] = WORDS["believed" if valid else "not believed"].format(valid=join(valid))
        read, says, do = (text.format(**known) for text in WORDS["verdict"])
        values = [*zip(*(map(float, column) for column in curves.values()), strict=True)]
        standing = ("", *(told["curve"][name]["status"] for name in list(curves)[1:]))
        rows = {
            "rates": _rows(found, "predicted", "status", "formula", "note"),
            "local": _rows(told.get("local_rates"), "predicted", "log_power", "status"),
            "constants": _rows(told.get("constants"), "predicted", "status", "formula"),
            "curves": [*values, standing] if curves else [],
            "queries": [_query_row(query) for query in queries],
            "uniform": _rows(told["uniform"], "predicted", "status", "at_n", "useful_from", "note"),
            "hardmax": _rows(told.get("hardmax"), "predicted", "status"),
        }
        tables = [
            Table(title.format(given=given), columns or list(curves), rows[name])
            for name, (title, columns) in WORDS["tables"].items()
            if rows[name]
        ]
        lead = ", ".join(f"{word} {short(numbers[key], 4)}" for key, word in WORDS["reach"].items())
        sections = [
            Section("Errors", "What attention over n tokens misses.", self.figures(), only="page"),
            Section("Predictions", lead + ".", tables),
        ]
        subtitle = f"{given['measure']}, n = {given['n']:g}: {lead[0].lower()}{lead[1:]}"
        return View(WORDS["title"], subtitle, (read, says, do), sections, warnings=self.warnings)

    def __repr__(self) -> str:
        given, numbers = self.predicted["inputs"], self.predicted["theory"]
        return (
            f"Summary({given['measure']}, n={given['n']:g}, horizon={numbers['horizon']:.4g}, "
            f"rate_sharp={numbers['rate_sharp']:.4g}, rate_sharp_output={numbers['rate_sharp_output']:.4g})"
        )


def summary(
    measure: TokenLaw,
    head: Any,
    n: float,
    *,
    sizes: ArrayLike | None = None,
    radius: float | None = None,
    error: float = 0.1,
    mask_self: bool = False,
) -> Summary:
    """Every prediction for attention over n tokens of a law, without sampling.

    `head` is a Head without biases or a score matrix A (d, d), whose values are then the tokens themselves. The curve
    is predicted over `sizes` (n alone when absent), the uniform bound over the ball of `radius` (the root mean square
    norm of the tokens when absent). `error` is the relative error whose probability is bounded at each query shown;
    `mask_self` leaves a query's own token out of its softmax.

    >>> told = theory.summary(ll.Gaussian(0.0, 1.0), ll.Head(1.5), 30_000)
    >>> round(told.predicted['theory']['rate_sharp'], 4)
    0.3077
    """
    hardmax.check_size(n)
    check_number("the error", error, "a positive number, such as 0.1", closed=False, below=1e15)
    if radius is not None:
        check_number("the radius", radius, "a number from 0 to 1e15", below=1e15)
    law = as_measure(measure)
    counts = np.atleast_1d(as_array("sizes", n if sizes is None else sizes, ndim=(0, 1)))
    ball = float(np.sqrt(np.trace(law.covariance) + law.mean @ law.mean)) if radius is None else radius
    of = _Predictor(law, *_matrices(head, law.dim), n)
    compact = bool(np.isfinite(law.radius))
    coupling = None if of.proxy is None else of.proxy.coupling
    listed = rates.predictions(of.reach, gaussian=of.gaussian, compact=compact, proxy_coupling=coupling)
    warnings = of.reach.warnings(n, mask_self=mask_self)
    if not of.gaussian:
        warnings.append(WORDS["warnings"]["not gaussian"])
    document: dict[str, Any] = {
        "inputs": {"measure": repr(law), "dim": law.dim, "n": n, "radius": ball, "mask_self": mask_self},
        "theory": {
            **{name: getattr(of.reach, name) for name in REACH},
            **{prediction.name: prediction.value for prediction in listed},
        },
        "rates": {prediction.name: prediction.as_dict() for prediction in listed},
        "uniform": of.uniform(ball),
        "queries": [of.query(spread, error) for spread in TILTS],
    }
    if of.gaussian:
        document["local_rates"] = {moment: of.local_rate(moment) for moment in ("mean", "covariance")}
        document |= {"constants": of.constants(), "curve": of.curve(counts, mask_self)}
        if law.dim == 1:
            scale = of.gain * float(np.sqrt(law.covariance[0, 0]))
            document["hardmax"] = {
                "finite": _number(hardmax.hardmax_finite(n, scale), hardmax.finite_status(n).value),
                "asymptotic": _number(hardmax.hardmax_asymptotic(n, scale), "proved"),
            }
    return Summary({**document, "warnings": warnings})


def _rows(parts: Mapping[str, Any] | None, *keys: str) -> list[tuple[Cell, ...]]:
    """A row for each part: its name and what stands under the keys."""
    return [
        (name, *(_from(part[key]) if key == "useful_from" else part.get(key) for key in keys))
        for name, part in (parts or {}).items()
    ]


def _query_row(query: Mapping[str, Any]) -> tuple[Cell, ...]:
    errors = [query.get(key, {}).get("predicted") for key in ("effective_sample_size", "rms_error", "rms_error_exact")]
    bound = query["deviation"]
    chance = (bound["error"], bound["probability_at_most"], _from(bound["useful_from"]))
    return (f"{query['deviations']:g} sd", query["tilt"], *errors, *chance, query["interval"]["validity"])


def _from(n: float | None) -> str:
    return short(n) if n is not None and n < float("inf") else "never"


def _matrices(head: Any, dim: int) -> tuple[Array, Array | None]:
    """The score matrix A (d, d) of a head, and its value matrix V where that is not the identity."""
    if not hasattr(head, "value_map"):
        score = as_array("A", head, ndim=(0, 2))
        return (score * np.eye(dim) if score.ndim == 0 else score), None
    if head.query_bias.any() or head.value_bias.any():
        raise InputError("the head has a bias; expected one without, so pass its score matrix head.A alone")
    return head.A, head.value_map


def _number(predicted: Any, status: str, told: str = "", **more: Any) -> dict[str, Any]:
    """A predicted number with its standing, and what is told of it in words.json."""
    return {"predicted": predicted, "status": status, **WORDS["told"].get(told, {}), **more}


@dataclass(frozen=True)
class _Predictor:
    """The parts of the document, for a law, a head's A and V, and n."""

    law: Measure
    A: Array
    V: Array | None
    n: float

    @cached_property
    def reach(self) -> Reach:
        return reach(self.law.covariance, self.A)

    @cached_property
    def proxy(self) -> Reach | None:
        return proxy_reach(self.law, self.A)

    @property
    def gaussian(self) -> bool:
        return isinstance(self.law, Gaussian)

    @property
    def gain(self) -> float:
        """|V|, by which lengths grow in d = 1."""
        return 1.0 if self.V is None else float(np.linalg.norm(self.V))

    @property
    def moments(self) -> str:
        """The standing of the n^(-1/2) law of the mean output."""
        return "verified" if rates.moments_verified(self.reach) else "heuristic"

    def local_rate(self, moment: str) -> dict[str, Any]:
        """The slope of the sharp law of a moment at n, its logarithms included."""
        seen = self.reach.dim == 1 and self.n >= rates.SLOPES_FROM
        law = rates.sharp_law(self.reach.horizon, moment, self.reach.multiplicity)
        known = {**to_json(law), "note": f"verified in d = 1 from n = {rates.SLOPES_FROM:g} on"}
        return _number(law.local_rate(self.n), "verified" if seen else "heuristic", "local rate", **known)

    def constants(self) -> dict[str, Any] | None:
        """n · Cov of the moments while H < 1; None from 1 on, where there is no such constant."""
        if self.reach.horizon >= 1:
            return None
        covariance = self.law.covariance
        trace = float(np.trace(token_influence.mean_error_covariance(covariance, self.A, self.V)))
        found = {"mean": _number(trace, self.moments, "constant of the mean")}
        if self.law.dim == 1:
            value = token_influence.covariance_error_variance_1d(self.reach.horizon) * float(covariance[0, 0]) ** 2
            found["covariance"] = _number(self.gain**4 * value, "verified", "constant of the covariance")
        return found

    def uniform(self, radius: float) -> dict[str, Any]:
        """What is known of the error over the ball of this radius."""
        found = [bounds.uniform_exponential(radius, (self.proxy or self.reach).horizon_one_sided)]
        if self.gaussian:
            laws = (bounds.uniform_gaussian, bounds.uniform_supremum)
            found += [law(self.law.covariance, self.A, radius, self.V) for law in laws]
        told = [(b.prediction, {"at_n": b.at(self.n), "useful_from": b.useful_from}) for b in found]
        return {prediction.name: prediction.as_dict() | more for prediction, more in told}

    def query(self, spread: float, error: float) -> dict[str, Any]:
        """Central limit theorem, its validity and the finite-n bounds at one query."""
        law, A, n, root = self.law, self.A, self.n, square_root(self.law.covariance)
        direction = np.linalg.svd(whitened(law.covariance, A))[2][0]
        tilt = A @ (law.mean + spread * root @ direction)
        cost = finite.tilt_cost(law, tilt, self.V)
        flag = clt.interval_validity(law, tilt, n, self.V)
        wanted = error * cost.limit
        asymptotic, bound = map(float, np.sqrt((cost.mean_square_asymptotic(n), cost.mean_square_bound(n))))
        useful = cost.mean_square_useful_from()
        found: dict[str, Any] = {
            "deviations": spread,
            "tilt": float(np.linalg.norm(root @ tilt)),
            "limit": cost.limit,
            "effective_sample_size": _number(float(n * np.exp(-cost.log_cost)), "proved"),
            "rms_error": _number(asymptotic, "proved", "rms error"),
            "rms_error_bound": _number(bound, "proved", "rms error, bound", useful_from=useful),
            "quadratic_error_95": _number(cost.quadratic_error_quantile(n), "proved"),
            "deviation": {
                "error": wanted,
                "probability_at_most": cost.deviation_bound(n, wanted) if wanted > 0 else 1.0,
                "useful_from": cost.deviation_useful_from(wanted) if wanted > 0 else float("inf"),
                "status": "proved",
            },
            "interval": {"validity": flag.value, "meaning": flag.meaning, "remedy": flag.remedy},
        }
        if self.gaussian:
            at = spread * direction[None]
            square = curve.query_error(law.covariance, A, at, n, V=self.V, mean=law.mean)[0, 0]
            found["rms_error_exact"] = _number(float(np.sqrt(square)), "verified", "rms error, exact")
        return found

    def curve(self, sizes: Array, mask_self: bool) -> dict[str, Any]:
        """Predicted error curves over the sizes."""
        covariance, mean, V = self.law.covariance, self.law.mean, self.V
        B, identity = whitened(covariance, self.A), np.eye(self.law.dim)
        value = identity if V is None else V
        at_query, at_mean = value @ covariance @ self.A, value @ (covariance @ self.A + identity) @ mean
        scale = float(np.sqrt(np.sum((at_query @ square_root(covariance)) ** 2) + np.sum(at_mean**2)))
        output = curve.output_error(covariance, self.A, sizes, V=V, mean=mean, mask_self=mask_self)
        found = {"n": sizes, "output": _number(output, "verified", "output")}
        found["relative_output"] = _number(output / scale if scale > 0 else None, "verified")
        if mean.any():
            return found
        of_mean = curve.mean_error(covariance, self.A, sizes, V)
        if of_mean is not None:
            # In d = 1 the finite-n law, held against simulations to H = 1; beyond d = 1 its limit, where it is near.
            status = self.moments if np.linalg.norm(B, 2) <= 1 else "heuristic"
            found["mean"] = _number(of_mean, status, "mean")
        if len(B) > 1:
            return found
        horizon, variance = float(B[0, 0]), float(covariance[0, 0])
        if of_mean is not None:
            error = self.gain**2 * variance * token_influence.variance_error_1d(horizon, sizes)
            found["covariance"] = _number(error, "heuristic", "covariance")
        averaged = self.gain * float(np.sqrt(variance)) * curve.averaged_error_1d(horizon, sizes)
        status = "verified" if abs(horizon) <= curve.VERIFIED_HORIZON else "heuristic"
        return {**found, "averaged": _number(averaged, status, "averaged")}
