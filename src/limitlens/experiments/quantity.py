"""`Quantity`: one number, predicted by theory and measured."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.theory.prediction import Status


@dataclass(frozen=True)
class Quantity:
    """A predicted and a measured number; None where one of them is not known."""

    predicted: float | None = None
    status: Status | None = None
    predicted_stderr: float | None = None  # where the prediction is a simulation of the limit
    exact: float | None = None  # expectation at finite n, where `predicted` is that of the scaling limit
    asymptotic: float | None = None  # formula for large β
    expansion: float | None = None  # formula in powers of 1/β
    averaging: float | None = None  # formula for many keys that share the mass
    measured: float | None = None
    stderr: float | None = None
    interval: tuple[float, float] | None = None  # 95%
    quantile_in_limit: float | None = None  # share of samples of the scaling limit below `measured`

    @classmethod
    def sampled(cls, values: Array, **known: Any) -> Self:
        """The mean of independent values with its standard error; unknown where a value is NaN."""
        if np.isnan(values).any():
            return cls(**known)
        return cls(measured=float(values.mean()), stderr=float(values.std(ddof=1) / np.sqrt(values.size)), **known)

    @property
    def estimate(self) -> Estimate:
        """The measured number with its standard error and 95% interval."""
        measured = Estimate.of(self.measured, self.stderr)
        return measured if self.interval is None else replace(measured, low=self.interval[0], high=self.interval[1])


verified = partial(Quantity, status=Status.VERIFIED)
sampled = partial(Quantity.sampled, status=Status.VERIFIED)
