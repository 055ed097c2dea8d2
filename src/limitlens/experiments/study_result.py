"""The result of a study: error curves, their rates, and what theory says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.attention.design import LARGEST_HORIZON
from limitlens.attention.head import Head
from limitlens.curves.complexity import TokensFor, tokens_for
from limitlens.curves.controls import controlled
from limitlens.curves.estimators import denoised, kept_share
from limitlens.curves.fit import Rate, fit_rate, local_slopes, typical, typical_stderr
from limitlens.errors import Array, InputError
from limitlens.measures import Gaussian
from limitlens.measures.base import Measure
from limitlens.theory import curve as theory
from limitlens.theory import rates
from limitlens.theory.reach import Reach, reach

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

FLOOR_MARGIN = 10  # an error closer to the numerical floor than this is not fitted
MOMENT = {"output": 2}  # the output error is a root mean square over queries and replicates alike; others are E|error|


@dataclass(frozen=True)
class Curve:
    """Errors of attention over n tokens, for nested sizes n.

    Attributes
    ----------
    sizes : tuple of int
    replicate_errors : name -> (replicates, sizes) array
        `mean`, `covariance`, `covariance_operator`, `output`, and `uniform` where it was asked for.
    query_noise : name -> (replicates, sizes) array
        Expected excess in the squared errors because few queries stand for all tokens.
    controls : (replicates, sizes, F) array
        Numbers of expectation zero that move with the errors (`convergence.controls`), taken out of every average.
    reference_factor : (sizes,) array
        Measured over true error, from a finite pool or a sampled reference.
    floor : (sizes,) array
        Root mean square difference of the outputs from float64.
    scale : (float, float)
        Root mean squares of |Γ(X)| and |Γ(X) − EΓ|.
    measure, head, mask_self, queries, seed
        What was studied, and with how many queries per replicate.
    """

    sizes: tuple[int, ...]
    replicate_errors: Mapping[str, Array]
    query_noise: Mapping[str, Array]
    controls: Array
    reference_factor: Array
    floor: Array
    scale: tuple[float, float]
    measure: Measure
    head: Head
    mask_self: bool
    queries: int
    seed: int
    device: str = "cpu"
    interrupted: bool = False
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """The errors measured."""
        return tuple(self.replicate_errors)

    @property
    def replicates(self) -> int:
        """Number of replicates behind every point."""
        return len(self.replicate_errors["output"])

    @cached_property
    def reach(self) -> Reach:
        """Horizons and coupling of the head over the law."""
        return reach(self.measure.covariance, self.head.A)

    @cached_property
    def predicted(self) -> dict[str, Array]:
        """Error curves that theory predicts without sampling, for Gaussian tokens: `output`, and `mean` where it can.

        `output` is exact; `mean` follows the influence function, for centred tokens
        that attend themselves too (docs/theory.md).
        """
        if not isinstance(self.measure, Gaussian) or self.head.query_bias.any():
            return {}
        if self.reach.horizon > LARGEST_HORIZON:  # the grid behind it grows with the horizon
            return {}
        covariance, A, V = self.measure.covariance, self.head.A, self.head.V
        found = {
            "output": theory.output_error(
                covariance, A, self.sizes, V=V, mean=self.measure.mean, mask_self=self.mask_self
            )
        }
        if not self.mask_self and not self.measure.mean.any():
            mean = theory.mean_error(covariance, A, self.sizes, V)
            if mean is not None:
                found["mean"] = mean
        return found

    def correction(self, name: str) -> Array:
        """Factor (sizes,) that is in the error `name`, for the reference and for query noise."""
        factor = 1 / self.reference_factor
        if name in self.query_noise:
            factor = factor * np.sqrt(kept_share(self.replicate_errors[name], self.query_noise[name]))
        return np.asarray(factor)

    def error(self, name: str) -> Array:
        """The error at each size: E|error| over replicates, or the root mean square for `output`."""
        return typical(self._powers(name), MOMENT.get(name, 1))

    def stderr(self, name: str) -> Array:
        """Standard error of `error(name)` over replicates (by the delta method for a root mean square)."""
        return typical_stderr(self._powers(name), MOMENT.get(name, 1))

    def scatter_left(self, name: str) -> Array:
        """Share (sizes,) of the variance over replicates that is left when what is known is taken out; 1 is all."""
        rows = self._uncontrolled(name)
        return np.asarray(controlled(rows, self.controls).var(0) / np.maximum(rows.var(0), np.finfo(float).tiny))

    def rate(self, name: str = "output") -> Rate | None:
        """The fitted rate of an error, or None where fewer than three sizes can be fitted."""
        usable = self.error(name) > FLOOR_MARGIN * self.floor
        if name == "uniform":  # computed in float64
            usable[:] = True
        return fit_rate(
            np.asarray(self.sizes),
            self._powers(name),
            moment=MOMENT.get(name, 1),
            usable=usable,
            seed=self.seed,
        )

    def local_slopes(self, name: str = "output") -> tuple[Array, Array]:
        """Slopes between neighbouring sizes and their standard errors."""
        return local_slopes(
            np.asarray(self.sizes),
            self._powers(name),
            moment=MOMENT.get(name, 1),
            seed=self.seed,
        )

    def tokens_for(self, error: float) -> TokensFor | None:
        """Token sample complexity: the smallest n whose relative output error is at most `error`."""
        if self.scale[0] == 0:
            return None
        return tokens_for(
            np.asarray(self.sizes, dtype=float),
            self._powers("output") / self.scale[0] ** MOMENT["output"],
            error,
            seed=self.seed,
        )

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per error and size, with standard error, local slope, floor and prediction."""
        import pandas as pd

        parts = []
        for name in self.names:
            slopes, slope_errors = self.local_slopes(name)
            value = self.error(name)
            part = {
                "error": name,
                "n": self.sizes,
                "value": value,
                "stderr": self.stderr(name),
                "correction": self.correction(name),
                "scatter_left": self.scatter_left(name),
                "local_slope": np.append(slopes, np.nan),
                "local_slope_stderr": np.append(slope_errors, np.nan),
                "floor": self.floor,
                "predicted": self.predicted.get(name, np.full(len(self.sizes), np.nan)),
            }
            if name == "output":
                with np.errstate(divide="ignore", invalid="ignore"):
                    part["relative"] = value / self.scale[0]
                    part["relative_centred"] = value / self.scale[1]
            parts.append(pd.DataFrame(part))
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def replicate_table(self) -> pd.DataFrame:
        """Every replicate's errors as measured: error, replicate, n, value; neither corrected nor controlled."""
        import pandas as pd

        parts = []
        for name, errors in self.replicate_errors.items():
            row, column = np.indices(errors.shape)
            sizes = np.asarray(self.sizes)[column.ravel()]
            parts.append(pd.DataFrame({"error": name, "replicate": row.ravel(), "n": sizes, "value": errors.ravel()}))
        return pd.concat(parts, ignore_index=True)

    def rates_in_theory(self) -> dict[str, float]:
        """What the two horizons predict for unbounded tokens.

        `rate_sharp` is for the moments. The output error of this curve, squared over queries and replicates, has
        `rate_rms_output`; `rate_sharp_output` is that of one typical sample.
        """
        of = self.reach
        return {
            "horizon": of.horizon,
            "horizon_one_sided": of.horizon_one_sided,
            "coupling": of.coupling,
            "rate_sharp": rates.rate_sharp(of.horizon),
            "rate_sharp_output": rates.rate_sharp_output(of.horizon),
            "rate_rms_output": rates.rate_rms_output(of.horizon),
            "rate_proved": rates.rate_proved(of.coupling),
            "rate_drawn": rates.rate_drawn(of.horizon),
        }

    def asymptotic_rate(self, name: str) -> float:
        """The rate this error tends to: the sharp ones, or 1/2 where the tokens are bounded or the error is uniform."""
        if name == "uniform" or np.isfinite(self.measure.radius):
            return 0.5
        rule = rates.rate_rms_output if MOMENT.get(name) == 2 else rates.rate_sharp
        return rule(self.reach.horizon)

    def document(self) -> dict[str, Any]:
        """The study as the JSON document of the contract."""
        fitted = {name: self.rate(name) for name in self.names}
        complexity = {str(error): self.tokens_for(error) for error in (0.1, 0.05, 0.01)}
        return {
            "measure": repr(self.measure),
            "n": list(self.sizes),
            "errors": {
                name: {
                    "value": self.error(name),
                    "stderr": self.stderr(name),
                    "correction": self.correction(name),
                    "scatter_left": self.scatter_left(name),
                }
                for name in self.names
            },
            "rates": {name: None if rate is None else rate.document() for name, rate in fitted.items()},
            "local_slopes": {
                name: dict(zip(("value", "stderr"), self.local_slopes(name), strict=True)) for name in self.names
            },
            "tokens_for": {key: None if value is None else value.document() for key, value in complexity.items()},
            "theory": self.rates_in_theory(),
            "predicted": self.predicted,
            "queries": self.queries,
            "replicates": [self.replicates] * len(self.sizes),
            "floor": self.floor,
            "scale": {"output": self.scale[0], "output_centred": self.scale[1]},
            "seed": self.seed,
            "device": self.device,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "warnings": self.warnings,
        }

    def plot(self, path: str | None = None) -> Figure:
        """A log-log figure of every error with its band and its fitted rate; saved to `path` where given."""
        from limitlens.report.curve_figures import plot_curve

        return plot_curve(self, path)

    def report(self, path: str) -> Path:
        """Write the one-file HTML page."""
        from limitlens.report.page import write_report

        return write_report(self, path)

    def __str__(self) -> str:
        lines = [f"{self.measure!r}, n = {self.sizes[0]}..{self.sizes[-1]}, {self.replicates} replicates"]
        lines.append(f"{'error':<20} {'at n_max':>10} {'rate':>7} {'± se':>7}  law")
        for name in self.names:
            rate = self.rate(name)
            fitted = "      –       –  –" if rate is None else f"{rate.slope:>7.3f} {rate.stderr:>7.3f}  {rate.verdict}"
            lines.append(f"{name:<20} {self.error(name)[-1]:>10.3g} {fitted}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        from html import escape

        shown = self.table.to_html(index=False, float_format=lambda value: f"{value:.4g}")
        return f"<p>{escape(repr(self.measure))}</p>{shown}"

    def _uncontrolled(self, name: str) -> Array:
        """|error|^moment of every replicate, so corrected that its mean over replicates is."""
        if name not in self.replicate_errors:
            raise InputError(f"this curve has no error {name!r}; expected one of {', '.join(self.names)}")
        errors = self.replicate_errors[name]
        if name in self.query_noise:
            errors = denoised(errors, self.query_noise[name])
        return np.asarray((errors / self.reference_factor) ** MOMENT.get(name, 1))

    def _powers(self, name: str) -> Array:
        """The same with what the controls explain taken out."""
        return controlled(self._uncontrolled(name), self.controls)
