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
        """Whether the value is a number."""
        return not math.isnan(self.value)

    @classmethod
    def of(cls, value: float | None, stderr: float | None = None) -> Estimate:
        """An estimate from numbers that are None where they are not known."""
        return cls(math.nan if value is None else value, math.nan if stderr is None else stderr)


UNKNOWN = Estimate(math.nan)
