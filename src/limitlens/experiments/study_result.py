"""`StudyResult`: error curves that a study measured, their fitted rates, the predictions of theory, and the page."""

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
from limitlens.report.view import (
    Axis,
    Cell,
    Colour,
    Figure,
    Guide,
    Section,
    Table,
    Text,
    View,
    band,
    cells,
    line,
    points,
)
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.estimators import controlled, denoised
from limitlens.statistics.fit import Rate
from limitlens.statistics.tokens_for import TokensFor

MOMENT = {"output": 2}  # the output error is a root mean square over queries and replicates; the others are E|error|
FIELD_OF = {"errors": "replicate_errors", "noise": "query_noise", "fewer": "fewer_queries"}  # by prefix in a file
AS_STORED = (
    "measure", "theory", "asymptotic", "mask_self", "queries", "seed", "device", "kernel", "interrupted", "seconds",
    "warnings", "notes",
)  # fmt: skip
MEANING = {  # descriptions of the errors that views show; documents and tables have every error
    "mean": "mean of the outputs",
    "covariance": "covariance of the outputs",
    "output": "output, root mean square over queries",
    "uniform": "output, maximum over a ball of queries",
}
PROVED = ("mean", "covariance")  # errors that the proved rate bounds
WANTED = (0.1, 0.05, 0.01)  # relative output errors for which every study gives the number of tokens
COLOURS: dict[str, Colour] = {"mean": "blue", "covariance": "orange", "output": "green", "uniform": "pink"}
TOKENS = Axis("number of tokens n", log=True)
SEEN_FLOOR = 0.02  # a numerical floor below this share of the smallest error is not drawn


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult(Result):
    """Result of `study`: errors of attention over n tokens against the infinite-token limit, measured and predicted."""

    kind, file = "study", "curve"
    sizes: tuple[int, ...]
    replicate_errors: Mapping[str, Array]  # (replicates, sizes) by name of the error; `uniform` only with a radius
    query_noise: Mapping[str, Array]  # (replicates, sizes) by name: excess of the squared error due to few queries
    fewer_queries: Mapping[str, Array]  # (replicates, sizes, 2 or 4): errors from halves and quarters of the queries
    controls: Array  # (replicates, sizes, F): control variates of expectation zero
    reference_factor: Array  # (sizes,): measured over true error, from a finite pool or a sampled reference
    floor: Array  # (sizes,): root mean square difference of the outputs from float64
    scale: tuple[float, float]  # root mean squares of |Γ(X)| and |Γ(X) − EΓ|
    measure: str  # repr of the law
    # Horizons and coupling of the head over the law, and the rates they predict for unbounded tokens: `rate_sharp` for
    # the moments, `rate_rms_output` for the output error (a root mean square over queries and replicates), and
    # `rate_sharp_output` for the output error of one typical sample.
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
        """Predicted errors (sizes,) by name, computed by theory without sampling; empty unless tokens are Gaussian."""
        return self.predict()

    @property
    def replicates(self) -> int:
        """Number of replicates (independent samples of tokens) behind every point of the error curves."""
        return len(self.replicate_errors["output"])

    @cached_property
    def errors(self) -> dict[str, ErrorCurve]:
        """Curve over n of every measured error by name, with query noise removed and control variates applied."""
        curves = {}
        for name in self.replicate_errors:
            floor = np.zeros(1) if name == "uniform" else self.floor  # the uniform error is computed in float64
            rows = controlled(self.denoised_moments(name), self.controls)
            curves[name] = ErrorCurve.of(
                self.sizes, rows, moment=MOMENT.get(name, 1), floor=floor,
                finite_population_correction=self.reference_factor, seed=self.seed,
            )  # fmt: skip
        return curves

    @property
    def shown(self) -> dict[str, ErrorCurve]:
        """Curves over n of the errors that pages and terminal views show, by name."""
        return {name: self.errors[name] for name in MEANING if name in self.errors}

    @cached_property
    def relative(self) -> ErrorCurve:
        """Curve over n of the output error, divided by the root mean square of the limit output."""
        return self.errors["output"].scaled(self.scale[0])

    def rate(self, name: str = "output") -> Rate | None:
        """Fitted rate of the error `name`, or None where fewer than three sizes can be fitted."""
        if name not in self.errors:
            raise InputError(f"the study has no error {name!r}; expected one of {', '.join(self.errors)}")
        return self.errors[name].rate

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Smallest number of tokens n up to `context` whose relative output error is at most `error`."""
        return self.relative.tokens_for(check_relative(error), context)

    def denoised_moments(self, name: str) -> Array:
        """Errors `name` (replicates, sizes), squared for the output, with query noise removed on average."""
        errors = self.replicate_errors[name]
        if name in self.fewer_queries:
            errors = denoised(errors, self.query_noise.get(name), self.fewer_queries[name], self.queries, self.sizes)
        return np.asarray(errors ** MOMENT.get(name, 1))

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table of the error curves: one row per error and size n, with standard error, local slope and prediction."""
        parts = []
        for name, curve in self.errors.items():
            slopes, slope_errors = curve.local_slopes
            part = {
                "error": name,
                "n": self.sizes,
                "value": curve.error,
                "stderr": curve.stderr,
                "local_slope": np.append(slopes, np.nan),
                "local_slope_stderr": np.append(slope_errors, np.nan),
                "floor": self.floor,
                "predicted": self.predicted.get(name, np.full(len(self.sizes), np.nan)),
            }
            if name == "output":
                with np.errstate(divide="ignore", invalid="ignore"):
                    part |= {"relative": curve.error / self.scale[0], "relative_centred": curve.error / self.scale[1]}
            parts.append(pd.DataFrame(part))
        return pd.concat(parts, ignore_index=True)

    def document(self) -> dict[str, Any]:
        """JSON document of the study, as saved and as printed by `--json`: errors, rates, predictions, options."""
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
            "scale": {"output": self.scale[0], "output_centred": self.scale[1]},
        }

    def arrays(self) -> dict[str, Array]:
        """Arrays of the measured errors, query noise and control variates by name, to be saved with the document."""
        rows = {f"{key}.{name}": rows for key, of in FIELD_OF.items() for name, rows in getattr(self, of).items()}
        return rows | {"controls": self.controls, "reference_factor": self.reference_factor}

    @classmethod
    def stored(cls, document: Mapping[str, Any], arrays: Mapping[str, Array]) -> StudyResult:
        """Study read back from a saved JSON document and arrays (inverse of `document` and `arrays`)."""
        rows: dict[str, Any] = {
            of: {name: arrays[key] for name in document["errors"] if (key := f"{prefix}.{name}") in arrays}
            for prefix, of in FIELD_OF.items()
        }
        return cls(
            sizes=parse_sizes(document["n"]),
            controls=arrays["controls"],
            reference_factor=arrays["reference_factor"],
            floor=np.asarray(document["floor"], dtype=float),
            scale=(document["scale"]["output"], document["scale"]["output_centred"]),
            predict=lambda: {name: np.asarray(curve, dtype=float) for name, curve in document["predicted"].items()},
            **{key: document[key] for key in AS_STORED},
            **rows,
        )

    @classmethod
    def load(cls, run: Run) -> StudyResult:
        """Read a study back from a run folder."""
        return cls.stored(run.document, run.arrays())

    def __repr__(self) -> str:
        return f"<StudyResult: {self.measure}, {span(self)}, {self.replicates} replicates>"

    def view(self) -> View:
        """Page of the study: error curves, fitted and asymptotic rates, local slopes, and tokens for an error."""
        horizon, one_sided, coupling = (
            short(self.theory[name]) for name in ("horizon", "horizon_one_sided", "coupling")
        )
        columns = [cells(curve.error, curve.stderr) for curve in self.shown.values()]
        values = Table("errors", ["n", *self.shown], [*zip(self.sizes, *columns, strict=True)], folded=True)
        wanted = [f"{error:.0%} relative output error: {self.tokens_for(error)}" for error in WANTED]
        return View(
            f"{self.measure}, horizon {horizon}",
            f"{self.replicates} replicates · {self.queries} queries · {span(self)} · on {self.device}",
            (
                f"Attention over n tokens of {self.measure} was compared with its exact infinite-token limit, "
                f"{span(self)}, in {self.replicates} replicates.",
                _fitted_rates(self),
                _tokens_needed(self),
            ),
            [
                Section(
                    "Error against the number of tokens",
                    "Points are measured, with 95% bars; lines are fitted power laws; dotted lines are predictions at "
                    "finite n.",
                    [_errors_figure(self), values],
                ),
                Section(
                    "Rates",
                    f"Fitted rates, and the rates that the errors tend to. Horizon {horizon}, one-sided {one_sided}, "
                    f"coupling {coupling}.",
                    [_rates_table(self)],
                ),
                Section(
                    "Has the rate converged?",
                    "Slopes between neighbouring sizes. Where they still change, the fitted rate is not yet the "
                    "asymptotic one.",
                    [_slopes_figure(self)],
                ),
                Section("How many tokens for an error?", "", [Text(wanted, listed=True)]),
            ],
            warnings=tuple(self.warnings),
            trust=trust([self], self.interrupted),
        )

    def figures(self) -> list[Figure]:
        """Figure of the error curves with 95% bars, fitted power laws and predictions, as a list."""
        return [_errors_figure(self)]


