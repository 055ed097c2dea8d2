"""The result of `study`: error curves of attention over n tokens, their fitted rates, and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, check_relative
from limitlens.estimate import Estimate
from limitlens.record import Run
from limitlens.report.text import falling, join, short
from limitlens.report.view import Axis, Colour, Figure, Guide, Section, Table, Text, View, band, cells, line, points
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.estimators import controlled, denoised
from limitlens.statistics.fit import Rate
from limitlens.statistics.tokens_for import TokensFor
from limitlens.theory.rates import WEAK

MOMENT = {"output": 2}  # the output error is a root mean square over queries and replicates; the others are E|error|
AS_STORED = (
    "measure", "theory", "asymptotic", "scale", "mask_self", "queries", "seed", "device", "kernel", "interrupted",
    "seconds", "warnings", "notes",
)  # fmt: skip
MEANING = {  # descriptions of the errors, in the order in which they are shown
    "mean": "mean of the outputs",
    "covariance": "covariance of the outputs",
    "output": "output, root mean square over queries",
    "uniform": "output, maximum over a ball of queries",
}
MARKS = "Points are measured, with 95% bars; lines are fitted power laws; dotted lines are predictions at finite n."
CONVERGED = "Slopes between neighbouring sizes. Where they still change, the fitted rate is not yet the asymptotic one."
REACH = ("horizon", "horizon_one_sided", "coupling")
PROVED = ("mean", "covariance")  # errors that the proved rate bounds, as n → ∞
WANTED = (0.1, 0.05, 0.01)  # relative output errors for which every study gives the number of tokens
COLOURS: dict[str, Colour] = {"mean": "blue", "covariance": "orange", "output": "green", "uniform": "pink"}
TOKENS = Axis("number of tokens n", log=True)
SEEN_FLOOR = 0.02  # rounding errors below this share of the smallest error are not drawn


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult(Result):
    """Result of `study`: errors of attention over n tokens against its infinite-token limit, measured and predicted."""

    kind, file = "study", "curve"
    sizes: tuple[int, ...]
    # errors.NAME (replicates, sizes), NAME being mean, covariance, output or uniform. noise.NAME, part of the squared
    # error due to few queries. fewer.NAME (replicates, sizes, 2 or 4), errors with half and a quarter of the queries.
    # controls (replicates, sizes, F), control variates of mean zero.
    rows: Mapping[str, Array]
    reference_factor: Array  # (sizes,): measured over true error; not 1 where the limit is estimated
    floor: Array  # (sizes,): rounding error, root mean square difference of the outputs from float64
    scale: Mapping[str, float]  # root mean squares `output` of |Γ(X)| and `output_centred` of |Γ(X) − EΓ|
    measure: str  # repr of the tokens' distribution
    # Horizons and coupling of the head, and predicted rates for unbounded tokens. `rate_sharp` is that of the mean and
    # covariance, `rate_rms_output` that of the output error, `rate_sharp_output` that of one typical sample.
    theory: Mapping[str, float]
    asymptotic: Mapping[str, float]  # rate each error tends to: the sharp one, or 1/2 (bounded tokens, uniform error)
    predict: Callable[[], Mapping[str, Array]]  # computes `predicted` on demand: it takes longer than a study on a GPU
    mask_self: bool
    queries: int  # per replicate
    seed: int
    device: str = "cpu"
    kernel: str = "float32"  # description of the attention kernel and its precision
    interrupted: bool = False
    seconds: float = 0.0
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()  # caveats about the numbers

    @cached_property
    def predicted(self) -> Mapping[str, Array]:
        """Errors (sizes,) by name as theory predicts them, without sampling; empty unless tokens are Gaussian."""
        return self.predict()

    @cached_property
    def replicate_errors(self) -> dict[str, Array]:
        """Measured errors (replicates, sizes) by name: mean, covariance, output, and uniform if a radius was given."""
        return {name: self.rows[key] for name in MEANING if (key := f"errors.{name}") in self.rows}

    @property
    def replicates(self) -> int:
        """Number of replicates, the independent samples of tokens over which errors are averaged."""
        return len(self.replicate_errors["output"])

    @cached_property
    def errors(self) -> dict[str, ErrorCurve]:
        """Error curves over n by name, corrected for the noise of using few queries."""
        curves = {}
        for name in self.replicate_errors:
            floor = np.zeros(1) if name == "uniform" else self.floor  # the uniform error is computed in float64
            rows = controlled(self.denoised_moments(name), self.rows["controls"])
            known = {"floor": floor, "finite_population_correction": self.reference_factor, "seed": self.seed}
            curves[name] = ErrorCurve.of(self.sizes, rows, moment=MOMENT.get(name, 1), **known)
        return curves

    @cached_property
    def relative(self) -> ErrorCurve:
        """Curve over n of the output error divided by the root mean square of the infinite-token output."""
        return self.errors["output"].scaled(self.scale["output"])

    def rate(self, name: str = "output") -> Rate | None:
        """Power law n^(−β) fitted to the error `name`; None if fewer than three sizes can be fitted."""
        if name not in self.errors:
            raise InputError(f"the study has no error named {name!r}; expected one of {', '.join(self.errors)}")
        return self.errors[name].rate

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Smallest number of tokens, up to `context`, at which the relative output error is at most `error`."""
        return self.relative.tokens_for(check_relative(error), context)

    def denoised_moments(self, name: str) -> Array:
        """Errors `name` (replicates, sizes) without the bias of using few queries; output errors are squared."""
        errors, fewer = self.replicate_errors[name], self.rows.get(f"fewer.{name}")
        if fewer is not None:
            errors = denoised(errors, self.rows.get(f"noise.{name}"), fewer, self.queries, self.sizes)
        return np.asarray(errors ** MOMENT.get(name, 1))

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per error and size n: value, standard error, local slope on log axes, and prediction."""
        parts = []
        for name, curve in self.errors.items():
            local = [np.append(slopes, np.nan) for slopes in curve.local_slopes]
            part = {"error": name, "n": self.sizes, "value": curve.error, "stderr": curve.stderr}
            part |= {"local_slope": local[0], "local_slope_stderr": local[1], "floor": self.floor}
            part["predicted"] = self.predicted.get(name, np.full(len(self.sizes), np.nan))
            if name == "output":
                with np.errstate(divide="ignore", invalid="ignore"):
                    part["relative"] = curve.error / self.scale["output"]
                    part["relative_centred"] = curve.error / self.scale["output_centred"]
            parts.append(pd.DataFrame(part))
        return pd.concat(parts, ignore_index=True)

    def document(self) -> dict[str, Any]:
        """JSON document of the study, as saved in a run folder and printed by `--json`."""
        errors, slopes, rates = {}, {}, {}
        for name, curve in self.errors.items():
            errors[name] = {"value": curve.error, "stderr": curve.stderr}
            slopes[name] = dict(zip(("value", "stderr"), curve.local_slopes, strict=True))
            rates[name] = curve.rate and curve.rate.document()
        return {
            **{key: getattr(self, key) for key in AS_STORED},
            "n": list(self.sizes),
            "errors": errors,
            "rates": rates,
            "local_slopes": slopes,
            "tokens_for": {str(error): self.tokens_for(error).document() for error in WANTED},
            "predicted": dict(self.predicted),
            "replicates": [self.replicates] * len(self.sizes),
            "floor": self.floor,
        }

    def arrays(self) -> dict[str, Array]:
        """Arrays by name that are saved next to the JSON document, such as the error of every replicate."""
        return {**self.rows, "reference_factor": self.reference_factor}

    @classmethod
    def stored(cls, document: Mapping[str, Any], arrays: Mapping[str, Array]) -> StudyResult:
        """Rebuild a study from its saved JSON document and arrays."""
        rows = dict(arrays)
        return cls(
            sizes=parse_sizes(document["n"]),
            reference_factor=rows.pop("reference_factor"),
            rows=rows,
            floor=np.asarray(document["floor"], dtype=float),
            predict=lambda: {name: np.asarray(curve, dtype=float) for name, curve in document["predicted"].items()},
            **{key: document[key] for key in AS_STORED},
        )

    @classmethod
    def load(cls, run: Run) -> StudyResult:
        """Read a saved study from a run folder."""
        return cls.stored(run.document, run.arrays())

    def __repr__(self) -> str:
        return f"<StudyResult: {self.measure}, {span(self)}, {self.replicates} replicates>"

    def view(self) -> View:
        """HTML page of the study: error curves, fitted rates, local slopes, and tokens needed for a given error."""
        horizon, one_sided, coupling = (short(self.theory[name]) for name in REACH)
        reach = f"Horizon {horizon}, one-sided {one_sided}, coupling {coupling}"
        columns = [cells(curve.error, curve.stderr) for curve in self.errors.values()]
        values = Table("errors", ["n", *self.errors], [*zip(self.sizes, *columns, strict=True)], folded=True)
        wanted = [f"{error:.0%} relative output error: {self.tokens_for(error)}" for error in WANTED]
        verdict = (
            f"Attention over n tokens of {self.measure} was compared with its exact infinite-token limit, "
            f"{span(self)}, in {self.replicates} replicates.",
            _fitted_rates(self),
            f"Tokens needed for a relative output error of {WANTED[0]:.0%}: {self.tokens_for(WANTED[0])}."
            + _weak_note(self),
        )
        sections = [
            Section("Error against the number of tokens", MARKS, [_errors_figure(self), values]),
            Section("Rates", f"Fitted rates, and the rates that errors tend to. {reach}.", [_rates_table(self)]),
            Section("Has the rate converged?", CONVERGED, [_slopes_figure(self)]),
            Section("How many tokens for an error?", "", [Text(wanted, listed=True)]),
        ]
        title, caveats = f"{self.measure}, horizon {horizon}", trust([self], self.interrupted)
        subtitle = f"{self.replicates} replicates · {self.queries} queries · {span(self)} · on {self.device}"
        return View(title, subtitle, verdict, sections, warnings=tuple(self.warnings), trust=caveats)

    def figures(self) -> list[Figure]:
        """List of the study's one figure: error curves with 95% bars, fitted power laws and predictions."""
        return [_errors_figure(self)]


