"""A number with its uncertainty: the one type for every measured value that a result holds or a table shows."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and the ends of its 95% interval; NaN where one of them is not known."""

    value: float
    stderr: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether the value is known, that is, not NaN."""
        return not math.isnan(self.value)

    @classmethod
    def of(cls, value: float | None, stderr: float | None = None) -> Estimate:
        """Estimate from a value and its standard error, each None where it is not known."""
        return cls(math.nan if value is None else value, math.nan if stderr is None else stderr)


UNKNOWN = Estimate(math.nan)