def _errors_figure(study: StudyResult) -> Figure:
    """Figure of every error against n, with fitted power law, prediction, and the numerical floor if near."""
    series = []
    for name, curve in study.shown.items():
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
    """Figure of each error's slope in log n between neighbouring sizes, with the asymptotic rates as guide lines."""
    n = np.asarray(study.sizes, dtype=float)
    middle = np.sqrt(n[1:] * n[:-1])
    series = []
    for name, curve in study.shown.items():
        slope, stderr = curve.local_slopes
        series.append(points(name, middle, slope, COLOURS[name], stderr, joined=True, positive=False))
    limits = {study.asymptotic[name]: f"{name} tends to {study.asymptotic[name]:.3f}" for name in ("output", "mean")}
    guides = [Guide(label, y=value) for value, label in limits.items()]
    return Figure("Local slopes", TOKENS, Axis("slope between neighbours"), series, guides, height=340)


def _rates_table(study: StudyResult) -> Table:
    """Table of the fitted, asymptotic and proved rates, one row for each error that views show."""
    rows: list[list[Cell]] = []
    for name, curve in study.shown.items():
        rate, slope, interval, law = curve.rate, None, "too few sizes", None
        if rate is not None:
            slope = Estimate(rate.slope, rate.stderr)
            interval = f"{rate.interval[0]:.3f} to {rate.interval[1]:.3f}"
            law = f"{rate.law} ({rate.evidence:+.1f})"
        proved = study.theory["rate_proved"] if name in PROVED else None
        rows.append([name, MEANING[name], slope, interval, study.asymptotic[name], proved, law])
    columns = ["error", "of the", "fitted rate", "95% interval", "asymptotic", "proved at least"]
    return Table("rates", [*columns, "law (evidence for a power)"], rows)


