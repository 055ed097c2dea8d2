"""`Quantity`: one number, predicted by theory and measured."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.errors import Array
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.theory.prediction import Status


@dataclass(frozen=True)
class Quantity:
    """A predicted and a measured number; None or an estimate of NaN where one is not known."""

    predicted: float | None = None
    status: Status | None = None
    predicted_stderr: float | None = None  # where the prediction is a simulation of the limit
    exact: float | None = None  # expectation at finite n, where `predicted` is that of the scaling limit
    asymptotic: float | None = None  # formula for large β
    expansion: float | None = None  # formula in powers of 1/β
    averaging: float | None = None  # formula for many keys that share the mass
    measured: Estimate = UNKNOWN  # JSON: `measured`, `stderr` and `interval`
    quantile_in_limit: float | None = None  # share of samples of the scaling limit below `measured`

    @classmethod
    def sampled(cls, values: Array, **known: Any) -> Self:
        """The mean of independent values with its standard error; unknown where a value is NaN."""
        if np.isnan(values).any():
            return cls(**known)
        stderr = float(values.std(ddof=1) / np.sqrt(values.size))
        return cls(measured=Estimate(float(values.mean()), stderr), **known)


verified = partial(Quantity, status=Status.VERIFIED)
sampled = partial(Quantity.sampled, status=Status.VERIFIED)
