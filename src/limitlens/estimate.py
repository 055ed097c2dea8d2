"""A number with its uncertainty, as results hold it and tables show it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and the ends of its 95% interval; NaN stands for an unknown number."""

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
        """Estimate from a value and its standard error, where None stands for an unknown number."""
        return cls(math.nan if value is None else value, math.nan if stderr is None else stderr)


UNKNOWN = Estimate(math.nan)