def _errors_figure(study: StudyResult) -> Figure:
    series = []
    for name, curve in study.errors.items():
        series.append(points(name, study.sizes, curve.error, COLOURS[name], curve.stderr))
        if rate := curve.rate:
            used = np.asarray(rate.used, dtype=float)
            label = f"{name}: rate {rate.slope:.3f} ± {rate.stderr:.3f}"
            series.append(line(label, used, rate.constant * used**-rate.slope, COLOURS[name]))
        if name in study.predicted:
            series.append(line(f"{name}, predicted", study.sizes, study.predicted[name], COLOURS[name], "dotted"))
    if study.floor.max() > max(SEEN_FLOOR * _smallest_error(study), 0):
        series.append(band("numerical floor", study.sizes, 0.1 * study.floor, study.floor, "grey"))
    return Figure("Errors", TOKENS, Axis("error", log=True), series, height=400)


def _slopes_figure(study: StudyResult) -> Figure:
    n = np.asarray(study.sizes, dtype=float)
    middle = np.sqrt(n[1:] * n[:-1])
    series = []
    for name, curve in study.errors.items():
        slope, stderr = curve.local_slopes
        series.append(points(name, middle, slope, COLOURS[name], stderr, joined=True, positive=False))
    limits = {study.asymptotic[name]: f"{name} tends to {study.asymptotic[name]:.3f}" for name in ("output", "mean")}
    guides = [Guide(label, y=value) for value, label in limits.items()]
    return Figure("Local slopes", TOKENS, Axis("slope between neighbours"), series, guides, height=340)


