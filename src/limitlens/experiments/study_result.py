"""`StudyResult`: measured error curves of a study, their fitted rates, and the predictions of theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, check_relative
from limitlens.experiments.study_view import SHOWN, WANTED, errors_figure, study_view
from limitlens.record import Run
from limitlens.report.view import Figure
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.controls import controlled
from limitlens.statistics.error_curve import ErrorCurve, TokensFor
from limitlens.statistics.estimators import denoised
from limitlens.statistics.fit import Rate

MOMENT = {"output": 2}  # the output error is a root mean square over queries and replicates; the others are E|error|
FIELD_OF = {"errors": "replicate_errors", "noise": "query_noise", "fewer": "fewer_queries"}  # by prefix in a file
AS_STORED = (
    "measure", "theory", "asymptotic", "mask_self", "queries", "seed", "device", "kernel", "interrupted", "seconds"
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult(Result):
    """Errors of attention over n tokens for nested sizes n, measured and predicted."""

    kind = "study"
    sizes: tuple[int, ...]
    replicate_errors: Mapping[str, Array]  # (replicates, sizes) by name, as measured; `uniform` only with a radius
    query_noise: Mapping[str, Array]  # (replicates, sizes) by name: excess of the squared error from using few queries
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
    predict: Callable[[], Mapping[str, Array]]  # computes `predicted`, which takes longer than a study on a GPU
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
        """Error curves that theory predicts without sampling, for Gaussian tokens."""
        return self.predict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the measured errors."""
        return tuple(self.replicate_errors)

    @property
    def replicates(self) -> int:
        """Number of replicates behind every point."""
        return len(self.replicate_errors["output"])

    @cached_property
    def errors(self) -> dict[str, ErrorCurve]:
        """The curve of every error, with query noise removed and control variates applied."""
        curves = {}
        for name in self.names:
            floor = np.zeros(1) if name == "uniform" else self.floor  # the uniform error is computed in float64
            rows = controlled(self.denoised_moments(name), self.controls)
            curves[name] = ErrorCurve.of(
                self.sizes, rows, moment=MOMENT.get(name, 1), floor=floor,
                finite_population_correction=self.reference_factor, seed=self.seed,
            )  # fmt: skip
        return curves

    @cached_property
    def relative(self) -> ErrorCurve:
        """The output error relative to the root mean square of the limit."""
        return self.errors["output"].scaled(self.scale[0])

    def error(self, name: str) -> Array:
        """The error at each size: E|error| over replicates, or the root mean square for `output`."""
        return self._curve(name).error

    def stderr(self, name: str) -> Array:
        """Standard error of `error(name)` over replicates (by the delta method for a root mean square)."""
        return self._curve(name).stderr

    def rate(self, name: str = "output") -> Rate | None:
        """The fitted rate of an error, or None where fewer than three sizes can be fitted."""
        return self._curve(name).rate

    def local_slopes(self, name: str = "output") -> tuple[Array, Array]:
        """Slopes between neighbouring sizes and their standard errors."""
        return self._curve(name).local_slopes

    def tokens_for(self, error: float, context: float = math.inf) -> TokensFor:
        """Token sample complexity: the smallest n whose relative output error is at most `error`."""
        return self.relative.tokens_for(check_relative(error), context)

    def correction(self, name: str) -> Array:
        """Factor (sizes,) by which the error `name` was corrected, for the reference and for query noise."""
        factor = 1 / self.reference_factor
        if name in self.fewer_queries:
            measured, clean = self.replicate_errors[name].mean(0), self.denoised_moments(name).mean(0)
            factor = factor * np.divide(clean, measured, out=np.ones_like(clean), where=measured > 0)
        return np.asarray(factor)

    def scatter_left(self, name: str) -> Array:
        """Share (sizes,) of the variance over replicates that is left after the control variates."""
        controlled_variance = self._curve(name).error_moments[0].var(0)
        variance = self.denoised_moments(name).var(0)
        return np.asarray(controlled_variance / np.maximum(variance, np.finfo(float).tiny))

    def denoised_moments(self, name: str) -> Array:
        """|error|^moment (replicates, sizes), corrected so that its mean over replicates is free of query noise."""
        errors = self.replicate_errors[name]
        if name in self.fewer_queries:
            errors = denoised(errors, self.query_noise.get(name), self.fewer_queries[name], self.queries, self.sizes)
        return np.asarray(errors ** MOMENT.get(name, 1))

    def _curve(self, name: str) -> ErrorCurve:
        if name not in self.errors:
            raise InputError(f"the study has no error {name!r}; expected one of {', '.join(self.names)}")
        return self.errors[name]

    def _parts(self, name: str) -> dict[str, Array]:
        """Columns of an error, one value per size, for tables and documents."""
        return {
            "value": self.error(name),
            "stderr": self.stderr(name),
            "correction": self.correction(name),
            "scatter_left": self.scatter_left(name),
        }

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per error and size, with standard error, local slope, floor and prediction."""
        parts = []
        for name in self.names:
            slopes, slope_errors = self.local_slopes(name)
            part = {
                "error": name,
                "n": self.sizes,
                **self._parts(name),
                "local_slope": np.append(slopes, np.nan),
                "local_slope_stderr": np.append(slope_errors, np.nan),
                "floor": self.floor,
                "predicted": self.predicted.get(name, np.full(len(self.sizes), np.nan)),
            }
            if name == "output":
                with np.errstate(divide="ignore", invalid="ignore"):
                    part["relative"] = self.error(name) / self.scale[0]
                    part["relative_centred"] = self.error(name) / self.scale[1]
            parts.append(pd.DataFrame(part))
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def replicate_table(self) -> pd.DataFrame:
        """Uncorrected errors of every replicate: error, replicate, n, value."""
        sizes = np.tile(self.sizes, self.replicates)
        replicate = np.repeat(np.arange(self.replicates), len(self.sizes))
        parts = [
            pd.DataFrame({"error": name, "replicate": replicate, "n": sizes, "value": errors.ravel()})
            for name, errors in self.replicate_errors.items()
        ]
        return pd.concat(parts, ignore_index=True)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables of a run folder."""
        return {"curve": self.table, "replicates": self.replicate_table}

    def document(self) -> dict[str, Any]:
        """The study as the JSON document of the contract."""
        return {
            **{key: getattr(self, key) for key in AS_STORED},
            "n": list(self.sizes),
            "errors": {name: self._parts(name) for name in self.names},
            "rates": {name: (rate := self.rate(name)) and rate.document() for name in self.names},
            "local_slopes": {
                name: dict(zip(("value", "stderr"), self.local_slopes(name), strict=True)) for name in self.names
            },
            "tokens_for": {str(error): self.tokens_for(error).document() for error in WANTED},
            "predicted": dict(self.predicted),
            "replicates": [self.replicates] * len(self.sizes),
            "floor": self.floor,
            "scale": {"output": self.scale[0], "output_centred": self.scale[1]},
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def arrays(self) -> dict[str, Array]:
        """The measured arrays, which `StudyResult.stored` reads back."""
        rows = {f"{key}.{name}": rows for key, of in FIELD_OF.items() for name, rows in getattr(self, of).items()}
        return rows | {"controls": self.controls, "reference_factor": self.reference_factor}

    @classmethod
    def stored(cls, document: Mapping[str, Any], arrays: Mapping[str, Array], **known: Any) -> StudyResult:
        """The result with this document and these arrays."""
        names = tuple(document["errors"])
        rows: dict[str, Any] = {
            of: {name: arrays[key] for name in names if (key := f"{prefix}.{name}") in arrays}
            for prefix, of in FIELD_OF.items()
        }
        return cls(
            sizes=parse_sizes(document["n"]),
            controls=arrays["controls"],
            reference_factor=arrays["reference_factor"],
            floor=np.asarray(document["floor"], dtype=float),
            scale=(document["scale"]["output"], document["scale"]["output_centred"]),
            predict=lambda: {name: np.asarray(curve, dtype=float) for name, curve in document["predicted"].items()},
            warnings=tuple(document["warnings"]),
            notes=tuple(document["notes"]),
            **{key: document[key] for key in AS_STORED},
            **rows,
            **known,
        )

    @classmethod
    def load(cls, run: Run) -> StudyResult:
        """The study of a run folder."""
        return cls.stored(run.document, run.arrays(), made=run.made)

    def figures(self) -> list[Figure]:
        """Every error with its 95% bars and its fitted power law."""
        return [errors_figure(self)]

    def __repr__(self) -> str:
        fitted = [(name, rate) for name in SHOWN if name in self.names and (rate := self.rate(name))]
        rates = ", ".join(f"{name} {rate.slope:.3f} ± {rate.stderr:.3f}" for name, rate in fitted)
        ends = f"n = {self.sizes[0]:,} to {self.sizes[-1]:,}, {self.replicates} replicates"
        return f"<StudyResult: {self.measure}, {ends}; rates: {rates or 'none'}>"

    view = study_view
