"""One number: what theory says of it, and what was measured."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.theory.prediction import Status


@dataclass(frozen=True)
class Quantity:
    """A predicted number beside the measured one; None where nobody asked or nobody knows."""

    predicted: float | None = None
    status: Status | None = None
    predicted_stderr: float | None = None  # where the prediction was sampled from the limit
    exact: float | None = None  # the expectation at finite n, where `predicted` is that of the scaling limit
    asymptotic: float | None = None  # simpler formulas: as β grows,
    expansion: float | None = None  # in powers of 1/β,
    averaging: float | None = None  # where many keys share the mass
    measured: float | None = None
    stderr: float | None = None
    interval: tuple[float, float] | None = None  # 95%
    quantile_in_limit: float | None = None  # share of draws from the scaling limit below the measured number

    @classmethod
    def sampled(cls, values: Array, **known: Any) -> Self:
        """The mean of independent values with its standard error; not known where a value is missing."""
        if np.isnan(values).any():
            return cls(**known)
        return cls(measured=float(values.mean()), stderr=float(values.std(ddof=1) / np.sqrt(values.size)), **known)

    @property
    def cell(self) -> Estimate:
        """The measured number as a cell of a table."""
        return Estimate.of(self.measured, self.stderr)


verified = partial(Quantity, status=Status.VERIFIED)
sampled = partial(Quantity.sampled, status=Status.VERIFIED)