def _fitted_rates(study: StudyResult) -> str:
    """Sentence for the page with the fitted and the asymptotic rates of the study's errors."""
    fitted = {name: curve.rate for name, curve in study.shown.items() if curve.rate is not None}
    if not fitted:
        return "There are too few sizes to fit a rate; the table has the errors."
    falls = join([f"the {name} error falls like {falling(rate.slope)}" for name, rate in fitted.items()])
    logs = [name for name, rate in fitted.items() if rate.law == "log"]
    return (
        f"As n grows {falls}; for horizon {short(study.theory['horizon'])} the exponents tend to "
        f"{short(study.asymptotic['mean'])} for the moments and {short(study.asymptotic['output'])} for the output."
        + (f" A logarithm fits better for {join(logs)}." if logs else "")
    )


def _tokens_needed(study: StudyResult) -> str:
    """Sentence for the page with the number of tokens that each relative output error in `WANTED` needs."""
    needed = {error: study.tokens_for(error) for error in WANTED}
    if unknown := next((answer.why for answer in needed.values() if answer.why), ""):
        return f"The number of tokens for an error is not known: {unknown}."
    known = [
        f"{answer.n:,} tokens for {error:.0%}{' (extrapolated)' if answer.extrapolated else ''}"
        for error, answer in needed.items()
        if answer.n is not None
    ]
    if known:
        return f"For the relative output error take {join(known)}."
    return (
        f"A relative output error of 10% takes more than {needed[WANTED[0]].farthest:,} tokens, beyond the range of "
        "these sizes: measure larger ones, or lower the horizon of the head."
    )


def _smallest_error(study: StudyResult) -> float:
    return min(float(curve.error.min()) for curve in study.errors.values())


def span(study: StudyResult) -> str:
    """Range of the sizes n of a study as text: "n from 1,000 to 30,000"."""
    return f"n from {study.sizes[0]:,} to {study.sizes[-1]:,}"


def trust(studies: Sequence[StudyResult], interrupted: bool) -> list[str]:
    """Sentences for the page on how far to trust the studies: numerical floor, interrupts and caveats."""
    last, sentences = studies[-1], []
    if last.floor.any():
        floor, smallest = short(float(last.floor.max())), short(_smallest_error(last))
        sentences.append(f"Numerical floor: {floor} ({last.kernel}); the smallest measured error is {smallest}.")
    if interrupted:
        lost = "points rest on fewer replicates than requested" if last.interrupted else "the sweep ends early"
        sentences.append(f"The run was interrupted: {lost}.")
    return [*sentences, *dict.fromkeys(note for study in studies for note in study.notes)]