def _rates_table(study: StudyResult) -> Table:
    rows = []
    for name, curve in study.errors.items():
        rate, slope, interval, law = curve.rate, None, _no_rate(curve), None
        if rate is not None:
            slope = Estimate(rate.slope, rate.stderr)
            interval = f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}"
            law = f"{rate.law} ({rate.evidence:+.1f})"
        proved = study.theory.get("rate_compact", study.theory["rate_proved"] if name in PROVED else None)
        rows.append((name, MEANING[name], slope, interval, study.asymptotic[name], proved, law))
    columns = ["error", "of the", "fitted rate", "95% interval", "asymptotic", "proved at least (asymptotically)"]
    return Table("rates", [*columns, "law (evidence for a power)"], rows)


def _fitted_rates(study: StudyResult) -> str:
    fitted = {name: curve.rate for name, curve in study.errors.items() if curve.rate is not None}
    if not fitted:
        return f"No rate can be fitted ({_no_rate(study.errors['output'])}); the table has the errors."
    falls = join([f"the {name} error falls like {falling(rate.slope)}" for name, rate in fitted.items()])
    logs = [name for name, rate in fitted.items() if rate.law == "log"]
    return (
        f"As n grows {falls}; for horizon {short(study.theory['horizon'])} the exponents tend, as n → ∞, to "
        f"{short(study.asymptotic['mean'])} for the moments and {short(study.asymptotic['output'])} for the output."
        + (f" A logarithm fits better for {join(logs)}." if logs else "")
    )


def _no_rate(curve: ErrorCurve) -> str:
    """Reason why no rate was fitted: too few sizes, or errors too close to the rounding errors of float32."""
    return "too few sizes" if curve.usable.sum() == len(curve.sizes) else "too close to the numerical floor"


def _weak_note(study: StudyResult) -> str:
    """Advice where the infinite-token output is smaller than the sampling error of a plain average of tokens."""
    if study.theory["horizon"] > WEAK or not study.relative.error[-1] > 1:
        return ""
    small = f" The limit itself is small at horizon {short(study.theory['horizon'])}"
    return f"{small}: a larger horizon, not a smaller one, lowers the relative error."


def _smallest_error(study: StudyResult) -> float:
    return min(float(curve.error.min()) for curve in study.errors.values())


def span(study: StudyResult) -> str:
    """Range of the sizes n of a study as text: "n from 1,000 to 30,000"."""
    return f"n from {study.sizes[0]:,} to {study.sizes[-1]:,}"


def trust(studies: Sequence[StudyResult], interrupted: bool) -> list[str]:
    """Sentences for the HTML page on rounding errors, interruption and other caveats of these studies."""
    last, sentences = studies[-1], []
    if last.floor.any():
        floor, smallest = short(float(last.floor.max())), short(_smallest_error(last))
        sentences.append(f"Numerical floor: {floor} ({last.kernel}); the smallest measured error is {smallest}.")
    if interrupted:
        lost = "points rest on fewer replicates than requested" if last.interrupted else "the sweep ends early"
        sentences.append(f"The run was interrupted: {lost}.")
    return [*sentences, *dict.fromkeys(note for study in studies for note in study.notes)]
